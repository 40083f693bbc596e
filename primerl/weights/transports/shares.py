"""The layers that each rank publishes: who owns them, and in which order they are gathered."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
    structure_of,
)
from primerl._common.owned_layers import OwnedLayers
from primerl._common.ranks import exchange, on_every_rank, on_first_rank


@attrs.frozen(kw_only=True, eq=False)
class Shares:
    """Each rank's share of a model's tensors: one layer of each owner per turn."""

    rank: int
    """This process's."""
    owned: OwnedLayers
    turns: list[list[dict[str, TensorLayout]]]
    """For each turn and rank, the tensors of the layer that the rank publishes."""
    structure: dict[str, str]
    """``structure_of`` the model."""

    @property
    def owners(self) -> list[int]:
        """The ranks that own layers."""
        return [rank for rank, layer in enumerate(self.turns[0]) if layer]

    @property
    def mine(self) -> dict[str, TensorLayout]:
        """This rank's tensors, in order."""
        return {name: one for turn in self.turns for name, one in turn[self.rank].items()}

    def __iter__(self) -> Iterator[tuple[int, str, TensorLayout]]:
        """Yield the index of the owner, the name and the layout of each tensor, in order."""
        owners = self.owners
        for turn in self.turns:
            for index, rank in enumerate(owners):
                for name, layout in turn[rank].items():
                    yield index, name, layout

    def still_fit(self, model: nn.Module, ranks: dist.ProcessGroup | None) -> bool:
        """Return whether the model has the same tensors as when it was divided, on all ranks."""
        structure = structure_of(model)
        return all(on_every_rank(lambda: structure == self.structure, ranks))


def shares_of(
    model: nn.Module,
    owners: Sequence[int],
    *,
    dtype: torch.dtype | None,
    quantize: Quantizer | None,
    ranks: dist.ProcessGroup | None,
) -> Shares:
    """Divide a model's layers among ranks that publish them; all ranks call it.

    Args:
        model: the model, sharded or not.
        owners: the ranks that may own layers.
        dtype: see ``checkpoint_tensors``.
        quantize: see ``checkpoint_tensors``.
        ranks: a gloo group of all ranks; None without a process group.

    Raises:
        ValueError: the model cannot be sent layer by layer.
    """
    checkpoint_layout(model, dtype=dtype, quantize=quantize)  # raises, see above
    layers, sizes = sized_layers(model, dtype, quantize)
    owned = OwnedLayers(distinct_tensors(model), layers, sizes=sizes, owners=owners, group=ranks)
    every = [layer for turn in owned.turns for layer in turn]
    layouts = layer_layouts(model, every, dtype=dtype, quantize=quantize)
    return Shares(
        rank=0 if ranks is None else dist.get_rank(),
        owned=owned,
        turns=[[next(layouts) for _ in turn] for turn in owned.turns],
        structure=structure_of(model),
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


def ranks_that_see(folder: Path, ranks: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks that see a file that rank 0 writes into ``folder``."""
    if ranks is None:
        return [0]
    mark = folder / f".seen-{on_first_rank(lambda: uuid.uuid4().hex)}"

    def written() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()

    on_first_rank(written)
    seen = exchange(mark.exists(), ranks)
    on_first_rank(mark.unlink)
    return [rank for rank, one in enumerate(seen) if one]
