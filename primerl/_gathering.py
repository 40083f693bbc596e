"""A model's tensors, whole, whether or not they are sharded."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def whole_tensors(
    model: nn.Module, wanted: Callable[[str], Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and saved buffer by name, one at a time; a shared one once.

    Gathering a sharded tensor is a collective: every rank iterates to the end.

    Args:
        model: sharded or not.
        wanted: says of a name whether it is; all are by default.
    """
    distinct = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in model.state_dict().items():
        if name in distinct and (wanted is None or wanted(name)):
            yield name, whole(tensor)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, gathered: a collective of the ranks that hold its parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements) - 1):  # one at a time, the last that was divided first
        if not placements[dimension].is_replicate():
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def is_first_rank() -> bool:
    """Whether this rank writes and publishes: rank 0, also of a world of one."""
    return not dist.is_initialized() or dist.get_rank() == 0
