"""Checks that the embedded engine can serve a model."""

from typing import Any

from torch import nn

from primerl.attention.admission import (
    STATEFUL_LAYERS,
    has_unnamed_state,
    layer_kinds,
    named_mixers,
)
from primerl.rollout.engines.transformers.recurrent_states import unserved_mixer

# Kinds of layers that the engine serves; transformers 5.17 has another name for the last.
SERVED_LAYERS = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "attention",
        "mlp",
        "moe",
        "indexed_attention",
        "deepseek_sparse_attention",
    }
)


def refuse_unsupported(model: Any) -> None:
    """Raise a ValueError for a model that this engine can't serve; the message says why."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model; expected a causal language model"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no language-model head; "
            "expected a causal language model, such as AutoModelForCausalLM loads"
        )
    if reason := _reason(model, config):
        raise ValueError(f"{config.model_type} {reason}; serve this model with vLLM")


def _reason(model: nn.Module, config: Any) -> str | None:
    mixers = [mixer for _, mixer in named_mixers(model)]
    for mixer in mixers:
        if reason := unserved_mixer(mixer):
            return reason
    served = SERVED_LAYERS | STATEFUL_LAYERS if mixers else SERVED_LAYERS
    if unknown := sorted(layer_kinds(model) - served):
        return f"has {', '.join(unknown)} layers, which this engine does not support"
    if has_unnamed_state(model):
        return "has recurrent layers of a kind that this engine does not support"
    if config.is_encoder_decoder:
        return "is an encoder with a decoder, which this engine does not support"
    can_switch = getattr(model, "_can_set_attn_implementation", None)
    if can_switch is not None and not can_switch():
        return "has its own attention implementation, which this engine can't replace"
    return None


def rope_limit(config: Any) -> int | None:
    """Return the number of positions that a model is served with; None if there is no limit.

    If rotary embeddings depend on the longest request of a batch, requests must stay below the
    length at which they begin to.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    # If layers of different types rotate differently, there is one nested dictionary per type.
    each = [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]
    limits = [
        one.get("original_max_position_embeddings") or positions
        for one in each
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    known = [int(limit) for limit in [positions, *limits] if limit is not None]
    return min(known, default=None)
