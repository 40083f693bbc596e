"""Loading of a checkpoint into a model and its optimizers, with any sharding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from primerl._common.adapters import adapter_scales
from primerl._common.files import member
from primerl._common.tensor_pieces import TensorPiece
from primerl.checkpoint.folders import rank_file
from primerl.checkpoint.generators import reseed_generators, set_generators
from primerl.checkpoint.rank_files import read_pieces
from primerl.checkpoint.reading import read_manifest, read_state
from primerl.checkpoint.resharding import fill, whole_shapes
from primerl.checkpoint.training_state import model_tensors, prepare_optimizers


def load(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedule: Any,
    *,
    rank: int,
    world_size: int,
) -> int:
    """Load a checkpoint into model, optimizers, schedule and generators, and return its step.

    Raises:
        ValueError: the checkpoint does not fit them, or is damaged.
    """
    manifest = read_manifest(folder)
    state = read_state(folder, manifest)
    pieces: list[TensorPiece] = []
    notes = []
    for number in range(manifest.world_size):
        rank_pieces, rank_notes = read_pieces(member(folder, rank_file(number)))
        pieces += rank_pieces
        notes.append(rank_notes)
    names = whole_shapes(pieces)
    tensors = model_tensors(model)
    unknown = sorted(n for n in names if n.startswith("model/") and n not in tensors)
    if unknown:
        raise ValueError(
            f"the checkpoint does not fit: the model has no {unknown[0].removeprefix('model/')}, "
            f"which was saved ({len(unknown) - 1} more saved tensors are missing too)"
        )
    scales = adapter_scales(model)
    if state.adapter_scales not in (None, scales):
        raise ValueError(
            "the checkpoint does not fit: its adapters multiply with other scales (number of "
            f"layers by scale: {state.adapter_scales} saved, {scales} here); use the lora_alpha "
            "and use_rslora that the run began with"
        )
    optimizer_names = [name for name in names if name.startswith("optimizer/")]
    tensors |= prepare_optimizers(model, optimizers, state.optimizer, optimizer_names)
    fill(tensors, pieces)
    if (schedule is None) != (state.schedule is None):
        raise ValueError(
            "the checkpoint does not fit: a schedule was "
            + ("saved, but none is given" if schedule is None else "given, but none was saved")
        )
    if schedule is not None:
        schedule.load_state_dict(state.schedule)
    _set_generators(pieces, notes, rank=rank, as_many=len(notes) == world_size)
    return state.step


def _set_generators(
    pieces: Sequence[TensorPiece], notes: Sequence[dict[str, str]], *, rank: int, as_many: bool
) -> None:
    source = rank if as_many else 0
    prefix = f"rank-{source}/"
    tensors = {p.name.removeprefix(prefix): p.values for p in pieces if p.name.startswith(prefix)}
    if as_many:
        set_generators({**notes[source], **tensors})
    else:
        reseed_generators({**notes[source], **tensors}, rank)
