"""Tensors without values, by which a run is planned before it starts."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: not one of the meta device, nor an imagined (fake) one."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
