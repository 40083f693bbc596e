"""What ranks tell each other about a save."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Each rank's value, in JSON's types, on every rank of a gloo group, in order."""
    if group is None:
        return [value]
    ranks = dist.get_world_size(group)
    text = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    theirs = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(theirs, mine, group=group)
    return [
        json.loads(bytes(one[: int(size)].numpy())) for one, size in zip(theirs, sizes, strict=True)
    ]


def together(act: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """What ``act`` returned on each rank, in JSON's types, once it returned on all.

    Raises:
        RuntimeError: it failed on a rank; all ranks raise, and name it.
        ValueError: as well, by a ValueError.
    """
    result, failure, cause = None, None, None
    try:
        result = act()
    except (OSError, ValueError, RuntimeError) as error:
        if group is None and isinstance(error, RuntimeError):
            raise
        cause, failure = error, [isinstance(error, ValueError), f"{error}"]
    told = exchange([result, failure], group)
    for rank, (_, why) in enumerate(told):
        if why is not None:
            of_rank = "" if group is None else f"rank {rank}: "
            raise (ValueError if why[0] else RuntimeError)(of_rank + why[1]) from cause
    return [one for one, _ in told]
