"""The blocks of tensors that each rank reads, found by PyTorch DCP's planner.

``torch.distributed.checkpoint`` (DCP) supports all layouts of DTensors: FSDP2, sharded experts, and
both at once. Its storage is not used, because it pickles metadata and plain values.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from primerl._common.tensor_pieces import TensorPiece


def whole_shapes(pieces: Iterable[TensorPiece]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that pieces form.

    Raises:
        ValueError: elements of a tensor are missing.
    """
    shapes, held = {}, dict[str, dict[tuple[int, ...], int]]()
    for piece in pieces:
        shapes[piece.name] = piece.shape
        held.setdefault(piece.name, {})[piece.offsets] = piece.values.numel()
    for name, shape in shapes.items():
        found, expected = sum(held[name].values()), torch.Size(shape).numel()
        if found != expected:
            raise ValueError(f"{name}: only {found} of its {expected} elements were saved")
    return shapes


def fill(tensors: Mapping[str, Tensor], pieces: Iterable[TensorPiece]) -> None:
    """Copy saved values into tensors, or into this rank's shards.

    Raises:
        ValueError: a tensor was not saved, or has another shape or dtype. No tensor has changed.
    """
    saved: dict[str, dict[tuple[int, ...], TensorPiece]] = {}
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


def _misfit(name: str, tensor: Tensor, saved: Mapping[tuple[int, ...], TensorPiece] | None) -> str:
    if not saved:
        return f"{name} was not saved"
    piece = next(iter(saved.values()))
    here, there = (tuple(tensor.shape), tensor.dtype), (piece.shape, piece.values.dtype)
    return "" if here == there else f"{name} is {here} here, but {there} in the checkpoint"
