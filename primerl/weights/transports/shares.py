"""The tensors that each rank sends, and the order in which engines' workers receive them."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import (
    Quantizer,
    TensorLayout,
    checkpoint_layout,
    distinct_tensors,
    layer_layouts,
    sized_layers,
)
from primerl._common.owned_layers import OwnedLayers
from primerl._common.ranks import gloo_group


@attrs.frozen(kw_only=True, eq=False)
class Shares:
    """Each rank's share of a model's tensors: one layer of each sender per turn."""

    ranks: dist.ProcessGroup | None
    """A gloo group of all ranks; None without a process group."""
    rank: int
    """This process's."""
    owned: OwnedLayers
    senders: list[int]
    """The ranks that own layers."""
    turns: list[list[dict[str, TensorLayout]]]
    """For each turn and rank, the tensors that the rank sends."""

    def __iter__(self) -> Iterator[tuple[int, str, TensorLayout]]:
        """Yield the index of the sender, the name and the layout of each tensor, in order."""
        for turn in self.turns:
            for index, rank in enumerate(self.senders):
                for name, layout in turn[rank].items():
                    yield index, name, layout


def shares_of(
    model: nn.Module,
    senders: Sequence[int],
    *,
    dtype: torch.dtype | None,
    quantize: Quantizer | None,
    timeout_s: float,
) -> Shares:
    """Divide a model's layers among ranks that send them; all ranks call it.

    Args:
        model: the model, sharded or not.
        senders: the ranks that may own layers.
        dtype: see ``checkpoint_tensors``.
        quantize: see ``checkpoint_tensors``.
        timeout_s: how long the ranks wait for each other.

    Raises:
        ValueError: the model cannot be sent layer by layer.
    """
    checkpoint_layout(model, dtype=dtype, quantize=quantize)  # raises, see above
    layers, sizes = sized_layers(model, dtype, quantize)
    ranks = gloo_group(timeout_s=timeout_s)
    owned = OwnedLayers(distinct_tensors(model), layers, sizes=sizes, owners=senders, group=ranks)
    every = [layer for turn in owned.turns for layer in turn]
    layouts = layer_layouts(model, every, dtype=dtype, quantize=quantize)
    return Shares(
        ranks=ranks,
        rank=0 if ranks is None else dist.get_rank(),
        owned=owned,
        senders=[rank for rank, layer in enumerate(owned.turns[0]) if layer],
        turns=[[next(layouts) for _ in turn] for turn in owned.turns],
    )


def as_announced(
    layer: Sequence[tuple[str, Tensor]], layout: Mapping[str, TensorLayout]
) -> dict[str, Tensor]:
    """Return a layer's tensors by name, if they are those that were announced, in order.

    Raises:
        RuntimeError: they are not.
    """
    expected = iter(layout.items())
    for name, tensor in layer:
        if next(expected, None) != (name, TensorLayout(tensor.dtype, tuple(tensor.shape))):
            raise RuntimeError(f"{name} is not the next tensor that was announced to the engines")
    if missing := [name for name, _ in expected]:
        raise RuntimeError(f"tensors were announced but not sent: {', '.join(missing[:5])}")
    return dict(layer)
