"""Matching new weights with the tensors of the served model."""

from collections.abc import Mapping

from torch import Tensor, nn


def match_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each served tensor with its new value: ``(served, new)``.

    The names are those of ``model.state_dict()``: parameters and saved buffers. A tensor that two
    names share needs only one of them.

    Raises:
        ValueError: a name is unknown, a shape differs, or a tensor is missing.
    """
    served = model.state_dict()
    pairs, covered = [], set()
    for name, new in tensors.items():
        if name not in served or served[name].shape != new.shape:
            expected = tuple(served[name].shape) if name in served else "no such tensor"
            raise ValueError(
                f"weights for {name!r} have shape {tuple(new.shape)}; the served model has "
                f"{expected}"
            )
        covered.add(served[name].data_ptr())
        pairs.append((served[name], new))
    missing = [name for name, tensor in served.items() if tensor.data_ptr() not in covered]
    if missing:
        raise ValueError(
            f"no weights were given for {', '.join(missing[:5])} ({len(missing)} tensors)"
        )
    return pairs
