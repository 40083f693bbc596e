"""Parity checks, which compare training by this library on a mesh with ``parity.reference``."""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primerl import models, parallel
from primerl._common.optional import require
from primerl.packing import PackedBatch
from primerl.parity.mesh_training import make_batches, optimizer_for, resumed, train, whole
from primerl.parity.reference import ReferenceDocument, Training
from primerl.testing.families import tiny_family
from primerl.testing.vocabulary import character_tokenizer

# Later steps amplify rounding: an activation near 0 may be positive here and negative there.
TOLERANCES = {
    "logprobs": 2e-6,
    "entropies": 2e-6,
    "gradients": 1e-5,
    "clipped gradients": 1e-5,
    "loss": 1e-6,
    "gradient norm": 1e-5,
    "expert choices": 0.0,
    "updates": 2e-3,
    "generators": 0.0,
    "saved and loaded": 0.0,
    "streamed": 0.0,
}
# In these families, plain code's gradient norms change by up to 1.6e-5 if the last bit of every
# weight is changed, since the delta rule's outputs are normalized where they are near 0.
EXCEPTIONS = {
    family: {"gradient norm": 3e-5}
    for family in ("qwen3_5", "qwen3_5_text", "Qwen3_5ForConditionalGeneration")
}
CONTEXT_METHODS = ("ulysses", "gathered")


@attrs.frozen(kw_only=True)
class MeshPlan:
    """A mesh on which families are compared, with options of training."""

    replicate: int = 1
    ep: int = 1
    cp: int = 1
    context: str | None = None
    """Context parallel method, as in ``parallel.shard``."""
    recompute: bool = False
    """Whether layers recompute their activations (``parallel.recompute``)."""
    share_prefixes: bool = False
    """Whether documents share prefixes, as in ``packing.pack``."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    resume: bool = False
    """Whether the last step is made by another model, loaded from a checkpoint."""

    @property
    def name(self) -> str:
        """The name in the table, such as ``ep 2, cp 2``."""
        sizes = {"hsdp": self.replicate, "ep": self.ep, "cp": self.cp}
        names = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["fsdp"]
        names += [self.context] if self.context else []
        names += ["prefixes"] if self.share_prefixes else []
        names += ["muon"] if self.optimizer == "muon" else []
        names += ["resume"] if self.resume else []
        names += ["recompute"] if self.recompute else []
        return ", ".join(names)


@attrs.frozen(kw_only=True)
class Finding:
    """The result of one check, a row of the table."""

    family: str
    mesh: str
    check: str
    measured: float | None = None
    """The largest difference; None if the family was refused, or an error was raised."""
    note: str = ""

    @property
    def allowed(self) -> float | None:
        """The largest difference that passes."""
        return EXCEPTIONS.get(self.family, {}).get(self.check, TOLERANCES.get(self.check))

    @property
    def result(self) -> str:
        """``pass``, ``FAIL``, ``refused`` or ``not applicable``."""
        if self.measured is None:
            return self.check if self.check in ("refused", "not applicable") else "FAIL"
        assert self.allowed is not None
        return "pass" if self.measured <= self.allowed else "FAIL"  # a NaN fails


def differences(ours: Training, reference: Training) -> Iterator[tuple[str, float]]:
    """Yield the difference in each check, relative to the largest value or norm.

    The difference in expert choices is a number of tokens.
    """
    for check in ("logprobs", "entropies"):
        mine, theirs = getattr(ours, check), getattr(reference, check)
        trained = ~theirs.isnan()
        largest = theirs[trained].abs().max().clamp(min=1.0)
        as_planned = torch.equal(trained, ~mine.isnan())  # whether the same tokens are trained
        apart = (mine - theirs)[trained].abs().max() / largest
        yield check, _sup(apart.item()) if as_planned else math.inf
    gradients, clipped = reference.gradients, reference.clipped
    yield "gradients", _furthest(ours.gradients, gradients) / _norm(gradients)
    yield "clipped gradients", _furthest(ours.clipped, clipped) / _norm(clipped)
    yield "loss", _relative(ours.losses, reference.losses)
    yield "gradient norm", _relative(ours.norms, reference.norms, least=0.0)
    if reference.choices:
        yield "expert choices", _differing(ours.choices, reference.choices)
    apart = {name: ours.updates[name] - update for name, update in reference.updates.items()}
    yield "updates", _sup(_norm(apart) / _norm(reference.updates))


def round_trip(model: Any, kind: Any, folder: Path | None) -> Iterator[tuple[str, float]]:
    """Yield how many tensors differ after saving and loading, and between file and stream.

    The stream is ``models.checkpoint_tensors``, which has the same tensors as the saved files.
    """
    models.save_pretrained(model, folder, tokenizer=character_tokenizer("abc"))
    streamed = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
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
    sequences: list[ReferenceDocument],
    reference: Training,
    *,
    plan: MeshPlan,
    folder: Path | None,
) -> list[tuple[str, float]]:
    """Train a family on a mesh, and return the differences, the maximum over ranks.

    ``reference`` was trained in one process, by the same optimizer. ``folder`` is an empty folder
    on rank 0, and None on the other ranks.
    """
    mesh, rank = _mesh(plan.replicate, plan.ep, plan.cp), torch.distributed.get_rank()
    generators = []

    def made(seed: int) -> tuple[Any, nn.Module]:
        model = tiny_family(family, seed=seed, **settings)
        kind = type(model)  # sharding changes its class
        if plan.recompute:
            parallel.recompute(model)
        return kind, parallel.shard(model, mesh, context=plan.context)

    def restart(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        _, other = made(seed=rank + 100)
        fresh = other, optimizer_for(other, plan.optimizer)
        generators.append(resumed((model, optimizer), fresh, folder and folder / "run"))
        return fresh

    kind, model = made(seed=rank)  # sharding broadcasts rank 0's parameters
    share = None
    if rank == 0:
        share = make_batches(sequences, ranks=mesh.batches, share_prefixes=plan.share_prefixes)
    mine = parallel.scatter(share, PackedBatch, mesh)
    again = restart if plan.resume else None
    ours = train(model, mine, reference, optimizer=plan.optimizer, restart=again)
    ours = attrs.evolve(
        ours,
        logprobs=_from_all_ranks(ours.logprobs),
        entropies=_from_all_ranks(ours.entropies),
        choices={name: _largest(chosen) for name, chosen in ours.choices.items()},
    )
    found = list(differences(ours, reference))
    found += [("generators", float(number)) for number in generators]
    worst = _largest(torch.tensor([value for _, value in found], dtype=torch.float64))
    measurements = [(check, value) for (check, _), value in zip(found, worst.tolist(), strict=True)]
    return [*measurements, *round_trip(model, kind, folder and folder / "model")]


def _from_all_ranks(mine: Tensor) -> Tensor:
    """Combine each token's value from the rank that trained it; infinite if several did."""
    seen, total = (~mine.isnan()).long(), mine.nan_to_num(0.0, posinf=math.inf)
    for tensor in (seen, total):
        torch.distributed.all_reduce(tensor)
    return total.where(seen == 1, torch.where(seen == 0, torch.nan, torch.inf))


def _largest(mine: Tensor) -> Tensor:
    torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
    return mine


@cache  # because new process groups for each mesh would keep connections open
def _mesh(replicate: int, ep: int, cp: int) -> parallel.Mesh:
    return parallel.mesh(replicate=replicate, ep=ep, cp=cp)


def _sup(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def _furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of tensors of the same name; a missing gradient is 0."""
    apart = []
    for name in ours.keys() | theirs.keys():
        here, there = ours.get(name), theirs.get(name)
        apart.append(here if there is None else there if here is None else here - there)
    largest = (x.abs().max().item() for x in apart if x is not None and x.numel())
    return max(map(_sup, largest), default=0.0)


def _relative(ours: list[float], theirs: list[float], *, least: float = 1.0) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(_sup(abs(a - b) / max(abs(b), least, 1e-30)) for a, b in pairs)


def _differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Count the trained tokens sent to other experts, over all layers and steps."""
    if ours.keys() != theirs.keys():
        return math.inf
    return float(sum(int((ours[name] != theirs[name]).any(-1).sum()) for name in ours))


def _unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> int:
    names = ours.keys() | theirs.keys()
    return sum(
        name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
        for name in names
    )
