"""Expert parallelism for unmodified Hugging Face models.

``transformers`` calls each layer's experts through a registry of functions. The function registered
here sends tokens to the ranks of their experts (``dispatch``), computes the experts, and sends
their outputs back.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

from primerl._common.adapters import adapts_experts
from primerl._common.expert_modules import expert_modules
from primerl._common.forward_passes import PassTotal, group_ends, has_values
from primerl._common.optional import require
from primerl._common.ranks import local_part
from primerl.parallel.expert_parallel.dispatch import AllToAll, Dispatch, count_choices

IMPLEMENTATION = "primerl_experts"

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x[n, i], weights[e, i, o], ends[e]) -> [n, o]``: multiplies rows up to ``ends[0]`` by the
first matrix, from there to ``ends[1]`` by the second, and so on."""


@attrs.define(eq=False)
class _Placement:
    """Settings and choice counts of one layer's experts."""

    experts: int
    """Total number of experts on all ranks."""
    dispatch: Dispatch
    matmul: GroupedMatmul
    chosen: PassTotal = attrs.Factory(PassTotal)
    """How often each expert was chosen on this rank since the counts were last taken."""


# Keyed by module, to avoid setting attributes on another library's objects.
_PLACEMENTS: WeakKeyDictionary[nn.Module, _Placement] = WeakKeyDictionary()


def divide_experts(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    dispatch: Callable[[int, dist.ProcessGroup | None], Dispatch] = AllToAll,
    matmul: GroupedMatmul | None = None,
) -> None:
    """Divide every layer's experts among ranks, and dispatch tokens to the ranks of their experts.

    Args:
        model: a model that calls its experts through ``transformers``' registry of experts
            functions.
        mesh: a one-dimensional mesh of the ranks among which experts are divided, in order. None:
            this rank holds all experts, and only their computation is replaced.
        dispatch: creates the token dispatch from the number of experts and the group:
            ``AllToAll`` or ``DeepEP``.
        matmul: multiplies rows sorted by expert with each expert's matrix;
            ``torch.nn.functional.grouped_mm`` by default.

    Raises:
        ValueError: the model has no such experts, they have adapters, or the number of ranks does
            not divide their number.
    """
    modules = expert_modules(model)
    for name, module in model.named_modules():
        if adapts_experts(module):
            raise ValueError(
                f"{name} has an adapter, and experts with adapters can neither be divided over "
                "ranks nor computed with another matmul: use a mesh with ep=1 and no matmul, or "
                "leave target_parameters out of peft.LoraConfig"
            )
    config: Any = getattr(model, "config", None)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts that can be divided: transformers calls none "
            "through its registry of experts functions; use a mesh with ep=1"
        )
    ranks = 1 if mesh is None else mesh.size()
    group = mesh.get_group() if mesh is not None and ranks > 1 else None
    for name, module in modules.items():
        experts = next(module.parameters()).shape[0]
        if experts % ranks:
            raise ValueError(
                f"{name} has {experts} experts, which {ranks} ranks cannot hold in equal numbers; "
                f"choose an ep that divides {experts}"
            )
    for module in modules.values():
        experts = next(module.parameters()).shape[0]
        sender = dispatch(experts, group)
        _PLACEMENTS[module] = _Placement(experts, sender, matmul or grouped_matmul)
        if mesh is not None and ranks > 1:
            distribute_module(module, mesh, _keep_own_experts)
    registry = require("transformers.integrations.moe", extra="transformers")
    registry.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    if config is None or config.get_text_config()._experts_implementation != IMPLEMENTATION:
        raise ValueError(
            f"{type(model).__name__} does not support choosing its experts function; use a mesh "
            "with ep=1, and no matmul"
        )


def _keep_own_experts(name: str, module: nn.Module, mesh: DeviceMesh) -> None:  # noqa: ARG001
    for parameter_name, parameter in list(module.named_parameters(recurse=False)):
        mine = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        divided = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
        module.register_parameter(
            parameter_name, nn.Parameter(divided, requires_grad=parameter.requires_grad)
        )


def _experts_forward(
    module: Any,
    hidden: Float[Tensor, "t h"],
    indices: Int[Tensor, "t k"],
    weights: Float[Tensor, "t k"],
) -> Float[Tensor, "t h"]:
    """Compute a layer's experts on all their ranks (an entry of ``ALL_EXPERTS_FUNCTIONS``)."""
    placement = _PLACEMENTS.get(module)
    if placement is None:
        raise ValueError(
            f"this {type(module).__name__} was not prepared, or is a copy of a prepared module: "
            "call parallel.shard with the mesh, or pass an engine that copies the model "
            "prepare=lambda copied: parallel.divide_experts(copied, matmul=...)"
        )
    placement.chosen.add(count_choices(indices.detach().reshape(-1), placement.experts))
    compute = functools.partial(_compute, module, placement.matmul)
    return placement.dispatch(hidden, indices, weights, compute).to(hidden.dtype)


def _compute(module: Any, matmul: GroupedMatmul, x: Tensor, counts: Tensor) -> Tensor:
    """Apply each expert of this rank to its rows of ``x``, which are sorted by expert."""
    ends = counts.cumsum(0).to(torch.int32)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    expert = None
    if module.has_bias:
        expert = torch.repeat_interleave(counts, output_size=x.shape[0])

    def project(x: Tensor, name: str) -> Tensor:
        weight = local_part(getattr(module, name))
        y = matmul(x, weight if module.is_transposed else weight.transpose(1, 2), ends)
        return y if expert is None else y + local_part(getattr(module, f"{name}_bias"))[expert]

    inner = project(x, up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return project(inner, "down_proj")


def grouped_matmul(
    x: Float[Tensor, "n i"], weights: Float[Tensor, "e i o"], ends: Int[Tensor, " e"]
) -> Float[Tensor, "n o"]:
    """Multiply rows, sorted by expert, by the matrix of their expert.

    This uses ``torch.nn.functional.grouped_mm``. Inputs that it rejects (float64, or rows whose
    size is not a multiple of 16 bytes) are multiplied expert by expert.
    """
    sizes = (x.shape[1] * x.element_size(), weights.shape[2] * x.element_size())
    kinds = (torch.float32, torch.bfloat16, torch.float16) if has_values(x) else (torch.bfloat16,)
    if x.dtype in kinds and not any(s % 16 for s in sizes):
        return F.grouped_mm(x, weights, offs=ends)
    begins = [0, *group_ends(ends, len(x))]
    parts = [
        x[begin:end] @ weight
        for begin, end, weight in zip(begins, begins[1:], weights, strict=False)
    ]
    return torch.cat(parts)


def take_expert_counts(model: nn.Module) -> dict[str, Int[Tensor, " experts"]]:
    """Return how often each layer's experts were chosen on this rank since the last call.

    Counts are keyed by module name. Each micro-batch counts once, even if activations are
    recomputed in the backward pass or ``loss.model_logprobs`` runs the model twice. Layers that did
    not run are omitted.
    """
    placements = {name: _PLACEMENTS.get(part) for name, part in expert_modules(model).items()}
    counts = {name: one.chosen.take() for name, one in placements.items() if one is not None}
    return {name: chosen for name, chosen in counts.items() if chosen is not None}
