"""What the ranks of a sharded trainer tell each other, and gather from each other."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this rank writes and publishes: rank 0, also of a world of one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(work: Callable[[], Any]) -> Any:
    """What ``work`` returns on rank 0, in JSON's types, on every rank.

    Raises:
        RuntimeError: it failed on rank 0, on every other rank; rank 0 raises the error itself.
    """
    failure, message = None, {}
    if is_first_rank():
        try:
            message = {"value": work()}
        except Exception as error:  # any: the other ranks wait for this one's answer
            failure, message = error, {"error": f"{type(error).__name__}: {error}"}
    told = _broadcast(message)
    if failure is not None:
        raise failure
    if "error" in told:
        raise RuntimeError(f"rank 0 failed: {told['error']}")
    return told["value"]


def on_first_rank_gathering(work: Callable[[], T], gathered: Iterator[object]) -> T | None:
    """Do ``work`` on rank 0, which draws from ``gathered``, while the others help to gather.

    Every rank draws to the end, so that none waits for another in a collective, and all learn
    whether it failed. Returns None on ranks other than 0.

    Raises:
        RuntimeError: it failed on rank 0, on every other rank; rank 0 raises the error itself.
    """
    results: list[T] = []
    failure: Exception | None = None
    if is_first_rank():
        try:
            results.append(work())
        except Exception as error:  # any: the other ranks help to gather, and wait for the end
            failure = error
    for _ in gathered:
        pass

    def outcome() -> None:
        if failure is not None:
            raise failure

    on_first_rank(outcome)
    return results[0] if results else None


def on_every_rank(work: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """What ``work`` returned on each rank of a gloo group, in JSON's types, in order.

    Raises:
        RuntimeError: it failed on a rank; all ranks raise, and name it.
        ValueError: as well, by a ValueError.
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


def _broadcast(message: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's message, on every rank of the world, whatever its backend."""
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
    """Parameters and saved buffers by name; one that is shared under two names once."""
    distinct = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in model.state_dict().items() if name in distinct}


def whole_tensors(
    model: nn.Module, wanted: Callable[[str], Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and saved buffer by name, whole, one at a time; a shared one once.

    Gathering a sharded tensor is a collective: every rank iterates to the end.

    Args:
        model: sharded or not.
        wanted: says of a name whether it is; all are by default.
    """
    for name, tensor in saved_tensors(model).items():
        if wanted is None or wanted(name):
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


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
