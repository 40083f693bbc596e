"""A model's tensors as its Hugging Face checkpoint names and shapes them."""

import math
import re
from collections.abc import Iterable, Iterator, Set
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from primerl._common.adapters import (
    in_adapted_layer,
    left_out,
    merged,
    refuse_other_adapters,
    unadapted,
)
from primerl._common.optional import require
from primerl._common.ranks import saved_tensors, whole

SCALES = "_scale_inv"
"""What ends the name of a quantized tensor's scales, after the tensor's own."""

LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")
"""What begins the name of a layer's tensor: the name of the layer."""


@attrs.frozen
class TensorLayout:
    """Element type and shape of one tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Quantizer(Protocol):
    """Makes tensors of a checkpoint what they are when it is quantized."""

    dtype: torch.dtype | None
    """That quantized parameters have before; None: their own."""
    config: dict[str, Any]
    """``quantization_config`` of the checkpoint's ``config.json``."""

    @property
    def parameters(self) -> Set[str]:
        """Names of the model's parameters that are quantized."""
        ...

    def __call__(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What the checkpoint holds of its tensor ``name``; also of one on the meta device."""
        ...


def checkpoint_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = True,
    quantize: Quantizer | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that ``save_pretrained`` would write, whole, under the name it would have.

    Tensors come layer by layer, so a rank holds one layer in addition to its shard. Gathering a
    sharded tensor is a collective: every rank iterates to the end. Experts that ``transformers``
    fuses are taken apart again; a tensor shared under two names comes once; saved buffers are
    included. Low-rank adapters are added to the weights that they adapt.

    Args:
        model: the trainer's, sharded or not.
        dtype: that floating-point parameters are cast to; None keeps theirs. Buffers keep
            theirs, because a routing bias in 16 bits would send tokens to other experts.
        merge_adapters: False for the weights without them.
        quantize: makes what is quantized, from the trainer's own values; see
            ``fp8.CheckpointQuantizer``.

    Raises:
        ValueError: an adapter is not low-rank, or can't be added to its weight.
    """
    refuse_other_adapters(model)
    dtypes = wire_dtypes(model, dtype, quantize)
    tensors = distinct_tensors(model)  # references, no copies
    for names in layers_of(tensors):
        layer = {name: _whole(name, tensors[name], dtypes[name]) for name in names}
        layer = merged(model, layer) if merge_adapters else left_out(layer)
        layer = {name: tensor.to(dtypes[name]) for name, tensor in layer.items()}
        for name, tensor in converted(model, layer).items():
            yield from ({name: tensor} if quantize is None else quantize(name, tensor)).items()


def checkpoint_layout(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    quantize: Quantizer | None = None,
) -> dict[str, TensorLayout]:
    """Names, element types and shapes of ``checkpoint_tensors``, without moving a tensor.

    They come in the same order.

    Raises:
        ValueError: the names of a layer depend on other layers, so that it cannot be streamed, or
            an adapter is one that ``checkpoint_tensors`` refuses.
    """
    refuse_other_adapters(model)
    dtypes = wire_dtypes(model, dtype, quantize)
    empty = {
        name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta")
        for name, tensor in distinct_tensors(model).items()
    }
    empty = {name: tensor.to(dtypes[name]) for name, tensor in merged(model, empty).items()}
    by_layer: dict[str, Tensor] = {}
    for names in layers_of(empty):
        by_layer |= converted(model, {name: empty[name] for name in names})
    together = converted(model, empty)
    if by_layer.keys() != together.keys():
        odd = sorted(by_layer.keys() ^ together.keys())
        raise ValueError(f"{type(model).__name__} cannot be sent layer by layer: {odd[:3]}")
    if quantize is not None:
        by_layer = {n: t for name, own in by_layer.items() for n, t in quantize(name, own).items()}
    return {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in by_layer.items()}


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that ``save_pretrained`` saves, by name; a shared one once."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: t for name, t in saved_tensors(model).items() if name not in ignored}


def layers_of(names: Iterable[str]) -> list[list[str]]:
    """Names that are gathered together: those of a layer, or of one module outside the layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = LAYER.match(name)
        groups.setdefault(layer[0] if layer else name.rpartition(".")[0], []).append(name)
    return list(groups.values())


def wire_dtypes(
    model: nn.Module, dtype: torch.dtype | None, quantize: Quantizer | None
) -> dict[str, torch.dtype]:
    """The element type in which each of a model's tensors is gathered, by name."""
    parameters = {name for name, _ in model.named_parameters()}
    own = {
        name: dtype if dtype and name in parameters and t.is_floating_point() else t.dtype
        for name, t in distinct_tensors(model).items()
    }
    if quantize is not None:  # from what the trainer multiplies with, not what others are sent in
        tensors = distinct_tensors(model)
        own |= {name: quantize.dtype or tensors[name].dtype for name in quantize.parameters}
    return own | {unadapted(name): kind for name, kind in own.items()}


def _whole(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if in_adapted_layer(name):
        return whole(tensor.detach())  # to be merged as the trainer computes
    return whole(tensor.detach().to(dtype))  # before the gather: fewer bytes travel


def converted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that these of a model make, by ``transformers``' conversion."""
    if not hasattr(model, "save_pretrained"):
        return tensors  # a plain module has no other names
    loading = require("transformers.core_model_loading", extra="transformers")
    found: dict[str, Tensor] = loading.revert_weight_conversion(model, tensors)
    return found
