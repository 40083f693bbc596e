"""The tensors that an engine computes with, compared with the trainer's.

An engine answers with *readings*: digests of the tensors that it computes with, each with the part
of the published tensor that it should equal. The trainer computes the same digest of its own
tensor. So the comparison is bit for bit, at any learning rate and precision, however the engine
stores it.
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
"""The digest is of the elements in row-major order."""
CONTENT = "content"
"""The digest is of the elements in any order: where an engine has rearranged them."""

Slice = tuple[int, int, int]


@attrs.frozen(kw_only=True)
class Part:
    """A rectangle of a published tensor: ``tensor[rows][..., columns]``; None for all of them."""

    name: str
    rows: Slice | None = None
    columns: Slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the tensor called ``name``."""
        if self.rows is not None:
            tensor = tensor[slice(*self.rows)]
        if self.columns is not None:
            tensor = tensor[..., slice(*self.columns)]
        return tensor


@attrs.frozen(kw_only=True)
class Reading:
    """A digest of what an engine computes with in place of ``parts``, several if it merged them."""

    parts: tuple[Part, ...]
    kind: str
    """``BYTES``, of a single part, or ``CONTENT``."""
    dtype: str
    """That the engine holds it in, such as ``"bfloat16"``."""
    digest: str


@runtime_checkable
class WeightReader(Protocol):
    """An engine that reports the tensors that it computes with."""

    def read_weights(
        self, names: Sequence[str], *, turn: int = ..., timeout_s: float = ...
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """For each replica by name, its readings of the published tensors ``names``."""
        ...


@attrs.frozen(kw_only=True)
class Comparison:
    """How the tensors of one replica compare with the published ones."""

    published: int
    """Tensors that the trainer has."""
    compared: int
    """Tensors of which at least a part was compared."""
    wrong: tuple[str, ...]
    """Those that differ."""


def reading_of(tensor: Tensor, part: Part) -> Reading:
    """The reading of a tensor that is ``part``, element by element."""
    found = digest_of(tensor)
    return Reading(parts=(part,), kind=BYTES, dtype=found.dtype, digest=found.digest)


def rearranged_reading(tensor: Tensor, parts: Sequence[Part]) -> Reading:
    """The reading of a tensor that holds the elements of ``parts`` in another order."""
    digest = digest_of_contents([content_of(tensor)])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Reading(parts=tuple(parts), kind=CONTENT, dtype=dtype, digest=digest)


def as_builtins(readings: Iterable[Reading]) -> list[dict[str, Any]]:
    """Readings in JSON's types."""
    return [attrs.asdict(one) for one in readings]


def from_builtins(rows: Iterable[Mapping[str, Any]]) -> list[Reading]:
    """The readings that ``as_builtins`` encoded.

    Raises:
        RuntimeError: they are malformed.
    """
    try:
        readings = msgspec.convert(list(rows), list[Reading])
        for one in readings:
            known = isinstance(getattr(torch, one.dtype, None), torch.dtype)
            if one.kind not in (BYTES, CONTENT) or not known:
                raise ValueError(f"a reading of kind {one.kind!r} and dtype {one.dtype!r}")
    except ValueError as error:
        raise RuntimeError(f"an engine's readings of its tensors are malformed: {error}") from error
    return readings


def compare(
    tensors: Iterable[tuple[str, Tensor]],
    replicas: Mapping[str, Sequence[Reading]],
    *,
    wire: torch.dtype,
) -> dict[str, Comparison]:
    """Compare each replica's readings with all tensors that were published.

    Args:
        tensors: of the trainer, by the names and in the shapes of the checkpoint.
        replicas: the readings of each.
        wire: the dtype that parameters may have been rounded to when they were sent; the scales of
            quantized ones may not.
    """
    wanted: dict[str, list[tuple[str, Reading, Part]]] = {}
    for replica, readings in replicas.items():
        for reading in readings:
            for part in reading.parts:
                wanted.setdefault(part.name, []).append((replica, reading, part))
    wrong: dict[str, set[str]] = {replica: set() for replica in replicas}
    compared: dict[str, set[str]] = {replica: set() for replica in replicas}
    gathered: dict[tuple[str, int], list[Tensor]] = {}  # the parts of a rearranged tensor so far
    published = 0
    for name, tensor in tensors:
        published += 1
        rounded = None if name.endswith(SCALES) else wire
        known: dict[tuple[str, Part], set[str]] = {}  # replicas ask for the same
        for replica, reading, part in wanted.get(name, ()):
            compared[replica].add(name)
            own = part.of(tensor.detach())
            if reading.kind == CONTENT:
                parts = gathered.setdefault((replica, id(reading)), [])
                parts.append(own)
                if len(parts) < len(reading.parts):
                    continue
                del gathered[replica, id(reading)]
                right = reading.digest in _content_digests(parts, reading.dtype, rounded)
            else:
                key = (reading.dtype, part)
                if key not in known:
                    known[key] = {
                        digest_of(one).digest for one in _held(own, reading.dtype, rounded)
                    }
                right = reading.digest in known[key]
            if not right:
                wrong[replica] |= {one.name for one in reading.parts}
    for replica, identity in gathered:  # a part of it was never published
        unfinished = next(one for one in replicas[replica] if id(one) == identity)
        wrong[replica] |= {one.name for one in unfinished.parts}
    return {
        replica: Comparison(
            published=published,
            compared=len(compared[replica]),
            wrong=tuple(sorted(wrong[replica])),
        )
        for replica in replicas
    }


def _held(own: Tensor, dtype: str, wire: torch.dtype | None) -> list[Tensor]:
    """What an engine may hold of the trainer's tensor in ``dtype``: rounded when sent, or not."""
    held = [own.to(getattr(torch, dtype))]
    if wire is not None and own.is_floating_point() and wire.itemsize < held[0].dtype.itemsize:
        held.append(own.to(wire).to(held[0].dtype))
    return held


def _content_digests(parts: Sequence[Tensor], dtype: str, wire: torch.dtype | None) -> set[str]:
    """The digests that a tensor merged of ``parts`` may have."""
    ways = zip(*(_held(one, dtype, wire) for one in parts), strict=True)
    return {digest_of_contents([content_of(one) for one in way]) for way in ways}
