"""Helpers for low-rank adapters (LoRA) that the ``peft`` library has added to a model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from primerl._common.expert_modules import is_experts
from primerl._common.optional import require
from primerl._common.ranks import whole_tensors

_BASE = re.compile(r"(?:\.base_layer)+\.")  # twice for experts, of which two stacks are adapted
_ADAPTER_PARAMETER = re.compile(r"\.lora_[^.]+\.")
_SAVED = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def has_adapters(model: nn.Module) -> bool:
    """Check whether any layer of the model has an adapter."""
    return any(is_factor(name) for name, _ in model.named_parameters())


def is_factor(name: str) -> bool:
    """Check whether a parameter is one of the two low-rank factors of an adapted layer."""
    return _ADAPTER_PARAMETER.search(name) is not None


def adapted_layer(factor: str) -> str:
    """Return the name of the layer that a factor adapts."""
    return factor[: factor.index(".lora_")]


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return the configurations of a model's ``peft`` adapters, by adapter name."""
    found = getattr(model, "peft_config", None)
    return found if isinstance(found, dict) else {}


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers to which ``peft`` has added low-rank adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
            yield name, module


def adapter_scales(model: nn.Module) -> dict[str, dict[str, int]]:
    """Count the adapted layers of each adapter by the scale of their products, in JSON's types."""
    found: dict[str, dict[str, int]] = {}
    for _, layer in lora_layers(model):
        for adapter in layer.lora_A:
            scales, scale = found.setdefault(adapter, {}), repr(float(layer.scaling[adapter]))
            scales[scale] = scales.get(scale, 0) + 1
    return found


def in_adapted_layer(name: str) -> bool:
    """Check whether a parameter belongs to an adapter, or to a layer that has an adapter."""
    return _BASE.search(name) is not None or is_factor(name)


def unadapted(name: str) -> str:
    """Return the name that a parameter of an adapted layer has without the adapter."""
    return _BASE.sub(".", name)


def merged(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the active adapters into the weights that they adapt (arXiv:2106.09685).

        W' = W + s B A,   s = alpha / r

    W' gets the name that W has without the adapter. ``tensors`` must hold whole layers, and the
    adapters must be supported (``refuse_unsupported_adapters``).
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_factor(name):
            continue
        wrapped = _BASE.search(name)
        if wrapped is not None:
            layer, own = name[: wrapped.start()], name[wrapped.end() :]
            tensor = _adapted(model, layer, own, tensor, tensors)
        found[unadapted(name)] = tensor
    return found


def _adapted(
    model: nn.Module, layer: str, own: str, weight: Tensor, tensors: dict[str, Tensor]
) -> Tensor:
    """Add the adapters of ``layer``'s parameter ``own`` to its ``weight``."""
    module: Any = model.get_submodule(layer)
    while hasattr(module, "lora_A"):
        for adapter in module.active_adapters:
            if adapter in module.lora_A and own == getattr(module, "parameter_name", "weight"):
                a, b = (tensors[f"{layer}.lora_{which}.{adapter}.weight"] for which in "AB")
                weight = weight + module.scaling[adapter] * _change(module, a, b).to(weight.dtype)
        layer, module = f"{layer}.base_layer", module.base_layer
    return weight


def _change(module: Any, a: Tensor, b: Tensor) -> Tensor:
    """Multiply the factors ``a[r, i]`` and ``b[o, r]``; of experts, ``a[e r, i]``, ``b[o, r e]``.

    The change has the shape of the weight: ``[o, i]``, or ``[i, o]`` if the layer stores it so.
    """
    if not adapts_experts(module):
        return (b @ a).T if module.fan_in_fan_out else b @ a
    inputs = a.reshape(module.num_experts, -1, a.shape[1])
    outputs = b.reshape(b.shape[0], -1, module.num_experts)
    transposed = module.get_base_layer().is_transposed
    return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", outputs, inputs)


def adapts_experts(module: nn.Module) -> bool:
    """Check whether a module of ``peft`` adapts the stacked matrices of experts."""
    found: Any = module
    return type(module).__name__ == "ParamWrapper" and is_experts(found.get_base_layer())


def left_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the adapters' tensors, and rename the others to their names without adapters."""
    return {unadapted(name): tensor for name, tensor in tensors.items() if not is_factor(name)}


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

    Parameters that are trained beside the adapter, such as biases, are included: ``peft`` loads
    them too. Gathering a sharded tensor is a collective: every rank iterates to the end.
    """
    own = re.compile(rf"(\.lora_[^.]+)\.{re.escape(adapter)}(?=\.)")
    wanted = {
        name
        for name, parameter in model.named_parameters()
        if own.search(name) or (parameter.requires_grad and not is_factor(name))
    }
    for name, tensor in whole_tensors(model, wanted.__contains__):
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
