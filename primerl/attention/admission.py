"""Which models can be trained on packed documents: rules by what a model is, not by its name.

``parallel.shard`` asks before a run starts, ``loss.model_logprobs`` at each call. What these rules
miss, ``python -m primerl.parity`` finds.
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


def refuse_virtual_tokens(model: nn.Module) -> None:
    """Refuse adapters of ``peft`` that put tokens or keys of their own before a sequence.

    The rows of a pack would no longer be those of its labels, documents would share what is put
    before the first, and no engine that is served the weights would have it.

    Raises:
        ValueError: the model has such an adapter: prompt tuning, prefix tuning and their kin.
    """
    for name, config in adapter_configs(model).items():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(
                f"the model's adapter {name!r} is of peft's type {kind} ({type(config).__name__}), "
                "which puts tokens of its own before each sequence; packed documents cannot be "
                "trained with it. Use peft.LoraConfig, or train the model's own weights"
            )


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """The configurations of a model's ``peft`` adapters, by name."""
    found = getattr(model, "peft_config", None)
    return found if isinstance(found, dict) else {}


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
