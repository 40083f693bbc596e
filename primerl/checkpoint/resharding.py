"""Which rectangles of which tensors this rank writes and reads, by DCP's planners.

``torch.distributed.checkpoint`` knows where the shards of DTensors lie, of FSDP2, of experts and
of both at once. Its storage is not used: its metadata and its plain values are pickles.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from primerl.checkpoint.pieces import Piece


def my_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """What this rank writes, without a copy: its shards; on rank 0 also what is replicated."""
    mine = {name: tensor.detach() for name, tensor in tensors.items() if _writes(name, tensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine)
    pieces = []
    for item in planner.create_local_plan().items:
        described, values = item.tensor_data, planner.resolve_data(item)
        assert described is not None
        assert isinstance(values, Tensor)
        if values.numel() or not mine[item.index.fqn].numel():
            piece = Piece(
                name=item.index.fqn,
                shape=tuple(described.size),
                offsets=tuple(described.chunk.offsets),
                values=values,
            )
            pieces.append(piece)
    return pieces


def _writes(name: str, tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name} is a partial sum over ranks; reduce it before it is saved")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    copies = zip(coordinate, tensor.placements, strict=True)
    return not any(index for index, placement in copies if placement.is_replicate())


def whole_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """The tensors that pieces make up; refuses one of which a part is missing."""
    shapes, held = {}, dict[str, dict[tuple[int, ...], int]]()
    for piece in pieces:
        shapes[piece.name] = piece.shape
        held.setdefault(piece.name, {})[piece.offsets] = piece.values.numel()
    for name, shape in shapes.items():
        found, expected = sum(held[name].values()), torch.Size(shape).numel()
        if found != expected:
            raise ValueError(f"{name}: {found} of its {expected} elements were saved")
    return shapes


def fill(tensors: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
    """Set tensors, or this rank's shards of them, to what was saved; all of them, or none."""
    saved: dict[str, dict[tuple[int, ...], Piece]] = {}
    for piece in pieces:
        saved.setdefault(piece.name, {})[piece.offsets] = piece
    wrong = [
        why for name, tensor in tensors.items() if (why := _misfit(name, tensor, saved.get(name)))
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the checkpoint does not fit: {'; '.join(wrong[:3])}{more}")
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=tensor.size(),
            chunks=[
                ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.size())
                for piece in saved[name].values()
            ],
        )
        for name, tensor in tensors.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(
        {name: tensor.detach() for name, tensor in tensors.items()}, Metadata(described)
    )
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            offset = item.storage_index.offset
            source = saved[item.storage_index.fqn][tuple(offset or ())].values
            for dimension, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                source = source.narrow(dimension, start, length)
            planner.resolve_tensor(item).copy_(source)


def _misfit(name: str, tensor: Tensor, saved: Mapping[tuple[int, ...], Piece] | None) -> str:
    if not saved:
        return f"{name} was not saved"
    piece = next(iter(saved.values()))
    here, there = (tuple(tensor.shape), tensor.dtype), (piece.shape, piece.values.dtype)
    return "" if here == there else f"{name} is {here} here, but {there} in the checkpoint"
