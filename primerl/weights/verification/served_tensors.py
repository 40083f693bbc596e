"""Readings: digests of the tensors that an engine computes with.

Each reading says which part of a published tensor it should equal. The trainer computes the digest
of the same part of its own tensor (``comparison``). Therefore the comparison is bit for bit, at any
learning rate and precision, however the engine stores its tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import msgspec
import torch
from torch import Tensor

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
