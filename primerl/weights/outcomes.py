"""What rank 0 tells the other ranks of a sharded trainer about a publication."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from primerl.weights.gathering import is_first_rank

T = TypeVar("T")


def from_first_rank(flags: list[bool]) -> list[bool]:
    """Rank 0's answers, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flags
    told = torch.tensor(flags, dtype=torch.uint8, device=_device())
    dist.broadcast(told, src=0)
    return [bool(flag) for flag in told.tolist()]


def together(work: Callable[[], T], gathered: Iterator[object]) -> T | None:
    """Do ``work`` on rank 0, which draws from ``gathered``, while the others help to gather.

    Every rank draws to the end, so that none waits for another in a collective, and all learn how
    it ended. Returns None on ranks other than 0.

    Raises:
        RuntimeError: it failed on rank 0, on every other rank; rank 0 raises the error itself.
    """
    result, failure = None, None
    if is_first_rank():
        try:
            result = work()
        except Exception as error:  # any: the other ranks wait for this one's answer
            failure = error
    for _ in gathered:
        pass
    if dist.is_initialized() and dist.get_world_size() > 1:
        message = _told(str(failure) if failure else "")
        if message and failure is None:
            raise RuntimeError(f"publishing failed on rank 0: {message}")
    if failure is not None:
        raise failure
    return result


def _told(message: str) -> str:
    """Rank 0's message, on every rank."""
    data = torch.tensor(list(message.encode()), dtype=torch.uint8, device=_device())
    size = torch.tensor([len(data)], device=_device())
    dist.broadcast(size, src=0)
    if not is_first_rank():
        data = torch.empty(int(size), dtype=torch.uint8, device=_device())
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def _device() -> torch.device:
    """Where the process group's tensors live."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
