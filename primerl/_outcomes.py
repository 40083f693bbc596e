"""What rank 0 of a sharded trainer found, told to the other ranks."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from primerl._gathering import is_first_rank

T = TypeVar("T")


def on_first_rank(make: Callable[[], Any]) -> Any:
    """What ``make`` returns on rank 0, builtins, on every rank.

    Raises:
        RuntimeError: it failed on rank 0, on every other rank; rank 0 raises the error itself.
    """
    failure, message = None, {}
    if is_first_rank():
        try:
            message = {"value": make()}
        except Exception as error:  # any: the other ranks wait for this one's answer
            failure, message = error, {"error": f"{type(error).__name__}: {error}"}
    told = _from_first_rank(message)
    if failure is not None:
        raise failure
    if "error" in told:
        raise RuntimeError(f"rank 0 failed: {told['error']}")
    return told["value"]


def together(work: Callable[[], T], gathered: Iterator[object]) -> T | None:
    """Do ``work`` on rank 0, which draws from ``gathered``, while the others help to gather.

    Every rank draws to the end, so that none waits for another in a collective, and all learn how
    it ended. Returns None on ranks other than 0.

    Raises:
        RuntimeError: it failed on rank 0, on every other rank; rank 0 raises the error itself.
    """
    results: list[T] = []

    def ended() -> None:
        if failure is not None:
            raise failure

    failure = None
    if is_first_rank():
        try:
            results.append(work())
        except Exception as error:  # any: the other ranks help to gather, and wait for the end
            failure = error
    for _ in gathered:
        pass
    on_first_rank(ended)
    return results[0] if results else None


def _from_first_rank(message: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's message, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return message
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    content = json.dumps(message).encode() if is_first_rank() else b""
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, src=0)
    data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if is_first_rank():
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    told: dict[str, Any] = json.loads(bytes(data.cpu().numpy()))
    return told
