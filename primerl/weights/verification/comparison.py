"""Comparison of engines' readings with the trainer's tensors, by all ranks of the trainer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import (
    SCALES,
    Quantizer,
    distinct_tensors,
    owned_checkpoint_tensors,
    sized_layers,
)
from primerl._common.digests import content_of, digest_of, digest_of_contents
from primerl._common.owned_layers import OwnedLayers
from primerl._common.ranks import (
    gloo_group,
    is_first_rank,
    on_every_rank_gathering,
    on_first_rank,
)
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl.weights.transports.publications.manifests import timeout_of
from primerl.weights.verification.served_tensors import (
    CONTENT,
    Reading,
    TensorSlice,
    as_builtins,
    from_builtins,
)

Content = tuple[int, int]
"""The result of ``content_of``, or a sum of such results."""


@attrs.frozen(kw_only=True)
class TensorComparison:
    """The result of comparing one server's tensors with the published ones."""

    published: int
    """The number of published tensors."""
    compared: int
    """The number of tensors of which at least a part was compared."""
    wrong: tuple[str, ...]
    """The names of the tensors that differ."""


@attrs.frozen(kw_only=True)
class RankComparison:
    """The result of comparing readings with the tensors that one rank owns.

    Readings are identified by their positions.
    """

    published: int
    """The number of this rank's tensors."""
    compared: tuple[str, ...]
    """The names of this rank's tensors that readings refer to."""
    wrong: tuple[int, ...]
    """The readings that differ from this rank's tensors, if order matters."""
    contents: tuple[tuple[int, Content, Content], ...]
    """The rearranged readings of which this rank has parts, each with the summed contents of these
    parts: unrounded, and rounded when they were sent."""

    def as_json(self) -> dict[str, Any]:
        """Convert this to built-in types."""
        return attrs.asdict(self)


class TensorComparer:
    """Comparer of engines' readings with a model's tensors, on all ranks.

    Each rank receives some of the layers whole, and compares the readings with these. Rank 0 sends
    the readings, and combines what the ranks found: names, digests and sums, never tensors.

    Args:
        model: the trainer's model, sharded or not.
        wire: the dtype to which parameters may have been rounded when they were sent. Scales of
            quantized parameters are never rounded.
        quantize: quantizes tensors, as the transport does.
    """

    def __init__(
        self, model: nn.Module, *, wire: torch.dtype, quantize: Quantizer | None = None
    ) -> None:
        self._model = model
        self._wire = wire
        self._quantize = quantize
        self._group: dist.ProcessGroup | None = None
        self._owned: OwnedLayers | None = None  # found with the first comparison

    def compare(
        self, servers: Mapping[str, Sequence[Reading]], *, merge_adapters: bool = True
    ) -> dict[str, TensorComparison]:
        """Compare each server's readings with all published tensors, a collective of all ranks.

        Args:
            servers: the readings of each server, on rank 0; ignored on other ranks.
            merge_adapters: False to compare the weights without adapters.

        Returns:
            The comparison of each server's tensors, by server; empty on ranks other than 0.

        Raises:
            ValueError: the model has adapters other than plain LoRA.
        """
        refuse_unsupported_adapters(self._model)
        servers = servers if is_first_rank() else {}
        readings = from_builtins(on_first_rank(lambda: as_builtins(distinct_readings(servers))))
        layers = owned_checkpoint_tensors(
            self._model,
            self._owned_layers(),
            merge_adapters=merge_adapters,
            quantize=self._quantize,
        )

        def work() -> dict[str, Any]:
            tensors = (one for layer in layers for one in layer)
            return examine(tensors, readings, wire=self._wire).as_json()

        return combine(servers, readings, on_every_rank_gathering(work, layers, self._group))

    def _owned_layers(self) -> OwnedLayers:
        if self._owned is None:
            layers, sizes = sized_layers(self._model, None, self._quantize)
            self._group = gloo_group(timeout_s=timeout_of(sum(sizes)))
            ranks = 1 if self._group is None else dist.get_world_size()
            self._owned = OwnedLayers(
                distinct_tensors(self._model),
                layers,
                sizes=sizes,
                owners=range(ranks),
                group=self._group,
            )
        return self._owned


def distinct_readings(servers: Mapping[str, Iterable[Reading]]) -> list[Reading]:
    """Return the readings of all servers, equal ones once: most servers hold the same tensors."""
    return list(dict.fromkeys(one for readings in servers.values() for one in readings))


def examine(
    tensors: Iterable[tuple[str, Tensor]], readings: Sequence[Reading], *, wire: torch.dtype
) -> RankComparison:
    """Compare readings with the tensors that this rank owns.

    Args:
        tensors: this rank's tensors, by the names and in the shapes of the checkpoint.
        readings: the distinct readings of all servers, also of other ranks' tensors.
        wire: the dtype to which parameters may have been rounded when they were sent. Scales of
            quantized parameters are never rounded.
    """
    wanted: dict[str, list[tuple[int, TensorSlice]]] = {}
    for index, reading in enumerate(readings):
        for part in reading.parts:
            wanted.setdefault(part.name, []).append((index, part))
    wrong: set[int] = set()
    contents: dict[int, tuple[Content, Content]] = {}
    compared: list[str] = []
    published = 0
    for name, tensor in tensors:
        published += 1
        rounded = None if name.endswith(SCALES) else wire
        if name in wanted:
            compared.append(name)
        for index, part in wanted.get(name, ()):
            reading = readings[index]
            held = _held(part.of(tensor.detach()), reading.dtype, rounded)
            if reading.kind == CONTENT:
                sums = contents.get(index, ((0, 0), (0, 0)))
                found = [content_of(one) for one in held]
                contents[index] = (_plus(sums[0], found[0]), _plus(sums[1], found[-1]))
            elif all(digest_of(one).digest != reading.digest for one in held):
                wrong.add(index)
    return RankComparison(
        published=published,
        compared=tuple(compared),
        wrong=tuple(sorted(wrong)),
        contents=tuple((index, *sums) for index, sums in contents.items()),
    )


def combine(
    servers: Mapping[str, Sequence[Reading]],
    readings: Sequence[Reading],
    ranks: Iterable[Mapping[str, Any]],
) -> dict[str, TensorComparison]:
    """Combine the ranks' results into the comparison of each server.

    Args:
        servers: the readings of each server.
        readings: the readings that the ranks compared.
        ranks: ``RankComparison.as_json`` of each rank.
    """
    found = [msgspec.convert(one, RankComparison) for one in ranks]
    compared = {name for one in found for name in one.compared}
    wrong = {readings[index] for one in found for index in one.wrong}
    contents: dict[int, list[tuple[Content, Content]]] = {}
    for one in found:
        for index, plain, rounded in one.contents:
            contents.setdefault(index, []).append((plain, rounded))
    for index, sums in contents.items():
        whole = all(part.name in compared for part in readings[index].parts)
        digests = {digest_of_contents(way) for way in zip(*sums, strict=True)}
        if not whole or readings[index].digest not in digests:
            wrong.add(readings[index])
    comparisons = {}
    for server, own in servers.items():
        names = {part.name for reading in own for part in reading.parts}
        differ = {part.name for reading in own if reading in wrong for part in reading.parts}
        comparisons[server] = TensorComparison(
            published=sum(one.published for one in found),
            compared=len(names & compared),
            wrong=tuple(sorted(differ)),
        )
    return comparisons


def _held(own: Tensor, dtype: str, wire: torch.dtype | None) -> list[Tensor]:
    """Return the values that an engine may hold in ``dtype``: as they are, and rounded if sent so.

    The first are unrounded, and the last are rounded; where both are the same, there is only one.
    """
    held = [own.to(getattr(torch, dtype))]
    if wire is not None and own.is_floating_point() and wire.itemsize < held[0].dtype.itemsize:
        held.append(own.to(wire).to(held[0].dtype))
    return held


def _plus(first: Content, second: Content) -> Content:
    return first[0] + second[0], first[1] + second[1]
