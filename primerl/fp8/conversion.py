"""Conversion of an unmodified Hugging Face model to FP8, by replacing its linear layers."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from primerl._common.adapters import has_adapters
from primerl._common.forward_passes import is_compiled, recomputes
from primerl.fp8.backends.choice import BackendName, require_backend
from primerl.fp8.format import BLOCK_FP8, Format
from primerl.fp8.linear import Fp8Linear, WeightGradient, check_weight_gradient

ORDER = "fp8 -> adapters -> recompute -> shard -> compile"
KEPT = frozenset(
    {
        "lm_head",
        "embed_out",
        "score",
        # Routers choose between nearly equal scores, so rounding would change the choice.
        "gate",
        "router",
        "shared_expert_gate",
        # The indexer of sparse attention chooses keys, and its weights are small.
        "indexer",
    }
)
"""Name components of linear layers that are not converted by default."""

log = logging.getLogger(__name__)


def outside_heads_and_routers(name: str) -> bool:
    """Whether the linear layer of this name is converted to FP8 by default."""
    return KEPT.isdisjoint(name.split("."))


def convert_linears(
    model: nn.Module,
    *,
    where: Callable[[str], bool] = outside_heads_and_routers,
    form: Format = BLOCK_FP8,
    weight_gradient: WeightGradient = "bf16",
    backend: BackendName = "auto",
) -> list[str]:
    """Replace a model's linear layers with ``Fp8Linear`` in place, and return their names.

        replaced = fp8.convert_linears(model)
        parallel.shard(parallel.recompute(model), mesh)

    Each layer computes ``y = Q(x) Q(W)^T`` (see ``linear``) from its original parameter, which
    stays the master weight, so names, optimizers and checkpoints don't change. Call it before
    adding adapters (whose base layers then multiply in FP8), recomputation and sharding. Stacked
    experts are not linear layers: for them, pass ``fp8.GroupedMatmul`` to
    ``parallel.shard(matmul=...)``.

    Args:
        model: a Hugging Face model.
        where: returns whether to replace the linear layer of a given name. By default, all linear
            layers except the head, routers and indexers are replaced.
        form: the format of blocks and scales; use the sampler's.
        weight_gradient: precision of the weight gradient, ``"bf16"`` or ``"fp8"`` (with blocks
            along tokens).
        backend: the backend that multiplies. ``"auto"`` uses the fastest available one and logs its
            name; any other must support the format on the model's device.

    Raises:
        ValueError: the model is already sharded, compiled, adapted, set to recompute, quantized or
            converted; the backend can't multiply; ``where`` selects a head, whose weight the loss
            uses directly, or a layer that shares its weight; or ``where`` selects no layer.
    """
    check_weight_gradient(weight_gradient)
    _refuse_wrong_order(model)
    if backend != "auto":
        device = next(model.parameters()).device
        require_backend(backend, form, device)
        if weight_gradient == "fp8":
            require_backend(backend, form, device, "weight_gradient")
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and where(name)
    }
    if where is outside_heads_and_routers:  # a head may have any name
        head = _head(model)
        chosen = {name: module for name, module in chosen.items() if module is not head}
    if not chosen:
        raise _none_chosen(model, where)
    _refuse_head(model, chosen)
    for name, module in chosen.items():
        layer = Fp8Linear(module, form=form, weight_gradient=weight_gradient, backend=backend)
        model.set_submodule(name, layer)
    log.info("%d linear layers multiply in FP8, with %s scales", len(chosen), form.scale)
    return list(chosen)


def _refuse_wrong_order(model: nn.Module) -> None:
    modules = dict(model.named_modules())
    done = {
        "sharded": any(isinstance(one, FSDPModule) for one in modules.values()),
        "compiled": any(is_compiled(one) for one in modules.values()),
        "set to recompute activations": recomputes(model),
        "adapted": has_adapters(model),
    }
    for what, so in done.items():
        if so:
            raise ValueError(f"the model is {what} already; apply these steps in the order {ORDER}")
    for name, module in modules.items():
        if isinstance(module, Fp8Linear):
            raise ValueError(f"{name} already multiplies in FP8; call convert_linears once")
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and weight.dtype.itemsize < 2:
            raise ValueError(
                f"{name} has dtype {weight.dtype}, which can't be trained; load an empty model "
                "with models.load_shards(..., dequantize=fp8.dequantize) instead"
            )


def _head(model: nn.Module) -> nn.Module | None:
    find: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    return find()


def _none_chosen(model: nn.Module, where: Callable[[str], bool]) -> ValueError:
    name = type(model).__name__
    if where is outside_heads_and_routers:
        return ValueError(
            f"{name} has no torch.nn.Linear layers apart from its head, routers and indexers, so "
            "no layer can multiply in FP8"
        )
    return ValueError(
        f"where= selected none of the linear layers of {name}; expected a function of a layer's "
        "name, such as lambda name: 'mlp' in name"
    )


def _refuse_head(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    head = _head(model)
    owners: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, name)
    for name, module in chosen.items():
        weight: Any = module.weight
        if module is head:
            raise ValueError(
                f"{name} is the head: loss.model_logprobs multiplies by its weight directly, so "
                "that product would not be in FP8; exclude the head in where="
            )
        if owners[weight] != f"{name}.weight":
            raise ValueError(
                f"{name} shares its weight with {owners[weight]}; exclude it in where="
            )
