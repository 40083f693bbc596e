"""A model's tensors with their names and shapes in a Hugging Face checkpoint."""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from primerl._common.adapters import (
    adapted_layer,
    in_adapted_layer,
    is_factor,
    left_out,
    merged,
    unadapted,
)
from primerl._common.optional import require
from primerl._common.owned_layers import OwnedLayers
from primerl._common.ranks import saved_tensors, whole
from primerl._common.supported_adapters import refuse_unsupported_adapters

SCALES = "_scale_inv"
"""The suffix that, after a quantized tensor's name, makes the name of its scales."""

LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")
"""Matches the layer's name at the start of a tensor's name, such as ``model.layers.3``."""


@attrs.frozen
class TensorLayout:
    """Element type and shape of one tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Quantizer(Protocol):
    """Protocol of a function that quantizes tensors for a checkpoint."""

    dtype: torch.dtype | None
    """The dtype to cast parameters to before they are quantized; None keeps theirs."""
    config: dict[str, Any]
    """``quantization_config`` of the checkpoint's ``config.json``."""

    @property
    def parameters(self) -> Set[str]:
        """Names of the model's parameters that are quantized."""
        ...

    def __call__(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's tensors for the tensor ``name``, such as values and scales.

        Also accepts tensors on the meta device.
        """
        ...


def checkpoint_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = True,
    quantize: Quantizer | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that ``save_pretrained`` would write, gathered, under its name there.

    Tensors are gathered layer by layer, so a rank holds one layer in addition to its shard.
    Gathering a sharded tensor is a collective: every rank iterates to the end. Experts that
    ``transformers`` fuses are split again. A tensor shared under two names is yielded once. Saved
    buffers are included. Low-rank adapters are merged into the weights that they adapt.

    Args:
        model: the trainer's model, sharded or not.
        dtype: dtype to cast floating-point parameters to; None keeps theirs. Buffers always keep
            theirs, because a routing bias in 16 bits would send tokens to other experts.
        merge_adapters: False to yield the weights without the adapters.
        quantize: quantizes tensors, from the trainer's own values; see
            ``fp8.CheckpointQuantizer``.

    Raises:
        ValueError: the model has adapters other than plain LoRA.
    """
    refuse_unsupported_adapters(model)
    dtypes = wire_dtypes(model, dtype, quantize)
    tensors = distinct_tensors(model)  # references, no copies
    for names in layers_of(tensors):
        layer = {name: _whole(name, tensors[name], dtypes[name]) for name in names}
        layer = merged(model, layer) if merge_adapters else left_out(layer)
        yield from _for_checkpoint(model, layer, dtypes, quantize)


def owned_checkpoint_tensors(
    model: nn.Module,
    owned: OwnedLayers,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = True,
    quantize: Quantizer | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of ``checkpoint_tensors`` whose layers this rank owns, layer by layer.

    Each step is a collective: every rank iterates to the end. A rank that has no layer left yields
    empty lists.
    """
    gathered = gathered_layers(model, owned, dtype=dtype, quantize=quantize)
    for layer in gathered:
        yield layer_for_checkpoint(
            model, layer, dtype=dtype, merge_adapters=merge_adapters, quantize=quantize
        )


def gathered_layers(
    model: nn.Module,
    owned: OwnedLayers,
    *,
    dtype: torch.dtype | None = None,
    quantize: Quantizer | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the layers that this rank owns, as the model has them; each step is a collective."""
    dtypes = wire_dtypes(model, dtype, quantize)
    tensors = distinct_tensors(model)
    # Adapted layers are merged in the trainer's precision.
    sent = {n: t.dtype if in_adapted_layer(n) else dtypes[n] for n, t in tensors.items()}
    return owned.gathered(tensors, sent)


def layer_for_checkpoint(
    model: nn.Module,
    layer: dict[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = True,
    quantize: Quantizer | None = None,
) -> list[tuple[str, Tensor]]:
    """Convert a layer of ``gathered_layers`` to the tensors of ``checkpoint_tensors``."""
    dtypes = wire_dtypes(model, dtype, quantize)
    layer = merged(model, layer) if merge_adapters else left_out(layer)
    return list(_for_checkpoint(model, layer, dtypes, quantize))


def _for_checkpoint(
    model: nn.Module,
    layer: dict[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    quantize: Quantizer | None,
) -> Iterator[tuple[str, Tensor]]:
    """Convert a whole layer to the checkpoint's tensors."""
    if not layer:
        return
    layer = {name: tensor.to(dtypes[name]) for name, tensor in layer.items()}
    for name, tensor in converted(model, layer).items():
        yield from ({name: tensor} if quantize is None else quantize(name, tensor)).items()


def checkpoint_layout(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    quantize: Quantizer | None = None,
) -> dict[str, TensorLayout]:
    """Return the names, dtypes and shapes of ``checkpoint_tensors``, in the same order.

    Nothing is gathered.

    Raises:
        ValueError: the tensor names of a layer depend on other layers, so that the model cannot be
            streamed layer by layer, or ``checkpoint_tensors`` would refuse an adapter.
    """
    refuse_unsupported_adapters(model)
    dtypes = wire_dtypes(model, dtype, quantize)
    empty = _empty_tensors(model, dtypes)
    by_layer: dict[str, Tensor] = {}
    for names in layers_of(empty):
        by_layer |= _empty_layer(model, names, empty, dtypes)
    _require_separate_layers(model, by_layer, empty)
    return _layout_of(by_layer, quantize)


def layer_layouts(
    model: nn.Module,
    layers: Iterable[Sequence[str]],
    *,
    dtype: torch.dtype | None = None,
    quantize: Quantizer | None = None,
) -> Iterator[dict[str, TensorLayout]]:
    """Yield the ``checkpoint_layout`` of each of the layers, given the names of their tensors."""
    dtypes = wire_dtypes(model, dtype, quantize)
    empty = _empty_tensors(model, dtypes)
    for names in layers:
        yield _layout_of(_empty_layer(model, names, empty, dtypes), quantize)


def _empty_tensors(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta")
        for name, tensor in distinct_tensors(model).items()
    }


def _empty_layer(
    model: nn.Module,
    names: Sequence[str],
    empty: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Convert a layer of empty tensors to the checkpoint's tensors before they are quantized."""
    layer = merged(model, {name: empty[name] for name in names})
    return converted(model, {name: tensor.to(dtypes[name]) for name, tensor in layer.items()})


def _layout_of(
    tensors: Mapping[str, Tensor], quantize: Quantizer | None
) -> dict[str, TensorLayout]:
    if quantize is not None:
        tensors = {n: t for name, own in tensors.items() for n, t in quantize(name, own).items()}
    return {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def _require_separate_layers(
    model: nn.Module, by_layer: Mapping[str, Tensor], empty: dict[str, Tensor]
) -> None:
    """Check that layers that are converted one by one have the names of all together."""
    together = converted(model, merged(model, empty))
    if by_layer.keys() != together.keys():
        odd = sorted(by_layer.keys() ^ together.keys())
        raise ValueError(
            f"{type(model).__name__} cannot be sent layer by layer, as these tensors depend on "
            f"other layers: {odd[:3]}"
        )


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that ``save_pretrained`` saves, by name; shared tensors once."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: t for name, t in saved_tensors(model).items() if name not in ignored}


def structure_of(model: nn.Module) -> dict[str, str]:
    """Return dtype, shape and, if it is sharded, the placement of each distinct tensor, by name."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {getattr(tensor, 'placements', '')}"
        for name, tensor in distinct_tensors(model).items()
    }


def layers_of(names: Iterable[str]) -> list[list[str]]:
    """Group tensor names by layer, and names outside layers by module, to gather them together.

    Adapters are in the group of the module that they adapt.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = LAYER.match(name)
        module = adapted_layer(name) if is_factor(name) else unadapted(name).rpartition(".")[0]
        groups.setdefault(layer[0] if layer else module, []).append(name)
    return list(groups.values())


def sized_layers(
    model: nn.Module, dtype: torch.dtype | None, quantize: Quantizer | None
) -> tuple[list[list[str]], list[int]]:
    """Return the names of each layer's tensors, and the bytes in which each layer is gathered."""
    dtypes = wire_dtypes(model, dtype, quantize)
    tensors = distinct_tensors(model)
    layers = layers_of(tensors)
    sizes = [sum(tensors[n].numel() * dtypes[n].itemsize for n in layer) for layer in layers]
    return layers, sizes


def wire_dtypes(
    model: nn.Module, dtype: torch.dtype | None, quantize: Quantizer | None
) -> dict[str, torch.dtype]:
    """Return the dtype in which each of a model's tensors is gathered, by name."""
    parameters = {name for name, _ in model.named_parameters()}
    own = {
        name: dtype if dtype and name in parameters and t.is_floating_point() else t.dtype
        for name, t in distinct_tensors(model).items()
    }
    if quantize is not None:  # quantized from the trainer's dtype, not from the published one
        tensors = distinct_tensors(model)
        own |= {name: quantize.dtype or tensors[name].dtype for name in quantize.parameters}
    return own | {unadapted(name): kind for name, kind in own.items()}


def published_bytes(model: nn.Module, dtype: torch.dtype | None, quantize: Quantizer | None) -> int:
    """Estimate the bytes of a version; quantized parameters have a scale per 16 or more bytes."""
    dtypes = wire_dtypes(model, dtype, quantize)
    quantized = set() if quantize is None else quantize.parameters
    return sum(
        tensor.numel() * 5 // 4 if name in quantized else tensor.numel() * dtypes[name].itemsize
        for name, tensor in distinct_tensors(model).items()
    )


def _whole(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if in_adapted_layer(name):
        return whole(tensor.detach())  # merged in the trainer's precision
    return whole(tensor.detach().to(dtype))  # before the gather: fewer bytes travel


class _WithoutAdapters(nn.Module):
    """A base of a model whose parameters have the names that they have without adapters."""

    def get_parameter(self, target: str) -> nn.Parameter:
        return next(p for name, p in self.named_parameters() if unadapted(name) == target)


def _plain(model: nn.Module) -> nn.Module:
    """Return the model as ``transformers`` made it: without FSDP's class, and adapters' names.

    ``transformers`` looks up the names of a checkpoint by the class of the model and its module.
    """
    family: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    plain: nn.Module = object.__new__(_plain_class(family))
    vars(plain).update(vars(model))
    return plain


@functools.cache
def _plain_class(family: Any) -> Any:
    return type(family.__name__, (_WithoutAdapters, family), {"__module__": family.__module__})


def converted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a model's tensors to its checkpoint's format, with ``transformers``' conversion."""
    if not hasattr(model, "save_pretrained"):
        return tensors  # a plain module needs no conversion
    loading = require("transformers.core_model_loading", extra="transformers")
    found: dict[str, Tensor] = loading.revert_weight_conversion(_plain(model), tensors)
    return found
