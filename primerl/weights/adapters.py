"""Low-rank adapters (LoRA) that the ``peft`` library has put into a model."""

import re
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from primerl._optional import require
from primerl.weights.gathering import is_first_rank, whole_tensors
from primerl.weights.replacement import whole_folder

_BASE = ".base_layer."
_ADAPTER = re.compile(r"\.lora_(?:A|B)\.[^.]+\.")
_OF_ADAPTER = re.compile(r"\.lora_[^.]+\.")


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of the model has an adapter."""
    return any(_OF_ADAPTER.search(name) for name, _ in model.named_parameters())


def is_of_adapted_layer(name: str) -> bool:
    """Whether a parameter belongs to an adapter, or to the layer that it is added to."""
    return _BASE in name or _OF_ADAPTER.search(name) is not None


def unadapted(name: str) -> str:
    """The name that a parameter of an adapted layer has without the adapter."""
    return name.replace(_BASE, ".")


def merged(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with those of adapters added to the weights that they adapt.

        W' = W + s B A,   s = alpha / r

    of arXiv:2106.09685, under the name that W has without the adapter. Whole layers must be given.

    Raises:
        ValueError: an adapter does something else than that to a linear layer.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _OF_ADAPTER.search(name):
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
    own = [name for name in tensors if name.startswith(f"{layer}.") and _OF_ADAPTER.search(name)]
    odd = [name for name in own if not _ADAPTER.search(name) or not name.endswith(".weight")]
    plain = isinstance(getattr(module, "base_layer", None), nn.Linear)
    if odd or not plain or getattr(module, "merged", False):
        raise ValueError(
            f"the adapter of {layer} is no plain LoRA of a linear layer that is not merged "
            f"({', '.join(odd) or type(module).__name__}); adapt linear layers by "
            "peft.LoraConfig(target_modules=[...]) without DoRA, biases or experts"
        )
    for adapter in module.active_adapters:
        a, b = (tensors[f"{layer}.lora_{which}.{adapter}.weight"] for which in "AB")
        weight = weight + module.scaling[adapter] * (b @ a).to(weight.dtype)
    return weight


def save_adapters(
    model: nn.Module, folder: str | PathLike[str] | None, *, adapter: str = "default"
) -> None:
    """Write a model's adapter as a folder of ``peft``, which vLLM loads too, all or nothing.

    All ranks call this, because a sharded model is gathered; rank 0 writes.

    Args:
        model: to which ``peft.inject_adapter_in_model`` has added adapters, sharded or not.
        folder: may be None on ranks other than 0.
        adapter: its name.

    Raises:
        ValueError: the model has no such adapter, rank 0 has no folder, or it holds more than a
            saved adapter.
    """
    configs: Any = getattr(model, "peft_config", {})
    if adapter not in configs:
        raise ValueError(
            f"the model has no adapter {adapter!r}; it has {sorted(configs) or 'none'}: add one by "
            "peft.inject_adapter_in_model(peft.LoraConfig(...), model), before parallel.shard"
        )
    mine = re.compile(rf"(\.lora_[^.]+)\.{re.escape(adapter)}(?=\.)")
    tensors = {
        f"base_model.model.{mine.sub(lambda m: m[1], name)}": tensor
        for name, tensor in whole_tensors(model, mine.search)
    }
    if not is_first_rank():
        return
    if folder is None:
        raise ValueError("folder is None; rank 0 writes the adapter, so pass it a path")
    safetensors = require("safetensors.torch", extra="transformers")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole_folder(Path(folder)) as partial:
        file = partial / "adapter_model.safetensors"
        safetensors.save_file(whole, file, metadata={"format": "pt"})
        configs[adapter].save_pretrained(partial)
