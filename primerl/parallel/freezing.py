"""Parameters that a loss of the model's outputs does not train."""

from torch import nn


def freeze_indexer(model: nn.Module) -> list[str]:
    """Take the indexers of sparse attention out of training, and return their parameters' names.

    What an indexer chooses has no gradient, so a policy loss leaves its parameters without one. An
    optimizer that skips those never moves them; one that is given zeros instead, as after
    ``zero_grad(set_to_none=False)``, would let weight decay shrink them unseen. Frozen ones
    (``requires_grad`` false) stay as they are, bit for bit; they are still published and saved.
    Call it before or after ``shard``, and before the optimizer is made, of the parameters that
    require a gradient.

    Raises:
        ValueError: the model has no indexer.
    """
    names = [
        f"{name}.{of_parameter}"
        for name, module in model.named_modules()
        if name.split(".")[-1] == "indexer"
        for of_parameter, _ in module.named_parameters()
    ]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no indexer to freeze: none of its modules is so named"
        )
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names
