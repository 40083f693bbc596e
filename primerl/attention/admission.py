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
MASKED_BY_DOCUMENT = "primerl_masked"
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
PACKABLE_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}
)
# Layer types with a mixer that carries a state; they are supported if the mixer is known.
STATEFUL_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid", "recurrent"})
# Layer types that choose or compress keys; they are supported if the attention module is known.
KEY_CHOOSING_LAYERS = frozenset({
    "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse",
})  # fmt: skip
# Why layers of other types can't be packed.
_ACROSS_DOCUMENTS = {
    **dict.fromkeys(
        STATEFUL_LAYERS | {"hybrid_sliding"},
        "which carry state from one packed document into the next, and are of a kind that primerl "
        "does not run document by document",
    ),
    **dict.fromkeys(
        INDEXED_LAYERS,
        "which choose keys by an indexer that primerl does not run document by document",
    ),
}
_UNKNOWN = "which are unknown, and may let packed documents see each other"
# Classes of mixers that ``attention.mixers`` runs document by document.
MIXERS = frozenset({
    "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "JambaMambaMixer",
    "KimiLinearDeltaAttention", "Lfm2MoeShortConv", "Lfm2ShortConv", "MiniMaxLightningAttention",
    "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "RecurrentGemmaRecurrentBlock",
})  # fmt: skip
# Classes of attention that ``attention.masked`` runs document by document, whatever their layers'
# kinds: those without a choice of keys have the same code.
KEY_CHOOSING_ATTENTION = frozenset({"DeepseekV4Attention", "MiniMaxM3VLAttention"})


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
    implementation = config._attn_implementation
    if chooses_keys(model) and implementation not in (*MASKED_ATTENTION, MASKED_BY_DOCUMENT):
        raise ValueError(
            f"{config.model_type} uses {implementation} attention, which would choose keys of "
            "other packed documents; load it with attn_implementation='sdpa', or pack one document "
            "per batch"
        )
    require_positions(model)
    if any(getattr(part, "is_causal", True) is False for part in _layer_modules(model)):
        raise ValueError(
            f"{config.model_type} attends to later tokens too; packed attention is causal"
        )


def _leak_reason(model: nn.Module) -> str | None:
    if kinds := unpackable_layers(model):
        by_reason: dict[str, list[str]] = {}
        for kind in kinds:
            by_reason.setdefault(_ACROSS_DOCUMENTS.get(kind, _UNKNOWN), []).append(kind)
        return "has " + "; and ".join(
            f"{', '.join(alike)} layers, {reason}" for reason, alike in by_reason.items()
        )
    mixers = [mixer for _, mixer in named_mixers(model)]
    if has_unnamed_state(model):
        return "has recurrent layers, which carry state from one packed document into the next"
    within = {id(part) for mixer in mixers for part in mixer.modules()}
    parts = (part for part in _layer_modules(model) if id(part) not in within)
    if any(isinstance(part, nn.Conv1d) for part in parts):
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
        ValueError: the model's layers let documents see each other.
    """
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        refuse_leaking_layers(model)


def unpackable_layers(model: nn.Module) -> list[str]:
    """List the model's layer types that packed attention does not support.

    An example is ``linear_attention``.
    """
    known = PACKABLE_LAYERS | INDEXED_LAYERS if is_sparse(model) else PACKABLE_LAYERS
    if named_mixers(model):
        known |= STATEFUL_LAYERS | KEY_CHOOSING_LAYERS
    return sorted(layer_kinds(model) - known)


def has_unnamed_state(model: nn.Module) -> bool:
    """Whether a model has recurrent layers, of which neither mixers nor kinds of layers are known.

    transformers marks whole families as stateful, even if a configuration has attention only.
    """
    stateful = getattr(model, "_is_stateful", False)
    return bool(stateful) and not layer_kinds(model) and not named_mixers(model)


def layer_kinds(model: Any) -> set[str]:
    """Return the types of a model's layers that its configuration names."""
    text = model.config.get_text_config(decoder=True)
    lists = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    return {kind for kinds in lists for kind in kinds or () if isinstance(kind, str)}


def named_mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model's mixers, which carry state or may choose keys, with their names."""
    known = MIXERS | KEY_CHOOSING_ATTENTION
    named = model.named_modules()
    return [(name, module) for name, module in named if type(module).__name__ in known]


def chooses_keys(model: nn.Module) -> bool:
    """Whether the model has attention that can choose or compress keys (``attention.masked``)."""
    return any(type(module).__name__ in KEY_CHOOSING_ATTENTION for module in model.modules())


def is_sparse(model: nn.Module) -> bool:
    """Whether the model has DeepSeek sparse attention, which ``attention.sparse`` supports."""
    config: Any = model.config
    return getattr(config.get_text_config(), "model_type", None) in SPARSE_FAMILIES


def language_model(model: Any) -> nn.Module:
    """Return a model's language model, without its head, and without image and audio encoders."""
    find: Callable[[], Any] | None = getattr(model, "get_decoder", None)
    found = find() if find is not None else None
    # ModernBERT's decoder calls its head ``decoder``, which is then what is found.
    return found if isinstance(found, nn.Module) and hasattr(found, "config") else model


def _layer_modules(model: Any) -> Iterator[nn.Module]:
    """Yield the modules of the language model's layers, without image and audio encoders."""
    language = language_model(model)
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [m for m in language.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    parts: list[nn.Module] = [*lists] or [language]
    for part in parts:
        yield from part.modules()
