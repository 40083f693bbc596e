"""Checks that a model can be trained on packed documents, by rules about its layers.

``parallel.shard`` applies the rules before a run starts, and ``loss.model_logprobs`` at each call.
``python -m primerl.parity`` finds models that the rules admit by mistake.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Attention implementations that this library registers with transformers.
PACKED_ATTENTION = "primerl_packed"
SPARSE_ATTENTION = "primerl_sparse"
# Prefix of the names of context-parallel attention, which finds the documents of all ranks itself.
CONTEXT_ATTENTION = "primerl_context"
CONTEXT_SPARSE_ATTENTION = f"{CONTEXT_ATTENTION}_sparse"
# These build a square mask over the whole pack, so packed attention replaces them.
MASKED_ATTENTION = ("eager", "sdpa")
# Layer types with an indexer in transformers; version 5.17 uses the second name.
INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
# Families in which an indexer chooses the keys (see primerl.attention.sparse).
SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
# Layer types that see no other token, or whose attention is supported.
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})
# Names of the parameters of attention sinks.
SINKS = ("sinks", "attention_sink_bias", "learnable_sink")


def require_positions(model: nn.Module) -> None:
    """Refuse a model without ``position_ids``: it would number positions across documents."""
    unwrap: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)  # of PEFT
    base: Any = unwrap() if unwrap else model
    known = inspect.signature(base.forward).parameters
    if "input_ids" in known and "position_ids" not in known:
        raise ValueError(
            f"{base.config.model_type} takes no position_ids, so it would not restart positions at "
            "each packed document; pack one document per batch"
        )


def unsupported_rope_lengths(config: Any) -> float:
    """Return the length above which rotary embeddings depend on a batch's longest document.

    Longer documents can't be packed. The limit is infinite for a fixed rotation, and finite for
    ``rope_type`` ``"dynamic"`` and ``"longrope"``.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # If layers of different types rotate differently, there is one nested dictionary per type.
    each = [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]
    limits = [
        one.get("original_max_position_embeddings") or text.max_position_embeddings
        for one in each
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=float("inf"))


def refuse_leaking_layers(model: nn.Module) -> None:
    """Refuse a model whose layers let packed documents see each other, whatever its attention."""
    config: Any = model.config
    if reason := _leak_reason(model):
        raise ValueError(f"{config.model_type} {reason}; pack one document per batch")
    require_positions(model)
    if any(getattr(part, "is_causal", True) is False for part in _layer_modules(model)):
        raise ValueError(
            f"{config.model_type} attends to later tokens too; packed attention is causal"
        )


def _leak_reason(model: nn.Module) -> str | None:
    if kinds := unpackable_layers(model):
        return (
            f"has {', '.join(kinds)} layers, which would carry state from one packed document "
            "into the next, or attend in a way that packed attention does not support"
        )
    if getattr(model, "_is_stateful", False):
        return "has recurrent layers, which carry state from one packed document into the next"
    if any(isinstance(part, nn.Conv1d) for part in _layer_modules(model)):
        return "has convolutions over tokens, which mix the ends of neighboring documents"
    can_switch: Callable[[], bool] | None = getattr(model, "_can_set_attn_implementation", None)
    if can_switch is not None and not can_switch():
        return (
            "has its own attention implementation, which would let packed documents see each other"
        )
    return None


def refuse_unpackable(model: nn.Module) -> None:
    """Refuse a model that cannot be trained on packed documents, before training starts.

    Raises:
        ValueError: the model's layers let documents see each other, or it has attention sinks or
            capped attention scores and does not use flash attention.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return
    refuse_leaking_layers(model)
    missing = None
    if any(name.rpartition(".")[2] in SINKS for name, _ in model.named_parameters()):
        missing = "attention sinks"
    elif getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        missing = "capped attention scores"
    attention = str(config._attn_implementation)
    if missing and (attention.startswith("primerl_") or attention in MASKED_ATTENTION):
        raise ValueError(
            f"{config.model_type} has {missing}, which packed attention does not compute; use "
            "flash attention for this model"
        )


def unpackable_layers(model: nn.Module) -> list[str]:
    """List the model's layer types that packed attention does not support.

    An example is ``linear_attention``.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    lists = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    kinds = {kind for kinds in lists for kind in kinds or () if isinstance(kind, str)}
    known = PACKABLE_LAYERS | INDEXED_LAYERS if is_sparse(model) else PACKABLE_LAYERS
    return sorted(kinds - known)


def is_sparse(model: nn.Module) -> bool:
    """Whether the model has DeepSeek sparse attention, which ``attention.sparse`` supports."""
    config: Any = model.config
    return getattr(config.get_text_config(), "model_type", None) in SPARSE_FAMILIES


def _layer_modules(model: Any) -> Iterator[nn.Module]:
    """Yield the modules of the language model's layers, without image and audio encoders."""
    find: Callable[[], Any] | None = getattr(model, "get_decoder", None)
    found = find() if find is not None else None
    language: nn.Module = found if isinstance(found, nn.Module) else model
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [m for m in language.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    parts: list[nn.Module] = [*lists] or [language]
    for part in parts:
        yield from part.modules()
