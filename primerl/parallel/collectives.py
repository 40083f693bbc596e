"""Collectives that work with every supported torch version, and a functional all-to-all.

``all_to_all`` returns a new tensor, because selective checkpointing can't save results that
``torch.distributed`` writes into an existing one.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed these functions and deprecated the old names; torch 2.11 has only the old ones.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Process groups by name: a torch operator can take a string as an argument, but not a group.
_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def gather_rows_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather rows in rank order, without gradient; all ranks must have equally many rows."""
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
