"""Values on the way between ranks: batches from the first rank to all, sums over all."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from primerl._progress import report
from primerl.parallel.device_mesh import Mesh

T = TypeVar("T")


def scatter(
    batches: Sequence[Sequence[T]] | None,
    kind: type[T],
    mesh: Mesh | None = None,
    *,
    device: torch.device | None = None,
) -> list[T]:
    """Give each rank its micro-batches, which only rank 0 has.

        packed = packing.pack(samples, ..., ranks=mesh.batches)  # of no samples but on rank 0
        for batch in parallel.scatter(packed, packing.PackedBatch, mesh, device=world.device): ...

    Rank r gets ``batches[r]``, but with ``mesh.cp > 1`` part ``r % cp`` of ``batches[r // cp]``, as
    ``batch.split(cp)`` divides it. Tensors travel as their bytes, exactly; a field may also be None
    or a plain number or text.

    Args:
        batches: on rank 0 ``mesh.batches`` lists, equally long; on the others empty lists or None.
        kind: the attrs class of a batch.
        mesh: None: a list for each rank.
        device: where the batches go, by their method ``to``; None: they stay on the CPU.

    Raises:
        ValueError: a rank other than the first passes batches, or the first none, another number of
            lists, or lists of different lengths; a field cannot travel; or batches are to be
            divided or moved and their class has no ``split`` or ``to``.
    """
    cp = mesh.cp if mesh else 1
    any_kind: type[Any] = kind
    if not attrs.has(any_kind):
        raise ValueError(f"{kind.__name__} is no attrs class; expected one whose fields travel")
    if cp > 1 and not hasattr(kind, "split"):
        raise ValueError(
            f"{kind.__name__} has no split(parts), by which each batch would be divided among "
            f"cp={cp} ranks; use a mesh with cp=1"
        )
    if device is not None and not hasattr(kind, "to"):
        raise ValueError(f"{kind.__name__} has no to(device); leave its batches on the CPU")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank > 0:
        if any(batches or ()):
            raise ValueError(f"rank {rank} passes batches; only rank 0 may have any")
        return _moved(_receive(kind), device)
    checked = _checked(batches, world_size // cp)
    report("training", f"micro-batches: {len(checked[0])}")
    if cp > 1:
        divided = [[one.split(cp) for one in mine] for mine in checked]  # type: ignore[attr-defined]
        checked = [[parts[part] for parts in of_list] for of_list in divided for part in range(cp)]
    if world_size > 1:
        # All are encoded before any is sent, so that a field that cannot travel stops every rank.
        _send([_encode(mine) for mine in checked[1:]])
    return _moved(checked[0], device)


def _moved(batches: Sequence[Any], device: torch.device | None) -> list[Any]:
    return list(batches) if device is None else [batch.to(device) for batch in batches]


@overload
def all_sum(x: Tensor | float) -> Tensor: ...
@overload
def all_sum(x: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
def all_sum(x: Tensor | float | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """The sum of ``x`` over all ranks, on each of them; ``x`` itself in a world of one.

    No gradient flows through it. A Python number becomes a CPU tensor of 64 bits. Tensors by name
    are added in one collective, in float64; every rank must have the same names and shapes.
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
            "rank 0 passes no batches. In a world of one that is every process: under torchrun, "
            "call scatter within `with parallel.process_group():`"
        )
    counts = [len(mine) for mine in batches]
    if len(counts) != lists:
        raise ValueError(
            f"there are batches for {len(counts)} ranks, but {lists} ranks; pack with "
            f"ranks={lists}, which is mesh.batches"
        )
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks would get {counts} micro-batches; all need equally many, because each "
            "micro-step is a collective of all ranks"
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
    header_bytes, body_bytes = sizes.tolist()
    message = torch.empty(header_bytes + body_bytes, dtype=torch.uint8)
    dist.recv(message, src=0)
    return _decode(message[:header_bytes], message[header_bytes:], kind)


def _encode(batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """A header (JSON: each field's dtype and shape, or its plain value) and the tensors' bytes."""
    header: list[dict[str, Any]] = []
    parts = [torch.zeros(0, dtype=torch.uint8)]
    for batch in batches:
        fields: dict[str, Any] = {}
        for field in attrs.fields(type(batch)):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                fields[field.alias] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
                parts.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
            elif value is None or isinstance(value, bool | int | float | str):
                fields[field.alias] = value
            else:
                raise ValueError(
                    f"{type(batch).__name__}.{field.name} is a {type(value).__name__}; expected "
                    "a tensor, a number, text or None"
                )
        header.append(fields)
    text = bytearray(json.dumps(header), "utf-8")
    return torch.frombuffer(text, dtype=torch.uint8), torch.cat(parts)


def _decode(header: Tensor, body: Tensor, kind: type[T]) -> list[T]:
    batches, start = [], 0
    for fields in json.loads(bytes(header.numpy())):
        for name, value in fields.items():
            if isinstance(value, list):
                dtype, shape = getattr(torch, value[0]), value[1]
                size = math.prod(shape) * dtype.itemsize
                # A copy of its own is aligned, and does not keep the whole message alive.
                rows = body[start : start + size].clone()
                fields[name], start = rows.view(dtype).reshape(shape), start + size
        batches.append(kind(**fields))
    return batches
