"""Freezing parameters that a loss on the model's outputs cannot train."""

from torch import nn


def freeze_indexer(model: nn.Module) -> list[str]:
    """Freeze the indexers of sparse attention, and return the names of their parameters.

    The choice of an indexer has no gradient, so a policy loss doesn't train its parameters. With
    gradients of zero, as after ``zero_grad(set_to_none=False)``, weight decay would still shrink
    them. Frozen (``requires_grad`` false), they stay bitwise the same, and are still published and
    saved. Call it before or after ``shard``, and before the optimizer is made, of the parameters
    that require a gradient.

    Raises:
        ValueError: the model has no indexer.
    """
    names = [
        f"{name}.{parameter_name}"
        for name, module in model.named_modules()
        if name.split(".")[-1] == "indexer"
        for parameter_name, _ in module.named_parameters()
    ]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no indexer to freeze: none of its modules is so named"
        )
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names
