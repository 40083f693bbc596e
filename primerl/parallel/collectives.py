"""Collectives that return what arrives, so that recomputation can keep it instead of asking again.

Those of ``torch.distributed`` write into a tensor, which selective checkpointing cannot keep.
"""

from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

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
