"""Comparison of the tensors that an engine computes with and the trainer's, by digests.

An engine returns *readings*: digests of the tensors that it computes with, each with the part of a
published tensor that it should equal. The trainer computes the digest of the same part of its own
tensor. Therefore the comparison is bit for bit, at any learning rate and precision, however the
engine stores its tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import msgspec
import torch
from torch import Tensor

from primerl._common.checkpoint_tensors import SCALES
from primerl._common.digests import content_of, digest_of, digest_of_contents

BYTES = "bytes"
"""Kind of a digest of the elements in row-major order."""
CONTENT = "content"
"""Kind of a digest that ignores the elements' order, for tensors that an engine rearranges."""

Slice = tuple[int, int, int]


@attrs.frozen(kw_only=True)
class TensorSlice:
    """A rectangle of a published tensor: ``tensor[rows][..., columns]``.

    None stands for all rows, or all columns.
    """

    name: str
    rows: Slice | None = None
    columns: Slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of ``tensor``, which is the one called ``name``."""
        if self.rows is not None:
            tensor = tensor[slice(*self.rows)]
        if self.columns is not None:
            tensor = tensor[..., slice(*self.columns)]
        return tensor


@attrs.frozen(kw_only=True)
class Reading:
    """The digest of a tensor with which an engine computes.

    ``parts`` are the parts of published tensors that form it; several if the engine merged them.
    """

    parts: tuple[TensorSlice, ...]
    kind: str
    """``BYTES`` (for a single part) or ``CONTENT``."""
    dtype: str
    """The dtype of the engine's tensor, such as ``"bfloat16"``."""
    digest: str


@runtime_checkable
class WeightReader(Protocol):
    """Protocol of engines that report digests of the tensors that they compute with."""

    def read_weights(
        self, names: Sequence[str], *, turn: int = ..., timeout_s: float = ...
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return each server's readings of the published tensors ``names``, by server."""
        ...


@attrs.frozen(kw_only=True)
class TensorComparison:
    """The result of comparing one server's tensors with the published ones."""

    published: int
    """The number of published tensors."""
    compared: int
    """The number of tensors of which at least a part was compared."""
    wrong: tuple[str, ...]
    """The names of the tensors that differ."""


def reading_of(tensor: Tensor, part: TensorSlice) -> Reading:
    """Return the reading of a tensor that should equal ``part``, element by element."""
    found = digest_of(tensor)
    return Reading(parts=(part,), kind=BYTES, dtype=found.dtype, digest=found.digest)


def rearranged_reading(tensor: Tensor, parts: Sequence[TensorSlice]) -> Reading:
    """Return the reading of a tensor that should hold the elements of ``parts``, in any order."""
    digest = digest_of_contents([content_of(tensor)])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Reading(parts=tuple(parts), kind=CONTENT, dtype=dtype, digest=digest)


def as_builtins(readings: Iterable[Reading]) -> list[dict[str, Any]]:
    """Convert readings to built-in types, for JSON."""
    return [attrs.asdict(one) for one in readings]


def from_builtins(rows: Iterable[Mapping[str, Any]]) -> list[Reading]:
    """Decode the readings that ``as_builtins`` encoded.

    Raises:
        RuntimeError: the readings are malformed.
    """
    try:
        readings = msgspec.convert(list(rows), list[Reading])
        for one in readings:
            known = isinstance(getattr(torch, one.dtype, None), torch.dtype)
            if one.kind not in (BYTES, CONTENT) or not known:
                raise ValueError(f"a reading of kind {one.kind!r} and dtype {one.dtype!r}")
    except ValueError as error:
        raise RuntimeError(
            f"the engine's read_weights returned malformed readings: {error}"
        ) from error
    return readings


def compare(
    tensors: Iterable[tuple[str, Tensor]],
    servers: Mapping[str, Sequence[Reading]],
    *,
    wire: torch.dtype,
) -> dict[str, TensorComparison]:
    """Compare each server's readings with all published tensors.

    Args:
        tensors: the trainer's tensors, by the names and in the shapes of the checkpoint.
        servers: the readings of each server.
        wire: the dtype to which parameters may have been rounded when they were sent. Scales of
            quantized parameters are never rounded.

    Returns:
        The comparison of each server's tensors, by server.
    """
    wanted: dict[str, list[tuple[str, Reading, TensorSlice]]] = {}
    for server, readings in servers.items():
        for reading in readings:
            for part in reading.parts:
                wanted.setdefault(part.name, []).append((server, reading, part))
    wrong: dict[str, set[str]] = {server: set() for server in servers}
    compared: dict[str, set[str]] = {server: set() for server in servers}
    gathered: dict[tuple[str, int], list[Tensor]] = {}  # the parts of a rearranged tensor so far
    published = 0
    for name, tensor in tensors:
        published += 1
        rounded = None if name.endswith(SCALES) else wire
        known: dict[tuple[str, TensorSlice], set[str]] = {}  # servers often have the same parts
        for server, reading, part in wanted.get(name, ()):
            compared[server].add(name)
            own = part.of(tensor.detach())
            if reading.kind == CONTENT:
                parts = gathered.setdefault((server, id(reading)), [])
                parts.append(own)
                if len(parts) < len(reading.parts):
                    continue
                del gathered[server, id(reading)]
                right = reading.digest in _content_digests(parts, reading.dtype, rounded)
            else:
                key = (reading.dtype, part)
                if key not in known:
                    known[key] = {
                        digest_of(one).digest for one in _held(own, reading.dtype, rounded)
                    }
                right = reading.digest in known[key]
            if not right:
                wrong[server] |= {one.name for one in reading.parts}
    for server, identity in gathered:  # a part of this reading's tensor was never published
        unfinished = next(one for one in servers[server] if id(one) == identity)
        wrong[server] |= {one.name for one in unfinished.parts}
    return {
        server: TensorComparison(
            published=published,
            compared=len(compared[server]),
            wrong=tuple(sorted(wrong[server])),
        )
        for server in servers
    }


def _held(own: Tensor, dtype: str, wire: torch.dtype | None) -> list[Tensor]:
    """Return the values that an engine may hold in ``dtype``: rounded when sent, or not."""
    held = [own.to(getattr(torch, dtype))]
    if wire is not None and own.is_floating_point() and wire.itemsize < held[0].dtype.itemsize:
        held.append(own.to(wire).to(held[0].dtype))
    return held


def _content_digests(parts: Sequence[Tensor], dtype: str, wire: torch.dtype | None) -> set[str]:
    """Return the digests that a tensor merged from ``parts`` may have."""
    ways = zip(*(_held(one, dtype, wire) for one in parts), strict=True)
    return {digest_of_contents([content_of(one) for one in way]) for way in ways}
