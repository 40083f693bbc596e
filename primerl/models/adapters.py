"""Saving a model's low-rank adapters (LoRA) as a folder of the ``peft`` library."""

from os import PathLike

from torch import nn

from primerl._common.adapters import adapter_config, adapter_tensors, write_adapter
from primerl._common.files import saved_folder
from primerl._common.ranks import on_first_rank_gathering


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
        RuntimeError: rank 0 could not write, on every other rank.
    """
    config = adapter_config(model, adapter)
    tensors = adapter_tensors(model, adapter)

    def write() -> None:
        if folder is None:
            raise ValueError("folder is None; rank 0 writes the adapter, so pass it a path")
        with saved_folder(folder, marker="adapter_config.json") as partial:
            write_adapter(partial, config, dict(tensors))

    on_first_rank_gathering(write, tensors)
