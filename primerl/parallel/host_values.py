"""Communication of batches and results between ranks: scatter, gather and sums."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from primerl._common.host_memory import HostMemory
from primerl._common.progress import report
from primerl._common.ranks import on_first_rank
from primerl._common.waiting import wait_for_first
from primerl.parallel.device_mesh import Mesh

T = TypeVar("T")


def scatter(
    batches: Sequence[Sequence[T]] | None,
    kind: type[T],
    mesh: Mesh | None = None,
    *,
    device: torch.device | None = None,
) -> list[T]:
    """Send each rank its micro-batches from rank 0.

        packed = packing.pack(samples, ..., ranks=mesh.batches)  # only rank 0 has samples
        for batch in parallel.scatter(packed, packing.PackedBatch, mesh, device=world.device): ...

    Rank r gets ``batches[r]``. With ``mesh.cp > 1``, it gets part ``r % cp`` of each batch in
    ``batches[r // cp]``, as ``batch.split(cp)`` divides it. Tensors are sent as raw bytes, so
    values stay exact. A field may also be None, a number, a bool or text.

    Args:
        batches: on rank 0, ``mesh.batches`` lists of equal length; on other ranks, empty lists or
            None.
        kind: the attrs class of a batch.
        mesh: the mesh; without one, ``batches`` has one list per rank.
        device: where to move the batches, by their method ``to``; None leaves them on the CPU.

    Raises:
        ValueError: a rank other than 0 passes batches; rank 0 passes none, the wrong number of
            lists, or lists of different lengths; a field has a type that cannot be sent; or batches
            must be divided or moved, but their class has no ``split`` or ``to``.
    """
    cp = mesh.cp if mesh else 1
    any_kind: type[Any] = kind
    if not attrs.has(any_kind):
        raise ValueError(f"{kind.__name__} is not an attrs class; scatter sends attrs fields")
    if cp > 1 and not hasattr(kind, "split"):
        raise ValueError(
            f"{kind.__name__} has no split(parts), which is needed to divide each batch "
            f"among cp={cp} ranks; use a mesh with cp=1"
        )
    if device is not None and not hasattr(kind, "to"):
        raise ValueError(
            f"{kind.__name__} has no to(device); pass device=None to leave its batches on the CPU"
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank > 0:
        if any(batches or ()):
            raise ValueError(f"rank {rank} passes batches; only rank 0 may pass any")
        wait_for_first("a batch")
        received = _receive(kind)
        report("training", f"micro-batches: {len(received)}")
        return _moved(received, device)
    checked = _checked(batches, world_size // cp)
    report("training", f"micro-batches: {len(checked[0])}")
    if cp > 1:
        divided = [[one.split(cp) for one in mine] for mine in checked]  # type: ignore[attr-defined]
        checked = [[parts[part] for parts in of_list] for of_list in divided for part in range(cp)]
    if world_size > 1:
        wait_for_first("a batch")
        # Encode every batch before sending any, so that a field that cannot be sent stops all
        # ranks.
        _send([_encode([_fields(batch) for batch in mine]) for mine in checked[1:]])
    return _moved(checked[0], device)


def gather(
    rows: Sequence[Mapping[str, Tensor]], mesh: Mesh | None = None
) -> list[list[dict[str, Tensor]]]:
    """Collect on rank 0 the results of every rank for the rows of its micro-batches.

        rows = parallel.gather(statistics.end_minibatch(), mesh)

    This is the inverse of ``scatter``. Call it on all ranks, with equally many micro-batches.

    Args:
        rows: one mapping per micro-batch of this rank, from names to tensors whose first axis is
            the rows of the micro-batch.
        mesh: as for ``scatter``.

    Returns:
        On rank 0, one list per list that was passed to ``scatter``, as CPU tensors. The parts of
        context-parallel ranks are concatenated, so padding rows come last. On other ranks, an
        empty list.

    Raises:
        ValueError: ranks have different numbers of micro-batches.
    """
    mine: list[dict[str, Tensor]] = [{} for _ in rows]
    values = (((n, name), x.detach()) for n, one in enumerate(rows) for name, x in one.items())
    for (n, name), value in HostMemory().copied(values):  # waits for a GPU once
        mine[n][name] = value
    if not dist.is_initialized():
        return [mine]
    header, body = _encode(mine)
    if dist.get_rank() > 0:
        dist.gather(torch.tensor([len(header), len(body)]), dst=0)
        dist.send(torch.cat([header, body]), dst=0)
        return []
    sizes = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.gather(torch.tensor([len(header), len(body)]), sizes, dst=0)
    of_ranks = [
        mine,
        *(_receive_from(rank, *sizes[rank].tolist()) for rank in range(1, len(sizes))),
    ]
    counts = [len(of_rank) for of_rank in of_ranks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks passed rows of {counts} micro-batches; expected the same number on every rank"
        )
    cp = mesh.cp if mesh else 1
    return [
        [_joined(parts) for parts in zip(*of_ranks[first : first + cp], strict=True)]
        for first in range(0, len(of_ranks), cp)
    ]


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _moved(batches: Sequence[Any], device: torch.device | None) -> list[Any]:
    return list(batches) if device is None else [batch.to(device) for batch in batches]


def from_first_rank(value: T) -> T:
    """Return rank 0's ``value`` on every rank; it must be JSON, such as a number, bool or text.

    The other ranks wait for rank 0 outside of collectives (``wait_for_first``).

    Raises:
        RuntimeError: rank 0 did not call it in time.
        TypeError: the value is not JSON; other ranks then raise RuntimeError.
    """
    received: T = on_first_rank(lambda: value, what="a value of rank 0")
    return received


@overload
def all_sum(x: Tensor | float) -> Tensor: ...
@overload
def all_sum(x: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
def all_sum(x: Tensor | float | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Sum ``x`` over all ranks and return the sum on every rank; on one rank, return a copy.

    No gradient flows through it. A Python number becomes a 64-bit CPU tensor. A mapping of tensors
    is summed by a single collective, in float64; all ranks must pass the same names and shapes.
    """
    if isinstance(x, Mapping):
        return _sum_by_name(x)
    if isinstance(x, Tensor):
        total = x.detach().clone()
    else:
        total = torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def _sum_by_name(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = sorted(x)
    if not names:
        return {}
    flat = all_sum(torch.cat([x[name].detach().double().reshape(-1) for name in names]))
    parts = torch.split(flat, [x[name].numel() for name in names])
    return {name: part.reshape(x[name].shape) for name, part in zip(names, parts, strict=True)}


def _checked(batches: Sequence[Sequence[T]] | None, lists: int) -> Sequence[Sequence[T]]:
    if batches is None:
        raise ValueError(
            "rank 0 passes no batches. Without a process group every process is rank 0: under "
            "torchrun, call scatter within `with parallel.process_group():`"
        )
    counts = [len(mine) for mine in batches]
    if len(counts) != lists:
        raise ValueError(
            f"batches has {len(counts)} lists, expected {lists}; call packing.pack with "
            f"ranks={lists}, the value of mesh.batches"
        )
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks would get {counts} micro-batches; all need equally many, because all ranks "
            "run each micro-step together"
        )
    return batches


def _send(messages: Sequence[tuple[Tensor, Tensor]]) -> None:
    sizes = [torch.tensor([len(header), len(body)]) for header, body in messages]
    mine = torch.zeros(2, dtype=torch.int64)
    dist.scatter(mine, [mine, *sizes], src=0)
    for rank, message in enumerate(messages, start=1):
        dist.send(torch.cat(message), dst=rank)


def _receive(kind: type[T]) -> list[T]:
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.scatter(sizes, src=0)
    return [kind(**fields) for fields in _receive_from(0, *sizes.tolist())]


def _receive_from(rank: int, header_bytes: int, body_bytes: int) -> list[dict[str, Any]]:
    message = torch.empty(header_bytes + body_bytes, dtype=torch.uint8)
    dist.recv(message, src=rank)
    return _decode(message[:header_bytes], message[header_bytes:])


def _fields(batch: Any) -> dict[str, Any]:
    """Return the fields of a batch, keyed by the names of its constructor's arguments."""
    fields = {}
    for field in attrs.fields(type(batch)):
        value = getattr(batch, field.name)
        if not (value is None or isinstance(value, Tensor | bool | int | float | str)):
            raise ValueError(
                f"{type(batch).__name__}.{field.name} is a {type(value).__name__}; expected "
                "a tensor, a number, text or None"
            )
        fields[field.alias] = value
    return fields


def _encode(values: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Serialize to a JSON header (tensors' dtypes and shapes, plain values) and tensor bytes."""
    header: list[dict[str, Any]] = []
    parts = [torch.zeros(0, dtype=torch.uint8)]
    for one in values:
        described = dict(one)
        for name, value in one.items():
            if isinstance(value, Tensor):
                described[name] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
                flat = value.detach().cpu().contiguous()
                # A one-element tensor is contiguous with any stride, but view needs stride 1.
                flat = flat.as_strided((flat.numel(),), (1,))
                parts.append(flat.view(torch.uint8))
        header.append(described)
    text = bytearray(json.dumps(header), "utf-8")
    return torch.frombuffer(text, dtype=torch.uint8), torch.cat(parts)


def _decode(header: Tensor, body: Tensor) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = json.loads(bytes(header.numpy()))
    start = 0
    for one in values:
        for name, value in one.items():
            if isinstance(value, list):
                dtype, shape = getattr(torch, value[0]), value[1]
                size = math.prod(shape) * dtype.itemsize
                # Copy, for alignment and so that the tensor does not keep the whole message alive.
                rows = body[start : start + size].clone()
                one[name], start = rows.view(dtype).reshape(shape), start + size
    return values
