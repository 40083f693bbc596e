"""Loading of a checkpoint directly into a model's shards, so that no rank holds the whole model."""

import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primerl._common.adapters import has_adapters
from primerl._common.checkpoint_tensors import SCALES, distinct_tensors
from primerl._common.files import member
from primerl._common.multimodal import auto_class, freeze_encoders
from primerl._common.optional import require
from primerl._common.progress import report
from primerl._common.ranks import local_part
from primerl._common.waiting import wait_for_all
from primerl.models.placement import ParameterPart, Region, local_region, pieces

Dequantize = Callable[[Tensor, Tensor], Tensor]
"""``(q, scales) -> values``: converts a quantized matrix and its scales to values."""

REPORT_S = 30.0
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def empty_model(model: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Any:
    """Build a causal language model without values, on the ``meta`` device, from its config.

    As in ``load_pretrained``, encoders are built, too, and frozen.

        model = models.empty_model(folder)
        parallel.shard(model, mesh)
        models.load_shards(model, folder, device=world.device)

    Args:
        model: a model folder, or a hub id.
        dtype: dtype of the parameters.

    Raises:
        ValueError: there is no such model, or it is not a causal language model.
    """
    transformers = require("transformers", extra="transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(os.fspath(model))
    except OSError as error:
        raise ValueError(f"cannot read the configuration of {model}: {error}") from error
    if hasattr(config, "quantization_config"):  # the built model is not quantized
        del config.quantization_config
    with torch.device("meta"):
        made = auto_class(config).from_config(config, dtype=dtype)
    freeze_encoders(made)
    with contextlib.suppress(OSError):  # many models have none
        generation = transformers.GenerationConfig.from_pretrained(os.fspath(model))
        made.generation_config.update(**generation.to_diff_dict())
    return made


def load_shards(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dequantize: Dequantize | None = None,
) -> None:
    """Load a checkpoint into a model, in place; each rank reads only the shards that it holds.

    Experts are fused as ``transformers`` does when it loads a checkpoint. Values are converted to
    the parameters' dtypes. Ranks read independently; those of a sharded model then wait, outside of
    collectives, until all have read theirs.

    Args:
        model: a model from ``empty_model``, sharded or not; or any other, whose values are
            replaced.
        folder: a folder of safetensors files, as ``save_pretrained`` writes them.
        device: the device to allocate a model from ``empty_model`` on.
        dequantize: converts a quantized matrix and its scales (``NAME_scale_inv``) to values:
            ``fp8.dequantize``. Quantized matrices are read whole.

    Raises:
        ValueError: the folder has no safetensors files, a tensor is missing or has another shape,
            or tensors are quantized and ``dequantize`` is None.
    """
    if has_adapters(model):
        raise ValueError("the model has adapters; load the checkpoint before peft adds adapters")
    if any(tensor.is_meta for tensor in distinct_tensors(model).values()):
        _materialize(model, torch.device(device))
    report("loading the model", os.fspath(folder))
    with _Checkpoint(Path(folder)) as checkpoint:
        plan, tensors = pieces(model), distinct_tensors(model)
        missing = sorted(
            {p.source for parts in plan.values() for p in parts} - checkpoint.files.keys()
        )
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} tensors of the model, such as {missing[:3]}; pass "
                "a checkpoint of the model's architecture"
            )
        reported = time.monotonic()
        for done, (name, parts) in enumerate(plan.items()):
            for piece in parts:
                _fill(name, tensors[name], piece, checkpoint, dequantize)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                report("loading the model", f"{folder}, {done + 1}/{len(plan)} parameters")
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        wait_for_all(f"the end of loading {folder} on all ranks")


@torch.no_grad()
def _fill(
    name: str,
    tensor: Tensor,
    piece: ParameterPart,
    checkpoint: "_Checkpoint",
    dequantize: Dequantize | None,
) -> None:
    """Copy the part of one piece that this rank holds."""
    source = checkpoint.slices(piece.source)
    mine = local_region(tensor)
    try:
        theirs = piece.region(tensor.shape, source.get_shape())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    overlap = [
        (max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine, theirs, strict=True)
    ]
    if any(first >= last for first, last in overlap):
        return
    wanted: dict[int, slice] = {}
    for axis, begin, (first, last) in zip(piece.axes, theirs, overlap, strict=True):
        if axis is not None:
            wanted[axis] = slice(first - begin.start, last - begin.start)
    part = tuple(wanted[axis] for axis in sorted(wanted)) if wanted else slice(None)
    values: Tensor = source[part]
    if values.is_floating_point() and values.dtype.itemsize < 2:
        if dequantize is None:
            raise ValueError(
                f"{piece.source} is quantized ({values.dtype}); pass dequantize=fp8.dequantize, or "
                "convert the checkpoint to 16 bits first"
            )
        # Dequantized whole, because the part may begin within a block of one scale.
        values = dequantize(source[:], checkpoint.slices(f"{piece.source}{SCALES}")[:])[part]
    followed = [axis for axis in piece.axes if axis is not None]
    values = values.permute(followed).reshape([last - first for first, last in overlap])
    target: Region = tuple(
        slice(first - held.start, last - held.start)
        for held, (first, last) in zip(mine, overlap, strict=True)
    )
    local_part(tensor)[target].copy_(values)


class _Checkpoint(ExitStack):
    """The safetensors files of a folder, opened on first use."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        safetensors = require("safetensors", extra="transformers")
        self._open = safetensors.safe_open
        self._opened: dict[Path, Any] = {}
        if (folder / INDEX).is_file():
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            self.files = {
                name: member(folder, file, may_be_link=True) for name, file in weight_map.items()
            }
        elif (folder / SINGLE).is_file():
            self.files = dict.fromkeys(self._file(folder / SINGLE).keys(), folder / SINGLE)
        else:
            raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}; pass a model folder")

    def slices(self, name: str) -> Any:
        """Return a lazily read tensor; indexing it reads only that part."""
        if name not in self.files:
            raise ValueError(f"the checkpoint lacks the tensor {name}")
        return self._file(self.files[name]).get_slice(name)

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self.enter_context(self._open(path, framework="pt"))
        return self._opened[path]


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the tensors of a meta-device model, and compute buffers that are never saved."""
    model.to_empty(device=device)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    for name, module, buffers in _computed_buffers(model):
        config = getattr(module, "config", None)
        if config is None or "config" not in inspect.signature(type(module)).parameters:
            raise ValueError(
                f"{name}.{buffers[0]} is never saved, and {type(module).__name__} can't be built "
                "from a config to compute it; load the model with models.load_pretrained"
            )
        again = type(module)(config=config)
        for buffer in buffers:
            getattr(module, buffer).copy_(getattr(again, buffer))


def _computed_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    saved = set(model.state_dict())
    for name, module in model.named_modules():
        own = [buffer for buffer, _ in module.named_buffers(recurse=False)]
        unsaved = [buffer for buffer in own if f"{name}.{buffer}".removeprefix(".") not in saved]
        if unsaved:
            yield name, module, unsaved
