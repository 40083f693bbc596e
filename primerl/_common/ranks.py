"""Communication between the ranks of a sharded trainer: values, errors and gathered tensors."""

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from primerl._common.progress import last_report
from primerl._common.waiting import wait_for_all, wait_for_first

T = TypeVar("T")


def is_first_rank() -> bool:
    """Return True on rank 0, which writes and publishes, and without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def require_group() -> None:
    """Check that a process that torchrun started among others has joined them.

    Raises:
        RuntimeError: there are several ranks, but no process group.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"this is one of {ranks} ranks (WORLD_SIZE), but it has not joined the others: enter "
            "`with parallel.process_group():` first"
        )


def gloo_group(*, timeout_s: float) -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks, which all must call; None if this is the only process.

    ``timeout_s`` is how long the ranks wait for each other in one of its collectives.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def on_first_rank(
    work: Callable[[], Any], group: dist.ProcessGroup | None = None, *, what: str | None = None
) -> Any:
    """Call ``work`` on rank 0, and return its result, which must be JSON, on every rank.

    The ranks communicate through ``group``, a gloo group, or through the default group. The other
    ranks wait for rank 0 outside of collectives. ``what`` names what they wait for: by default, the
    end of what they reported last.

    Raises:
        RuntimeError: on the other ranks, if ``work`` failed; rank 0 raises the original error.
    """
    failure, message = None, "null"
    if is_first_rank():
        try:
            message = json.dumps({"value": work()})
        except Exception as error:  # every kind: the other ranks wait for the broadcast
            failure, message = error, json.dumps({"error": f"{type(error).__name__}: {error}"})
    wait_for_first(what or f"the end of {last_report()!r} on rank 0", group)
    told = json.loads(_broadcast(message, group))
    if failure is not None:
        raise failure
    if "error" in told:
        raise RuntimeError(f"rank 0 failed: {told['error']}")
    return told["value"]


def on_first_rank_gathering(work: Callable[[], T], gathered: Iterator[object]) -> T | None:
    """Call ``work`` on rank 0 while the other ranks take part in its collectives.

    ``gathered`` is an iterator whose steps are collectives; ``work`` consumes it on rank 0. Every
    rank then iterates to the end, also after a failure, so that no rank waits in a collective.
    Returns the result on rank 0, and None on the others.

    Raises:
        RuntimeError: on the other ranks, if ``work`` failed; rank 0 raises the original error.
    """
    results: list[T] = []
    failure: Exception | None = None
    if is_first_rank():
        try:
            results.append(work())
        except Exception as error:  # every kind: the other ranks wait in the next collective
            failure = error
    for _ in gathered:
        pass

    def outcome() -> None:
        if failure is not None:
            raise failure

    on_first_rank(outcome)
    return results[0] if results else None


def on_every_rank_gathering(
    work: Callable[[], Any],
    gathered: Iterator[object],
    group: dist.ProcessGroup | None,
    *,
    what: str | None = None,
) -> list[Any]:
    """Call ``work`` on each rank, which consumes the collectives ``gathered``.

    Every rank iterates to the end, also after a failure, so that no rank waits in a collective.
    Returns the results of all ranks, JSON, in rank order; without a group, only this process's.
    ``what`` names what the ranks then wait for, see ``on_every_rank``.

    Raises:
        RuntimeError: ``work`` failed on another rank; the failing rank raises the original error.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # every kind: the other ranks wait in the next collective
        failure = error
    for _ in gathered:
        pass
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    if group is not None:
        wait_for_all(what or f"the end of {last_report()!r} on all ranks", group)
    told = exchange([result, reason], group)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(told):
        if why is not None:
            raise RuntimeError(f"rank {rank} failed: {why}")
    return [one for one, _ in told]


def on_every_rank(
    work: Callable[[], Any], group: dist.ProcessGroup | None, *, what: str | None = None
) -> list[Any]:
    """Call ``work`` on each rank of a gloo group, and return all results, JSON, in rank order.

    Without a group, only this process calls it. Ranks wait for the slowest outside of collectives.
    ``what`` names what they wait for: by default, the end of what they reported last.

    Raises:
        RuntimeError: ``work`` failed on a rank; all ranks raise, and the message names that rank.
        ValueError: the same, if ``work`` raised a ValueError.
    """
    result, failure, cause = None, None, None
    try:
        result = work()
    except (OSError, ValueError, RuntimeError) as error:
        if group is None and isinstance(error, RuntimeError):
            raise
        cause, failure = error, [isinstance(error, ValueError), f"{error}"]
    if group is not None:
        wait_for_all(what or f"the end of {last_report()!r} on all ranks", group)
    told = exchange([result, failure], group)
    for rank, (_, why) in enumerate(told):
        if why is not None:
            named = "" if group is None else f"rank {rank}: "
            raise (ValueError if why[0] else RuntimeError)(named + why[1]) from cause
    return [one for one, _ in told]


def exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks of a gloo group, which must be JSON, in rank order."""
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


def _broadcast(message: str, group: dist.ProcessGroup | None) -> str:
    """Broadcast rank 0's message to all ranks, with any backend."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return message
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    data = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, src=0, group=group)
    if not is_first_rank():
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0, group=group)
    return bytes(data.cpu().numpy()).decode()


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name; a tensor shared under two names once."""
    distinct = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in model.state_dict().items() if name in distinct}


def whole_tensors(
    model: nn.Module, wanted: Callable[[str], Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and saved buffer by name, gathered one at a time; shared ones once.

    Gathering a sharded tensor is a collective: every rank iterates to the end.

    Args:
        model: the model, sharded or not.
        wanted: returns whether a tensor of this name is wanted; by default all are.
    """
    for name, tensor in saved_tensors(model).items():
        if wanted is None or wanted(name):
            yield name, whole(tensor)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded: a collective of the ranks that hold its shards."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements) - 1):  # one mesh dimension at a time
        if not placements[dimension].is_replicate():
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def identity(x: Tensor) -> Tensor:
    """Return the tensor unchanged: the ``all_sum`` of a rank that shares no documents."""
    return x


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
