"""Collectives: by the names of every version of torch, and one that recomputation can keep.

Those of ``torch.distributed`` write into a tensor, which selective checkpointing cannot keep, so
``all_to_all`` returns what arrives.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Names of torch 2.13, where the others are deprecated, and of torch 2.11.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# An operator of torch takes no group, but its name.
_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows: ``sent[r]`` of them, in order, to rank r of the group; ``received[r]`` from it."""
    _GROUPS[group.group_name] = group
    result: Tensor = _all_to_all(x, sent, received, group.group_name)
    return result


@torch.library.custom_op("primerl::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_GROUPS[group])
    return out
