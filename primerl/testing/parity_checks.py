"""What ``parity`` compares: training on packed documents over a mesh, and plain Hugging Face code.

The reference knows nothing of this library: one process, each document alone, the model as
transformers has it. Everything else is compared with it.
"""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from primerl import parallel, weights
from primerl._optional import require
from primerl.packing import PackedBatch
from primerl.testing.characters import character_tokenizer
from primerl.testing.families import tiny_family
from primerl.testing.parity_training import (
    LENGTHS,
    ROWS,
    Training,
    batches_of,
    packed,
    shares,
    tokens_of,
    train,
    whole,
)

TOLERANCES = {
    "logprobs": 2e-6,
    "gradients": 1e-5,
    "loss": 1e-6,
    "gradient norm": 1e-5,
    "expert choices": 0.0,
    "parameters": 2e-5,
    "saved and loaded": 0.0,
    "streamed": 0.0,
}


@attrs.frozen(kw_only=True)
class Finding:
    """One line of the table."""

    family: str
    mesh: str
    check: str
    figure: float | None = None
    """What was measured; None: refused, or it raised."""
    note: str = ""

    @property
    def allowed(self) -> float | None:
        """The largest figure that passes."""
        return TOLERANCES.get(self.check)

    @property
    def result(self) -> str:
        """``pass``, ``FAIL`` or ``refused``."""
        if self.figure is None:
            return "refused" if self.check == "refused" else "FAIL"
        assert self.allowed is not None
        return "pass" if self.figure <= self.allowed else "FAIL"  # a NaN fails


def differences(ours: Training, reference: Training) -> Iterator[tuple[str, float]]:
    """Each check's figure: relative, except for logprobs near 0, parameters and choices."""
    largest = reference.logprobs.abs().max().clamp(min=1.0)
    mine = ours.logprobs != 0
    apart = (ours.logprobs - reference.logprobs)[mine].abs()
    yield "logprobs", _sup((apart.max() / largest).item() if mine.any() else 0.0)
    norm = torch.stack([g.norm() for g in reference.gradients.values()]).norm().item()
    yield "gradients", _furthest(ours.gradients, reference.gradients) / norm
    yield "loss", _relative(ours.losses, reference.losses)
    yield "gradient norm", _relative(ours.norms, reference.norms, least=0.0)
    if reference.choices:
        yield "expert choices", float(_differing(ours.choices, reference.choices))
    yield "parameters", _furthest(ours.parameters, reference.parameters)


def round_trip(model: Any, kind: Any, folder: Path | None) -> Iterator[tuple[str, float]]:
    """How many tensors a sharded model's checkpoint changes: saved and loaded, and streamed."""
    weights.save_pretrained(model, folder, tokenizer=character_tokenizer("abc"))
    streamed = {name: tensor.clone() for name, tensor in weights.checkpoint_tensors(model)}
    state = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    if folder is None:
        return
    load_file = require("safetensors.torch", extra="transformers").load_file
    loaded = kind.from_pretrained(folder, dtype=torch.float32)
    yield "saved and loaded", float(_unequal(loaded.state_dict(), state))
    written: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        written |= load_file(file)
    yield "streamed", float(_unequal(written, streamed))


def on_mesh(
    family: str,
    settings: dict[str, Any],
    reference: Training,
    *,
    sizes: dict[str, int],
    recompute: bool,
    folder: Path | None,
) -> list[tuple[str, float]]:
    """A family's figures on a mesh, the worst of all ranks.

    Args:
        family: as for ``tiny_family``, which takes the settings too.
        settings: of its configuration.
        reference: of one process.
        sizes: of the mesh, as ``parallel.mesh`` takes them.
        recompute: whether layers recompute their activations.
        folder: where rank 0 saves the model; None on the others.

    Raises:
        ValueError: the family, or this mesh, is refused.
    """
    mesh, rank = _mesh(tuple(sizes.items())), torch.distributed.get_rank()
    model = tiny_family(family, seed=rank, **settings)  # only rank 0's parameters count
    kind = type(model)  # sharding makes another class of it
    if recompute:
        parallel.recompute(model)
    parallel.shard(model, mesh)
    all_batches = batches_of(model)
    share = shares(all_batches, mesh.batches) if rank == 0 else None
    mine = parallel.scatter(share, PackedBatch, mesh)
    ours = train(model, mine, packed, trained=tokens_of(all_batches))
    losses = parallel.all_sum(torch.tensor(ours.losses, dtype=torch.float64))
    ours = attrs.evolve(ours, losses=losses.tolist())
    found = list(differences(ours, reference))
    worst = torch.tensor([figure for _, figure in found], dtype=torch.float64)
    torch.distributed.all_reduce(worst.nan_to_num_(math.inf), torch.distributed.ReduceOp.MAX)
    figures = [(check, value) for (check, _), value in zip(found, worst.tolist(), strict=True)]
    return [*figures, *round_trip(model, kind, folder)]


@cache  # its connections stay open
def _mesh(sizes: tuple[tuple[str, int], ...]) -> parallel.Mesh:
    return parallel.mesh(**dict(sizes))


def _sup(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two tensors of one name; a gradient that is not there is 0."""
    apart = []
    for name in ours.keys() | theirs.keys():
        here, there = ours.get(name), theirs.get(name)
        apart.append(here if there is None else there if here is None else here - there)
    largest = (x.abs().max().item() for x in apart if x is not None and x.numel())
    return max(map(_sup, largest), default=0.0)


def _relative(ours: list[float], theirs: list[float], *, least: float = 1.0) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(_sup(abs(a - b) / max(abs(b), least, 1e-30)) for a, b in pairs)


def _differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> int:
    """Tokens of this rank that went to other experts, over all layers and steps."""
    if ours.keys() != theirs.keys():
        return ROWS * len(LENGTHS)
    return sum(
        int(((ours[name] != theirs[name]).any(-1) & (ours[name] >= 0).all(-1)).sum())
        for name in ours
    )


def _unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> int:
    names = ours.keys() | theirs.keys()
    return sum(
        name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
        for name in names
    )
