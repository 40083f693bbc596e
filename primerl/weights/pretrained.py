"""Hugging Face model folders."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from primerl._optional import require
from primerl.weights.gathering import is_first_rank, whole_tensors


def load_pretrained(
    model: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer: ``(model, tokenizer)``.

    Args:
        model: a folder, or a hub id such as ``"Qwen/Qwen3-0.6B"``.
        dtype: of the parameters.

    Raises:
        ValueError: there is no such folder or hub model, or it is not a causal language model.
    """
    transformers = require("transformers", extra="transformers")
    name = os.fspath(model)
    folder = Path(name)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name} is no model folder: it has no config.json")
    elif folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ValueError(f"there is no model folder {name}; pass a folder or a hub id (org/name)")
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return loaded, transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"cannot load the model {name}: {error}") from error


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str] | None, *, tokenizer: Any
) -> None:
    """Write the model and its tokenizer as a Hugging Face folder (safetensors), all or nothing.

    The folder appears under its name when it is whole, in place of an earlier one. All ranks call
    this, because a sharded model is gathered; rank 0 writes.

    Args:
        model: a ``transformers`` model, sharded or not.
        folder: may be None on ranks other than 0.
        tokenizer: saved beside it.

    Raises:
        ValueError: rank 0 has no folder.
    """
    if not is_first_rank():
        for _ in whole_tensors(model):
            pass  # this rank only helps to gather
        return
    if folder is None:
        raise ValueError("folder is None; rank 0 writes the model, so pass it a path")
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    writer: Any = model
    writer.save_pretrained(partial, state_dict=dict(whole_tensors(model)))
    tokenizer.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
