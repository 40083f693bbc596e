"""Collectives under names that every supported torch has, and a functional all-to-all.

Selective checkpointing can't keep what ``torch.distributed`` writes into an existing tensor, so
``all_to_all`` returns a new one.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Names in torch 2.13, where the older ones are deprecated, and in torch 2.11.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# A torch operator takes the name of a group, not the group.
_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def gather_rows_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks of a group, which have equally many, in order; without gradient."""
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[r]`` rows, in order, to rank r of the group; return ``received[r]`` from each."""
    _GROUPS[group.group_name] = group
    result: Tensor = _all_to_all(x, sent, received, group.group_name)
    return result


@torch.library.custom_op("primerl::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_GROUPS[group])
    return out


@_all_to_all.register_fake
def _shape(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(sum(received), *x.shape[1:])
