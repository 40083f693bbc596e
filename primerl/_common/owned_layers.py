"""Whole layers of a sharded model, each gathered on one of the ranks that own it.

Gathering every layer on every rank moves as many copies of the model as there are ranks. Here, each
rank receives only the layers that it owns: one all-to-all per layer and rank.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from primerl._common.digests import as_bytes
from primerl._common.ranks import exchange
from primerl._common.tensor_pieces import TensorPiece, my_pieces

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the shape of a piece of a tensor."""


def owner_of_each(sizes: Sequence[int], owners: Sequence[int]) -> list[int]:
    """Give each layer to the owner that has the fewest bytes so far; return the owner of each.

    Large layers are given first, so that the owners' shares are about equal. If there are fewer
    layers than owners, only owners at equal distances get one, so that all hosts take part.
    """
    count = min(len(owners), len(sizes))
    held = {owners[index * len(owners) // count]: 0 for index in range(count)}
    found = [0] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        found[layer] = min(held, key=lambda rank: (held[rank], rank))
        held[found[layer]] += sizes[layer]
    return found


class OwnedLayers:
    """Gathers a model's layers, each on its owner.

    All ranks create it, and iterate ``gathered`` together.

    Args:
        tensors: the model's tensors by name, sharded or not.
        layers: the names of each layer's tensors.
        sizes: the bytes of each layer.
        owners: the ranks that own layers, about equally many bytes each.
        group: a gloo group of all ranks; None without a process group.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layers: Sequence[Sequence[str]],
        *,
        sizes: Sequence[int],
        owners: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        owner_of = owner_of_each(sizes, owners)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._layers: list[list[Sequence[str]]] = [
            [layer for layer, owner in zip(layers, owner_of, strict=True) if owner == rank]
            for rank in range(1 if group is None else dist.get_world_size(group))
        ]
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._blocks = _blocks_of_ranks(tensors, group)
        sharded = (one for one in tensors.values() if isinstance(one, DTensor))
        self._device = next((one.to_local().device for one in sharded), torch.device("cpu"))

    @property
    def mine(self) -> list[Sequence[str]]:
        """The names of the tensors of each layer that this rank owns, in order."""
        return self._layers[self._rank]

    @property
    def turns(self) -> list[list[Sequence[str]]]:
        """The names of the tensors of the layer of each rank, for each step of ``gathered``."""
        return [
            [layers[turn] if turn < len(layers) else () for layers in self._layers]
            for turn in range(max(map(len, self._layers)))
        ]

    def gathered(
        self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each layer that this rank owns, cast to ``dtypes``.

        Each step is a collective of all ranks, which must iterate to the end. A rank that has no
        layer left yields an empty mapping.
        """
        for wanted in self.turns:
            if len(wanted) == 1:
                yield {name: tensors[name].detach().to(dtypes[name]) for name in wanted[0]}
            else:
                yield self._exchanged(tensors, dtypes, wanted)

    def _exchanged(
        self,
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        wanted: Sequence[Sequence[str]],
    ) -> dict[str, Tensor]:
        """Send this rank's pieces of all wanted layers; receive those of the layer that it owns."""
        held = my_pieces({name: tensors[name] for names in wanted for name in names})
        by_name: dict[str, list[TensorPiece]] = {}
        for piece in held:
            by_name.setdefault(piece.name, []).append(piece)
        sent = [
            [
                as_bytes(piece.values.to(self._device, dtypes[name]))
                for name in names
                for piece in by_name.get(name, ())
            ]
            for names in wanted
        ]
        parts = [part for each in sent for part in each]
        sizes = [self._bytes_from(rank, wanted[self._rank], dtypes) for rank in range(len(wanted))]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(
            received,
            torch.cat(parts) if parts else received.new_empty(0),
            sizes,
            [sum(len(part) for part in each) for each in sent],
        )
        del sent, parts
        return self._assembled(received, wanted[self._rank], dtypes)

    def _bytes_from(
        self, rank: int, names: Sequence[str], dtypes: Mapping[str, torch.dtype]
    ) -> int:
        return sum(
            torch.Size(shape).numel() * dtypes[name].itemsize
            for name in names
            for _, shape in self._blocks[rank].get(name, ())
        )

    def _assembled(
        self, received: Tensor, names: Sequence[str], dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        layer = {
            name: torch.empty(self._shapes[name], dtype=dtypes[name], device=self._device)
            for name in names
        }
        start = 0
        for blocks in self._blocks:
            for name in names:
                for offsets, shape in blocks.get(name, ()):
                    end = start + torch.Size(shape).numel() * dtypes[name].itemsize
                    # Cloned, since a view of wider elements must begin at a multiple of their size.
                    values = received[start:end].clone().view(dtypes[name]).view(shape)
                    place = tuple(
                        slice(offset, offset + size)
                        for offset, size in zip(offsets, shape, strict=True)
                    )
                    layer[name][place] = values
                    start = end
        return layer


def _blocks_of_ranks(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> list[dict[str, list[Block]]]:
    """Return, for each rank, the blocks that it sends of each tensor."""
    if group is None:
        return []
    mine: dict[str, list[Block]] = {}
    for piece in my_pieces(tensors):
        mine.setdefault(piece.name, []).append((piece.offsets, tuple(piece.values.shape)))
    return [
        {
            name: [(tuple(offsets), tuple(shape)) for offsets, shape in blocks]
            for name, blocks in theirs.items()
        }
        for theirs in exchange(mine, group)
    ]
