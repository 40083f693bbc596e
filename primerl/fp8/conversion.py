"""Putting FP8 into an unmodified Hugging Face model, by replacing its linear layers."""

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
        # Routers choose between near equal scores: rounding would send tokens elsewhere.
        "gate",
        "router",
        "shared_expert_gate",
        # The indexer of sparse attention chooses keys, and its weights are small.
        "indexer",
    }
)
"""Parts of names that are left as they are by default; norms and embeddings are not linear."""

log = logging.getLogger(__name__)


def outside_heads_and_routers(name: str) -> bool:
    """Whether a linear layer of this name multiplies in FP8 by default."""
    return KEPT.isdisjoint(name.split("."))


def convert_linears(
    model: nn.Module,
    *,
    where: Callable[[str], bool] = outside_heads_and_routers,
    form: Format = BLOCK_FP8,
    weight_gradient: WeightGradient = "bf16",
    backend: BackendName = "auto",
) -> list[str]:
    """Replace a model's linear layers by FP8 ones, in place; returns the names of those replaced.

        replaced = fp8.convert_linears(model)
        parallel.shard(parallel.recompute(model), mesh)

    Each is ``y = Q(x) Q(W)^T`` (see ``linear``) over the same parameter, which stays the master
    weight: names, optimizers and checkpoints don't change. It comes before adapters (whose base
    then multiplies in FP8), recomputation and sharding. Stacked experts are no linear layers: give
    ``fp8.GroupedMatmul`` to ``parallel.shard(matmul=...)``.

    Args:
        model: a Hugging Face model.
        where: whether to replace the linear layer of a name. By default all but heads, routers and
            indexers; embeddings and norms are no linear layers.
        form: of blocks and scales, the one that the sampler uses.
        weight_gradient: ``"bf16"``, or ``"fp8"`` along tokens.
        backend: ``"auto"`` takes the fastest that can, and logs which; another name is refused here
            if it can't multiply on the model's device.

    Raises:
        ValueError: the model is sharded, compiled, adapted, set to recompute, quantized or
            converted already; the backend can't multiply; a head, whose weight the loss multiplies
            by itself, is chosen; or nothing is.
    """
    check_weight_gradient(weight_gradient)
    _refuse_wrong_order(model)
    if backend != "auto":
        require_backend(backend, form, next(model.parameters()).device)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and where(name)
    }
    if not chosen:
        raise ValueError(
            f"where= chose none of the linear layers of {type(model).__name__}; expected a "
            "function of a layer's name, such as lambda name: 'mlp' in name"
        )
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
            raise ValueError(f"the model is {what} already; the order is {ORDER}")
    for name, module in modules.items():
        if isinstance(module, Fp8Linear):
            raise ValueError(f"{name} multiplies in FP8 already; call convert_linears once")
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and weight.dtype.itemsize < 2:
            raise ValueError(
                f"{name} holds {weight.dtype}, which can't be trained; fill an empty model by "
                "models.load_shards(..., dequantize=fp8.dequantize) instead"
            )


def _refuse_head(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    find: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    owners: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, name)
    for name, module in chosen.items():
        weight: Any = module.weight
        if module is head:
            raise ValueError(
                f"{name} is the head: loss.model_logprobs multiplies by its weight itself, so it "
                "would not be in FP8; leave it out in where="
            )
        if owners[weight] != f"{name}.weight":
            raise ValueError(
                f"{name} shares its weight with {owners[weight]}; leave it out in where="
            )
