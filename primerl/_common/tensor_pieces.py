"""The blocks of tensors that each rank holds, found by PyTorch DCP's planner.

``torch.distributed.checkpoint`` (DCP) supports all layouts of DTensors: FSDP2, sharded experts, and
both at once.
"""

from collections.abc import Mapping

import attrs
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor


@attrs.frozen(kw_only=True, eq=False)
class TensorPiece:
    """A rectangular block of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Indices at which the block begins in the whole tensor."""
    values: Tensor


def my_pieces(tensors: Mapping[str, Tensor]) -> list[TensorPiece]:
    """Return the blocks of which this rank has the first copy, as views.

    These are its shards, without those that another rank has, too. Rank 0 has plain tensors.
    """
    mine = {name: tensor.detach() for name, tensor in tensors.items() if _has_first(name, tensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine)
    pieces = []
    for item in planner.create_local_plan().items:
        described, values = item.tensor_data, planner.resolve_data(item)
        assert described is not None
        assert isinstance(values, Tensor)
        if values.numel() or not mine[item.index.fqn].numel():
            piece = TensorPiece(
                name=item.index.fqn,
                shape=tuple(described.size),
                offsets=tuple(described.chunk.offsets),
                values=values,
            )
            pieces.append(piece)
    return pieces


def _has_first(name: str, tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name} is a partial sum over ranks; reduce it first")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    copies = zip(coordinate, tensor.placements, strict=True)
    return not any(index for index, placement in copies if placement.is_replicate())
