"""Faults that the parity checks must find, and the rank program that injects them.

``pytest -m slow tests/parity/test_parity_faults.py`` runs all faults, continuous integration only
those marked ``quick``. Each fault replaces something in a module of this package on every rank
while a model family is trained on a mesh. Some difference of ``parity.checks`` must then exceed its
tolerance.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from primerl import optim, parallel
from primerl.attention import switching
from primerl.checkpoint import checkpoints, loading
from primerl.loss import logprobs
from primerl.models import pretrained
from primerl.optim import muon
from primerl.packing import PackedBatch, batch
from primerl.parallel import gradients, host_values, sharding
from primerl.parallel.context_parallel import attention, sharing
from primerl.parallel.expert_parallel import dispatch
from primerl.parity.checks import Finding, MeshPlan, on_mesh
from primerl.parity.mesh_training import model_documents
from primerl.parity.reference import sampled, train
from primerl.testing.families import tiny_family

FAMILY = "glm4_moe"
RANKS = 4
TIMEOUT_S = 60.0

FSDP = MeshPlan(resume=True)
PREFIXES = MeshPlan(ep=2, share_prefixes=True)
REPLICAS = MeshPlan(replicate=2)
ULYSSES = MeshPlan(cp=2, context="ulysses", recompute=True)
GATHERED = MeshPlan(cp=2, context="gathered")
MUON = MeshPlan(ep=2, optimizer="muon", resume=True)


@attrs.frozen(kw_only=True)
class Fault:
    """A fault, and the mesh on which it shows."""

    name: str
    plan: MeshPlan
    inject: Callable[[pytest.MonkeyPatch], None]
    quick: bool


FAULTS: dict[str, Fault] = {}


def fault(name: str, plan: MeshPlan, *, quick: bool = False) -> Callable[..., None]:
    """Register a function that injects a fault."""

    def add(inject: Callable[[pytest.MonkeyPatch], None]) -> None:
        FAULTS[name] = Fault(name=name, plan=plan, inject=inject, quick=quick)

    return add


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace ``owner.name`` with ``call``, whose first argument is the original."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: call(real, *args, **kwargs))


class InsteadOf:
    """A stand-in for a module, with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# Forward: the head


def head(patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    around(patch, logprobs, "head_logprobs", call)


@fault("the temperature is ignored", PREFIXES, quick=True)
def _(patch):
    head(patch, lambda real, h, w, labels, t, rows: real(h, w, labels, 1.0, rows))


@fault("the temperature multiplies", PREFIXES)
def _(patch):
    head(patch, lambda real, h, w, labels, t, rows: real(h, w, labels, 1 / t, rows))


@fault("one temperature for a whole micro-batch", PREFIXES)
def _(patch):
    head(patch, lambda real, h, w, labels, t, rows: real(h, w, labels, t.mean(), rows))


@fault("the entropy has the wrong sign", PREFIXES)
def _(patch):
    def negative(real, *args):
        chosen, entropy = real(*args)
        return chosen, -entropy

    head(patch, negative)


@fault("the entropy has no gradient", PREFIXES)
def _(patch):
    def constant(real, *args):
        chosen, entropy = real(*args)
        return chosen, entropy.detach()

    head(patch, constant)


@fault("labels are off by one row", GATHERED)
def _(patch):
    head(patch, lambda real, h, w, labels, t, rows: real(h, w, labels.roll(1), t, rows))


# Forward: packed documents, their positions and contexts


def as_one_document(real, positions):
    return real(torch.arange(len(positions)))


@fault("documents see those before them", FSDP, quick=True)
def _(patch):
    around(patch, switching, "find_documents", as_one_document)


@fault("documents see those before them, over ranks", ULYSSES)
def _(patch):
    around(patch, sharing, "find_documents", as_one_document)


@fault("context ranks count positions from their own first row", GATHERED)
def _(patch):
    def from_zero(real, *args):
        return [
            attrs.evolve(part, position_ids=torch.arange(len(part.token_ids)))
            for part in real(*args)
        ]

    around(patch, PackedBatch, "split", from_zero)


@fault("a context rank attends to the keys of another in its place", GATHERED)
def _(patch):
    def rolled(real, key, value, group):
        keys, values = real(key, value, group)
        return [keys.roll(key.shape[2], 0), values.roll(key.shape[2], 0)]

    around(patch, attention, "gather_rows", rolled)


@fault("heads come back to the wrong rank", ULYSSES)
def _(patch):
    def swapped(real, x, sent, received, group):
        return real(x.roll(sent[0], 0), sent, received, group)

    around(patch, attention, "exchange", swapped)


@fault("a packed sample is trained twice", PREFIXES)
def _(patch):
    def twice(real, *args, **kwargs):
        plan = real(*args, **kwargs)
        plan[0][0].append(plan[0][0][0])  # the first sequence of a micro-batch shares no prefix
        return plan

    around(patch, batch, "family_bins", twice)


@fault("a sample is left out of its micro-batch", FSDP)
def _(patch):
    def without(real, *args, **kwargs):
        plan = real(*args, **kwargs)
        plan[0][0].pop()
        return plan

    around(patch, batch, "bins", without)


# Experts


@fault("each token goes to the expert after its own", PREFIXES, quick=True)
def _(patch):
    def shifted(real, hidden, indices, *, experts, group=None):
        return real(hidden, (indices + 1) % experts, experts=experts, group=group)

    around(patch, dispatch, "dispatch", shifted)


@fault("a token is dropped on its way back", PREFIXES)
def _(patch):
    def without_one(real, outputs, way, weights, *, group=None):
        kept = torch.ones(len(weights), 1)
        kept[len(weights) // 2] = 0
        return real(outputs, way, weights, group=group) * kept

    around(patch, dispatch, "combine", without_one)


@fault("outputs of experts are added without weights", PREFIXES)
def _(patch):
    def plain(real, outputs, way, weights, *, group=None):
        even = torch.full_like(weights, 1 / weights.shape[1])
        return real(outputs, way, even, group=group)

    around(patch, dispatch, "combine", plain)


@fault("weights of experts have no gradient", PREFIXES)
def _(patch):
    def constant(real, outputs, way, weights, *, group=None):
        return real(outputs, way, weights.detach(), group=group)

    around(patch, dispatch, "combine", constant)


@fault("no gradient comes back from dispatched tokens", PREFIXES)
def _(patch):
    def one_way(real, hidden, indices, **how):
        return real(hidden.detach(), indices, **how)

    around(patch, dispatch, "dispatch", one_way)


@fault("shared experts get no gradient", PREFIXES)
def _(patch):
    def frozen(real, model, *args, **kwargs):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("shared_experts" not in name)
        return real(model, *args, **kwargs)

    around(patch, parallel, "shard", frozen)


# Backward, over ranks


@fault("gradients of gathered keys are not added", GATHERED, quick=True)
def _(patch):
    def own_only(_real, out, x, *, group):
        out.copy_(x.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    around(patch, attention, "reduce_scatter", own_only)


@fault("gradients of gathered keys are averaged", GATHERED)
def _(patch):
    def averaged(real, out, x, *, group):
        real(out, x, group=group)
        out.div_(dist.get_world_size(group))

    around(patch, attention, "reduce_scatter", averaged)


@fault("gradients are averaged over ranks", FSDP)
def _(patch):
    def averaged(real, model, *args, **kwargs):
        sharded = real(model, *args, **kwargs)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(dist.get_world_size())
        return sharded

    around(patch, parallel, "shard", averaged)


@fault("gradients of replicas are not added", REPLICAS)
def _(patch):
    def within(_real, mesh, dimension):
        return (mesh.parameters if dimension == "shard" else mesh.experts)[dimension]

    around(patch, sharding, "_replicated", within)


@fault("a rank computes with a shard that was not updated", FSDP)
def _(patch):
    def stale(real, model, *args, **kwargs):
        sharded = real(model, *args, **kwargs)
        local = sharded.get_output_embeddings().weight.to_local()
        before = local.detach().clone()

        def restore(*_):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    local.copy_(before)

        sharded.register_forward_pre_hook(restore, prepend=True)
        return sharded

    around(patch, parallel, "shard", stale)


# Clipping


def clipping(patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    around(patch, parallel, "clip_gradients", call)


@fault("the norm is off by 1%", FSDP, quick=True)
def _(patch):
    clipping(patch, lambda real, parameters, max_norm: real(parameters, max_norm) * 1.01)


@fault("gradients are clipped 1% too far", FSDP, quick=True)
def _(patch):
    def further(real, parameters, max_norm):
        parameters = list(parameters)
        norm = real(parameters, max_norm)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.99)
        return norm

    clipping(patch, further)


@fault("gradients are not clipped", FSDP)
def _(patch):
    clipping(patch, lambda real, parameters, max_norm: real(parameters, 1e9))


@fault("gradients are always scaled to the largest norm", FSDP)
def _(patch):
    def always(real, parameters, max_norm):
        parameters = list(parameters)
        norm = real(parameters, max_norm)
        for parameter in parameters:
            if parameter.grad is not None and norm < max_norm:
                parameter.grad.mul_(max_norm / norm.item())
        return norm

    clipping(patch, always)


@fault("what replicas hold counts twice in the norm", REPLICAS)
def _(patch):
    patch.setattr(gradients, "_copies", lambda _gradient: 1)


@fault("each rank clips by the norm of its own shards", FSDP)
def _(patch):
    patch.setattr(gradients, "dist", InsteadOf(dist, all_reduce=lambda _: None))


# Collectives


def summing(patch: pytest.MonkeyPatch, all_reduce: Callable[..., Any]) -> None:
    patch.setattr(host_values, "dist", InsteadOf(dist, all_reduce=all_reduce))


@fault("sums over ranks are made twice", FSDP, quick=True)
def _(patch):
    def twice(x):
        dist.all_reduce(x)
        dist.all_reduce(x)

    summing(patch, twice)


@fault("sums over ranks are not made", FSDP)
def _(patch):
    summing(patch, lambda _: None)


@fault("sums over ranks are averages", FSDP)
def _(patch):
    def average(x):
        dist.all_reduce(x)
        x.copy_(x // dist.get_world_size())

    summing(patch, average)


@fault("every rank gets the batches of the first", FSDP)
def _(patch):
    around(
        patch,
        host_values,
        "_checked",
        lambda real, *args: [real(*args)[0]] * dist.get_world_size(),
    )


# Checkpoints


@fault("moments of the optimizer are not loaded", FSDP, quick=True)
def _(patch):
    def model_only(real, tensors, pieces):
        real({n: t for n, t in tensors.items() if not n.startswith("optimizer/")}, pieces)

    around(patch, loading, "fill", model_only)


@fault("the optimizer counts its steps anew", FSDP)
def _(patch):
    def anew(real, tensors, pieces):
        real({name: t for name, t in tensors.items() if not name.endswith("/step")}, pieces)

    around(patch, loading, "fill", anew)


@fault("parameters are not loaded", FSDP)
def _(patch):
    def optimizer_only(real, tensors, pieces):
        real({n: t for n, t in tensors.items() if n.startswith("optimizer/")}, pieces)

    around(patch, loading, "fill", optimizer_only)


def saving_swapped(patch: pytest.MonkeyPatch, name: str) -> None:
    """Swap the tensors with this name between two layers when saving."""

    def swapped(real, tensors):
        pieces = {piece.name: piece for piece in real(tensors)}
        first, second = (name.format(layer=n) for n in (0, 1))
        one, other = pieces[first], pieces[second]
        pieces[first] = attrs.evolve(one, values=other.values)
        pieces[second] = attrs.evolve(other, values=one.values)
        return list(pieces.values())

    around(patch, checkpoints, "my_pieces", swapped)


@fault("two shards are saved under each other's name", FSDP)
def _(patch):
    saving_swapped(patch, "model/model.layers.{layer}.self_attn.q_proj.weight")


@fault("momenta are saved under each other's name", MUON)
def _(patch):
    saving_swapped(patch, "optimizer/model.layers.{layer}.self_attn.q_proj.weight/momentum_buffer")


@fault("random number generators are not restored", FSDP)
def _(patch):
    patch.setattr(loading, "_set_generators", lambda *_, **__: None)


@fault("all ranks restore the first one's generators", FSDP)
def _(patch):
    def first_only(real, pieces, notes, *, rank, as_many):
        real(pieces, notes, rank=0, as_many=as_many)

    around(patch, loading, "_set_generators", first_only)


# Muon


def grouping(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    around(patch, optim, "muon_parameters", lambda real, model: change(model, real(model)))


def with_arguments(patch: pytest.MonkeyPatch, **arguments: Any) -> None:
    around(patch, optim, "Muon", lambda real, groups, **how: real(groups, **{**how, **arguments}))


@fault("gate and up are made orthogonal together", MUON, quick=True)
def _(patch):
    def whole(_model, groups):
        return [{name: group[name] for name in ("params", "algorithm")} for group in groups]

    grouping(patch, whole)


@fault("routers are made orthogonal", MUON)
def _(patch):
    def with_routers(model, groups):
        routers = {id(p) for name, p in model.named_parameters() if name.endswith("gate.weight")}
        matrices = next(group for group in groups if group["algorithm"] == "muon")
        for group in groups:
            if group["algorithm"] == "adamw":
                matrices["params"] += [p for p in group["params"] if id(p) in routers]
                group["params"] = [p for p in group["params"] if id(p) not in routers]
        return groups

    grouping(patch, with_routers)


@fault("Muon has no momentum", MUON)
def _(patch):
    with_arguments(patch, momentum=0.0)


@fault("Muon looks no step ahead", MUON)
def _(patch):
    with_arguments(patch, nesterov=False)


@fault("Muon's updates have another scale", MUON)
def _(patch):
    with_arguments(patch, adjust_lr="original")


@fault("Muon's updates are 1% too large", MUON)
def _(patch):
    around(patch, muon, "orthogonalize", lambda real, *args, **how: real(*args, **how) * 1.01)


@fault("Muon decays no weights", MUON)
def _(patch):
    with_arguments(patch, weight_decay=0.0)


@fault("each rank makes its own shard orthogonal", MUON, quick=True)
def _(patch):
    patch.setattr(muon, "matrix_sharding", lambda _parameter: None)


@fault("one step of Newton-Schulz is missing", MUON)
def _(patch):
    with_arguments(patch, steps=4)


# Publication


@fault("a tensor is saved under another's name", REPLICAS)
def _(patch):
    def swapped(real, *args, **kwargs):
        names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)]
        for name, tensor in real(*args, **kwargs):
            yield (names[1 - names.index(name)] if name in names else name), tensor

    around(patch, pretrained, "checkpoint_tensors", swapped)


def main(names: str, folder: str) -> None:
    """Train without a fault on each mesh, then with each fault, and write the failed checks.

    Args:
        names: ``quick`` or ``all``.
        folder: folder in which rank 0 writes ``found.json``, with the failed checks of each fault.
    """
    torch.set_num_threads(1)
    with parallel.process_group(timeout_s=TIMEOUT_S) as world:
        model = tiny_family(FAMILY)
        sequences = sampled(model, model_documents(model))
        references = {
            name: train(tiny_family(FAMILY), sequences, optimizer=name)
            for name in ("adamw", "muon")
        }
        chosen = [one for one in FAULTS.values() if one.quick or names == "all"]
        found: dict[str, list[str]] = {}

        def failed(name: str, plan: MeshPlan) -> list[str]:
            saved = Path(folder, f"run-{len(found)}") if world.is_first else None
            try:
                measurements = on_mesh(
                    FAMILY, {}, sequences, references[plan.optimizer], plan=plan, folder=saved
                )
            except (ValueError, RuntimeError) as error:
                return [f"raised: {error}"]
            checks = (
                Finding(family=FAMILY, mesh=name, check=c, measured=x) for c, x in measurements
            )
            return [f"{one.check} {one.measured:.1e}" for one in checks if one.result != "pass"]

        for plan in dict.fromkeys(one.plan for one in chosen):
            found[plan.name] = failed("no fault", plan)
        for one in chosen:
            with pytest.MonkeyPatch.context() as patch:
                one.inject(patch)
                found[one.name] = failed(one.name, one.plan)
            if world.is_first:
                print(one.name, found[one.name], flush=True)
        if world.is_first:
            Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
