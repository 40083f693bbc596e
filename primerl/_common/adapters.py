"""Helpers for low-rank adapters (LoRA) that the ``peft`` library has added to a model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from primerl._common.optional import require
from primerl._common.ranks import whole_tensors

_BASE = ".base_layer."
_ADAPTER = re.compile(r"\.lora_(?:A|B)\.[^.]+\.")
_ADAPTER_PARAMETER = re.compile(r"\.lora_[^.]+\.")
_PLAIN = (
    "a plain, unmerged LoRA of a linear layer; adapt linear layers by "
    "peft.LoraConfig(target_modules=[...]) without DoRA, biases or experts"
)
_SAVED = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def has_adapters(model: nn.Module) -> bool:
    """Check whether any layer of the model has an adapter."""
    return any(_ADAPTER_PARAMETER.search(name) for name, _ in model.named_parameters())


def refuse_virtual_tokens(model: nn.Module) -> None:
    """Refuse ``peft`` adapters that prepend virtual tokens or keys, such as prompt tuning.

    With virtual tokens, the rows of a pack would not match its labels, and all documents would
    share the tokens before the first document. Engines can't load such adapters either.

    Raises:
        ValueError: the model has such an adapter.
    """
    for name, config in adapter_configs(model).items():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(
                f"the model's adapter {name!r} is of peft's type {kind} ({type(config).__name__}), "
                "which prepends virtual tokens to each sequence; packed documents cannot be "
                "trained with it. Use peft.LoraConfig, or train the model's own weights"
            )


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return the configurations of a model's ``peft`` adapters, by adapter name."""
    found = getattr(model, "peft_config", None)
    return found if isinstance(found, dict) else {}


def refuse_other_adapters(model: nn.Module) -> None:
    """Refuse adapters that can't be merged into weights: published weights would lack them.

    Raises:
        ValueError: an adapter prepends virtual tokens, or its type is not LORA.
    """
    refuse_virtual_tokens(model)
    for name, config in adapter_configs(model).items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise ValueError(
                f"the model's adapter {name!r} is of peft's type {kind}, which cannot be merged "
                "into the published weights; use peft.LoraConfig, or train the model's own weights"
            )


def in_adapted_layer(name: str) -> bool:
    """Check whether a parameter belongs to an adapter, or to a layer that has an adapter."""
    return _BASE in name or _ADAPTER_PARAMETER.search(name) is not None


def unadapted(name: str) -> str:
    """Return the name that a parameter of an adapted layer has without the adapter."""
    return name.replace(_BASE, ".")


def merged(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge adapters into the weights that they adapt (arXiv:2106.09685).

        W' = W + s B A,   s = alpha / r

    W' gets the name that W has without the adapter. ``tensors`` must hold whole layers.

    Raises:
        ValueError: an adapter is not a plain LoRA of a linear layer.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _ADAPTER_PARAMETER.search(name):
            continue
        if _BASE not in name:
            found[name] = tensor
            continue
        layer, _, own = name.rpartition(_BASE)
        found[unadapted(name)] = tensor if own == "bias" else _adapted(model, layer, own, tensors)
    return found


def _adapted(model: nn.Module, layer: str, own_name: str, tensors: dict[str, Tensor]) -> Tensor:
    module: Any = model.get_submodule(layer)
    weight = tensors[f"{layer}{_BASE}{own_name}"]
    own = [
        name for name in tensors if name.startswith(f"{layer}.") and _ADAPTER_PARAMETER.search(name)
    ]
    odd = [name for name in own if not _is_factor(name)]
    if odd or not _adds_factors(module):
        raise ValueError(
            f"the adapter of {layer} is not {_PLAIN} ({', '.join(odd) or type(module).__name__})"
        )
    for adapter in module.active_adapters:
        a, b = (tensors[f"{layer}.lora_{which}.{adapter}.weight"] for which in "AB")
        weight = weight + module.scaling[adapter] * (b @ a).to(weight.dtype)
    return weight


def _is_factor(name: str) -> bool:
    return _ADAPTER.search(name) is not None and name.endswith(".weight")


def _adds_factors(module: Any) -> bool:
    linear = isinstance(getattr(module, "base_layer", None), nn.Linear)
    return linear and not getattr(module, "merged", False)


def left_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the adapters' tensors, and rename the others to their names without adapters."""
    return {
        unadapted(name): tensor
        for name, tensor in tensors.items()
        if not _ADAPTER_PARAMETER.search(name)
    }


# ---- publishing an adapter alone ----


def adapter_config(model: nn.Module, adapter: str) -> Any:
    """Return the ``peft`` configuration of an adapter.

    Raises:
        ValueError: the model has no such adapter.
    """
    configs = adapter_configs(model)
    if adapter not in configs:
        raise ValueError(
            f"the model has no adapter {adapter!r}; its adapters: {sorted(configs) or 'none'}. Add "
            "one by peft.inject_adapter_in_model(peft.LoraConfig(...), model) before parallel.shard"
        )
    return configs[adapter]


def adapter_tensors(model: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of an adapter, gathered, under its name in a folder saved by ``peft``.

    Gathering a sharded tensor is a collective: every rank iterates to the end.
    """
    own = re.compile(rf"(\.lora_[^.]+)\.{re.escape(adapter)}(?=\.)")
    for name, tensor in whole_tensors(model, own.search):
        yield f"base_model.model.{own.sub(lambda found: found[1], name)}", tensor


def write_adapter(folder: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """Write an adapter into a folder, in ``peft``'s format."""
    safetensors = require("safetensors.torch", extra="transformers")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config.save_pretrained(folder)
    safetensors.save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def saved_part(name: str) -> tuple[str, str]:
    """Split a tensor's name in ``peft``'s format into the layer and the factor, "A" or "B"."""
    found = _SAVED.fullmatch(name)
    assert found is not None, name  # require_servable has been called
    return found[1], found[2]


def require_servable(model: nn.Module, adapter: str) -> None:
    """Check that an engine can load an adapter, and that nothing outside adapters is trained.

    Raises:
        ValueError: there is no such adapter; it is not a plain LoRA of linear layers; or parameters
            that belong to no adapter are trained too.
    """
    adapter_config(model, adapter)
    refuse_other_adapters(model)
    trained = []
    for name, parameter in model.named_parameters():
        if not _ADAPTER_PARAMETER.search(name):
            trained += [name] if parameter.requires_grad else []
        elif f".{adapter}." in f"{name}.":
            layer = name[: name.index(".lora_")]
            if not _is_factor(name) or not _adds_factors(model.get_submodule(layer)):
                raise ValueError(f"the adapter of {layer} is not {_PLAIN}")
    if trained:
        raise ValueError(
            f"{trained[0]} is trained too ({len(trained)} parameters outside adapters are), but an "
            "adapter alone would not update them: publish merged weights, or freeze the parameters"
        )
