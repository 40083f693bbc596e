"""Saving a model's low-rank adapters (LoRA) as a folder of the ``peft`` library."""

import re
from os import PathLike
from typing import Any

from torch import nn

from primerl._files import saved_folder
from primerl._optional import require
from primerl._ranks import is_first_rank, whole_tensors


def save_adapters(
    model: nn.Module, folder: str | PathLike[str] | None, *, adapter: str = "default"
) -> None:
    """Write a model's adapter as a ``peft`` folder, which vLLM loads too, atomically.

    All ranks call this, because a sharded model is gathered; rank 0 writes.

    Args:
        model: to which ``peft.inject_adapter_in_model`` has added adapters, sharded or not.
        folder: may be None on ranks other than 0.
        adapter: its name.

    Raises:
        ValueError: the model has no such adapter, rank 0 has no folder, or the folder holds what is
            no saved adapter.
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
    metadata = {"format": "pt"}
    with saved_folder(folder, marker="adapter_config.json") as partial:
        configs[adapter].save_pretrained(partial)
        safetensors.save_file(whole, partial / "adapter_model.safetensors", metadata=metadata)
