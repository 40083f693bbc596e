"""Communication between the ranks of a sharded trainer: values, errors and gathered tensors."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

T = TypeVar("T")


def is_first_rank() -> bool:
    """Return True on rank 0, which writes and publishes, and without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Call ``work`` on rank 0, and return its result, which must be JSON, on every rank.

    Raises:
        RuntimeError: on the other ranks, if ``work`` failed; rank 0 raises the original error.
    """
    failure, message = None, {}
    if is_first_rank():
        try:
            message = {"value": work()}
        except Exception as error:  # every kind: the other ranks wait for the broadcast
            failure, message = error, {"error": f"{type(error).__name__}: {error}"}
    told = _broadcast(message)
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


def on_every_rank(work: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Call ``work`` on each rank of a gloo group, and return all results, JSON, in rank order.

    Without a group, only this process calls it.

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


def _broadcast(message: dict[str, Any]) -> dict[str, Any]:
    """Broadcast rank 0's message to all ranks, with any backend."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return message
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, src=0)
    if not is_first_rank():
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    told: dict[str, Any] = json.loads(bytes(data.cpu().numpy()))
    return told


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


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
