"""Low-rank adapters (LoRA) that the ``peft`` library has put into a model."""

import re
from typing import Any

from torch import Tensor, nn

from primerl.attention.admission import adapter_configs, refuse_virtual_tokens

_BASE = ".base_layer."
_ADAPTER = re.compile(r"\.lora_(?:A|B)\.[^.]+\.")
_ADAPTER_PARAMETER = re.compile(r"\.lora_[^.]+\.")


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of the model has an adapter."""
    return any(_ADAPTER_PARAMETER.search(name) for name, _ in model.named_parameters())


def refuse_other_adapters(model: nn.Module) -> None:
    """Refuse adapters that are not added to weights, because published weights would lack them.

    Raises:
        ValueError: an adapter puts tokens before a sequence, or is of another type than LORA.
    """
    refuse_virtual_tokens(model)
    for name, config in adapter_configs(model).items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise ValueError(
                f"the model's adapter {name!r} is of peft's type {kind}, which cannot be added to "
                "the weights that are sent; use peft.LoraConfig, or merge it and train the weights"
            )


def in_adapted_layer(name: str) -> bool:
    """Whether a parameter belongs to an adapter, or to the layer that it is added to."""
    return _BASE in name or _ADAPTER_PARAMETER.search(name) is not None


def unadapted(name: str) -> str:
    """The name that a parameter of an adapted layer has without the adapter."""
    return name.replace(_BASE, ".")


def merged(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with those of adapters added to the weights that they adapt.

        W' = W + s B A,   s = alpha / r

    of arXiv:2106.09685, under the name that W has without the adapter. Whole layers must be given.

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
    odd = [name for name in own if not _ADAPTER.search(name) or not name.endswith(".weight")]
    plain = isinstance(getattr(module, "base_layer", None), nn.Linear)
    if odd or not plain or getattr(module, "merged", False):
        raise ValueError(
            f"the adapter of {layer} is not a plain, unmerged LoRA of a linear layer "
            f"({', '.join(odd) or type(module).__name__}); adapt linear layers by "
            "peft.LoraConfig(target_modules=[...]) without DoRA, biases or experts"
        )
    for adapter in module.active_adapters:
        a, b = (tensors[f"{layer}.lora_{which}.{adapter}.weight"] for which in "AB")
        weight = weight + module.scaling[adapter] * (b @ a).to(weight.dtype)
    return weight
