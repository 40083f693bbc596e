"""Loading and saving of Hugging Face model folders."""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import (
    Quantizer,
    TensorLayout,
    checkpoint_layout,
    checkpoint_tensors,
)
from primerl._common.files import saved_folder
from primerl._common.model_names import require_model
from primerl._common.multimodal import auto_class, freeze_encoders
from primerl._common.optional import require
from primerl._common.progress import report
from primerl._common.ranks import on_first_rank_gathering
from primerl._common.tensor_files import write_tensors

SHARD_BYTES = 5 * 10**9


def load_pretrained(
    model: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer: ``(model, tokenizer)``.

    Encoders of images and sound are loaded, too, and frozen: the language model is trained on text.

    Args:
        model: a folder, or a hub id such as ``"Qwen/Qwen3-0.6B"``.
        dtype: dtype of the parameters.

    Raises:
        ValueError: there is no such folder or hub model, or it is not a causal language model.
    """
    transformers = require("transformers", extra="transformers")
    require_model(model)
    name = os.fspath(model)
    folder = Path(name)
    report("loading the model", name)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        loaded = auto_class(config).from_pretrained(name, dtype=dtype)
        freeze_encoders(loaded)
        return loaded, transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        where = "" if folder.exists() else f"there is no folder {name} here, and "
        raise ValueError(f"{where}the model {name} cannot be loaded: {error}") from error


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """Return the token ids that end a model's replies: ``generation_config.eos_token_id``.

    Chat models may have several, while the tokenizer knows only one. Empty if the model has none.
    Pass them as ``SamplingParams.stop_token_ids`` and to ``data.training_sample``.
    """
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str] | None,
    *,
    tokenizer: Any,
    quantize: Quantizer | None = None,
) -> None:
    """Write the model and its tokenizer as a Hugging Face folder (safetensors), atomically.

    The folder gets its name when it is complete, and replaces an earlier one. If other files were
    added to the earlier folder, it is renamed to ``NAME.earlier`` instead. All ranks call this,
    because a sharded model is gathered layer by layer. Rank 0 writes files of up to 5 GB, and holds
    one layer in addition to its shard.

    Args:
        model: a ``transformers`` model, sharded or not.
        folder: the folder to write; may be None on ranks other than 0.
        tokenizer: the tokenizer, saved in the same folder.
        quantize: quantizes the checkpoint: ``fp8.CheckpointQuantizer(model)``.

    Raises:
        ValueError: rank 0 has no folder, the folder exists but is not a saved model, or the model
            cannot be converted layer by layer.
        RuntimeError: on the other ranks, if rank 0 could not write.
    """
    layout = checkpoint_layout(model, quantize=quantize)
    tensors = checkpoint_tensors(model, quantize=quantize)

    def write() -> None:
        if folder is None:
            raise ValueError("folder is None; rank 0 writes the model, so pass it a path")
        with saved_folder(folder, marker="config.json") as partial:
            writer: Any = model
            writer.save_pretrained(partial, state_dict={})  # everything but the tensors
            for path in partial.glob("*.safetensors"):
                path.unlink()
            if quantize is not None:
                _note_quantization(partial / "config.json", quantize.config)
            _write_shards(partial, layout, tensors)
            tokenizer.save_pretrained(partial)

    on_first_rank_gathering(write, tensors)


def _note_quantization(path: Path, quantization: dict[str, Any]) -> None:
    """Add ``quantization_config`` to a saved model's configuration file."""
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(
        json.dumps({**config, "quantization_config": quantization}, indent=2), encoding="utf-8"
    )


def _write_shards(
    folder: Path, layout: Mapping[str, TensorLayout], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write tensors, in the order of ``layout``, as safetensors files with an index."""
    parts: list[dict[str, TensorLayout]] = [{}]
    room = SHARD_BYTES
    for name, entry in layout.items():
        if entry.nbytes > room and parts[-1]:
            parts.append({})
            room = SHARD_BYTES
        parts[-1][name] = entry
        room -= entry.nbytes
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [
            f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            for number in range(1, len(parts) + 1)
        ]
    for file, part in zip(names, parts, strict=True):
        some = itertools.islice(tensors, len(part))
        write_tensors(folder / file, part, some, metadata={"format": "pt"})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in layout.values())},
            "weight_map": {n: file for file, part in zip(names, parts, strict=True) for n in part},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
