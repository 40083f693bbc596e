"""Tensors without values, by which a run is planned before it starts."""

from jaxtyping import Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: not one of the meta device, nor an imagined (fake) one."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def group_ends(ends: Int[Tensor, " e"], rows: int) -> list[int]:
    """Where groups of ``rows`` rows end; without values, all groups are equally large."""
    if has_values(ends):
        found: list[int] = ends.tolist()
        return found
    return [rows * (group + 1) // len(ends) for group in range(len(ends))]
