"""Which models can be trained on packed documents: rules by what a model is, not by its name.

``parallel.shard`` asks before a run starts, ``loss.model_logprobs`` at each call. What these rules
miss, ``python -m primerl.testing.parity`` finds.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Kinds of layers that see no other token, or that the attention of a pack computes.
HARMLESS_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})


def layer_kinds(model: nn.Module) -> set[str]:
    """The kinds of layers that the configuration of the language model names."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    lists = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    return {kind for kinds in lists for kind in kinds or () if isinstance(kind, str)}


def leaks(model: nn.Module) -> Iterator[str]:
    """Why packed documents would see each other, whichever attention the model has."""
    if getattr(model, "_is_stateful", False):
        yield "has recurrent layers, which carry state from one packed document into the next"
    if any(isinstance(part, nn.Conv1d) for part in _layer_modules(model)):
        yield "has convolutions over tokens, which mix the ends of neighbouring documents"
    can_switch: Callable[[], bool] | None = getattr(model, "_can_set_attn_implementation", None)
    if can_switch is not None and not can_switch():
        yield "has an attention of its own, which would let packed documents see each other"


def looks_ahead(model: nn.Module) -> bool:
    """Whether a layer attends to later tokens, or to those of an encoder."""
    return any(getattr(part, "is_causal", True) is False for part in _layer_modules(model))


def not_computed(model: nn.Module) -> Iterator[str]:
    """What the packed attention of this library leaves out that the model's attention has."""
    config: Any = model.config
    if any(name.rpartition(".")[2] in SINKS for name, _ in model.named_parameters()):
        yield "attention sinks"
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        yield "capped attention scores"


SINKS = ("sinks", "attention_sink_bias", "learnable_sink")


def _layer_modules(model: Any) -> Iterator[nn.Module]:
    """The modules of the language model's layers: images and sound have layers of their own."""
    find: Callable[[], Any] | None = getattr(model, "get_decoder", None)
    found = find() if find is not None else None
    language: nn.Module = found if isinstance(found, nn.Module) else model
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [m for m in language.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    parts: list[nn.Module] = [*lists] or [language]
    for part in parts:
        yield from part.modules()
