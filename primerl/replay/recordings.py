"""The file format of recorded routes, with their first token, shape and policy versions.

    magic[8]  metadata_length u32  checksum u64  metadata  encoded routes (see ``codec``)

The metadata are JSON, and the checksum is their xxh3_64. A reader gets the file's length and a
function that reads a byte range of a local or served file. It reads only the bytes that it needs.
"""

import functools
import struct
from collections.abc import Callable, Sequence

import attrs
import msgspec
import numpy as np
import xxhash

from primerl.replay import codec
from primerl.replay.codec import Span
from primerl.replay.shapes import RouteShape

Reader = Callable[[int, int], bytes]
"""``(begin, end) -> bytes``: reads a file's bytes from ``begin`` to before ``end``."""

_MAGIC = b"record\0\1"
_PREFIX = struct.Struct("<8sIQ")
READ_AT_ONCE = 1 << 16
"""Number of bytes read first, which hold the head of most files."""


class RecordedRoutes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Expert routes of successive tokens.

    ``rows``: int16 ``[t, layers, k]``, each set in increasing order, -1 where not recorded.
    ``versions``: int32 ``[t]``, the version of the policy that computed each row.
    """

    start: int
    """The index of row 0's token."""
    rows: np.ndarray
    versions: np.ndarray

    def within(self, span: Span) -> "RecordedRoutes":
        """Return the routes of the tokens ``span=(first, last + 1)`` that were recorded."""
        end = self.start + len(self.rows)
        if span[0] <= self.start and end <= span[1]:
            return self
        first = min(max(span[0], self.start), end)
        own = slice(first - self.start, max(first, min(span[1], end)) - self.start)
        return RecordedRoutes(start=first, rows=self.rows[own], versions=self.versions[own])


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    start: int
    layers: tuple[int, ...]
    decoder_layers: int
    experts: int
    k: int
    versions: list[tuple[int, int]]
    """Runs of rows with the same version: ``(number of rows, version)``."""


@attrs.frozen(kw_only=True, eq=False)
class RecordingHead:
    """The parsed head of a file of recorded routes: all but the chunks of routes."""

    start: int
    shape: RouteShape
    runs: np.ndarray
    """int64 ``[runs, 2]``: number of rows and version of each run of rows."""
    routes: codec.Head
    offset: int
    """The byte at which the encoded routes begin."""

    @property
    def end(self) -> int:
        """The index after the last recorded token."""
        return self.start + self.routes.tokens

    @property
    def versions(self) -> np.ndarray:
        """The policy version of each row, int64 ``[t]``."""
        return np.repeat(self.runs[:, 1], self.runs[:, 0])


def recording_parts(
    rows: np.ndarray, *, start: int, versions: np.ndarray, shape: RouteShape
) -> list[bytes]:
    """Encode ``rows[t, layers, k]`` and ``versions[t]`` as a file; return its bytes in parts.

    Raises:
        ValueError: rows are invalid; the message names layer and token.
    """
    metadata = _encoded_metadata(start, versions, shape)
    prefix = _PREFIX.pack(_MAGIC, len(metadata), xxhash.xxh3_64_intdigest(metadata))
    routes = codec.encoded_parts(rows, experts=shape.experts, start=start, layers=shape.layers)
    return [prefix, metadata, *routes]


def content_digest(rows: np.ndarray, *, start: int, versions: np.ndarray, shape: RouteShape) -> str:
    """Compute the xxh3_128 of the content that ``recording_parts`` would encode."""
    digest = xxhash.xxh3_128(_encoded_metadata(start, versions, shape))
    digest.update(str(rows.dtype).encode())
    tokens = max(1, READ_AT_ONCE // max(1, rows[:1].nbytes))
    for first in range(0, len(rows), tokens):
        digest.update(np.ascontiguousarray(rows[first : first + tokens]).data)
    return digest.hexdigest()


def read_recording_head(read: Reader, *, total: int, known: bytes = b"") -> RecordingHead:
    """Read the head of a file.

    Args:
        read: reads a byte range of the file.
        total: the file's length in bytes.
        known: the file's first bytes, if some have been read already.

    Raises:
        ValueError: the file is cut off, damaged, or not a file of recorded routes.
    """

    def upto(end: int) -> bytes:
        nonlocal known
        if end > total:
            raise ValueError(f"routes are cut off: {total} bytes, expected at least {end}")
        if end > len(known):
            known += read(len(known), end)
        return known

    magic, length, checksum = _PREFIX.unpack_from(upto(_PREFIX.size))
    if magic != _MAGIC:
        raise ValueError("this is not a file of recorded routes")
    offset = _PREFIX.size + length
    metadata = upto(offset)[_PREFIX.size : offset]
    if xxhash.xxh3_64_intdigest(metadata) != checksum:
        raise ValueError("routes are damaged: the checksum of their metadata is wrong")
    prologue = upto(offset + codec.PROLOGUE_BYTES)[offset : offset + codec.PROLOGUE_BYTES]
    head_bytes = codec.head_bytes(prologue, total=total - offset)
    routes = codec.read_head(upto(offset + head_bytes)[offset:], total=total - offset)
    return _checked_head(metadata, routes, offset)


def read_recording(
    read: Reader, *, total: int, span: Span | None = None, known: bytes = b""
) -> RecordedRoutes:
    """Read the routes of those tokens of a span that the file has.

    Raises:
        ValueError: the file is cut off, damaged, or not a file of recorded routes.
    """
    head = read_recording_head(read, total=total, known=known)
    first, last = (head.start, head.end) if span is None else span
    first = min(max(first, head.start), head.end)
    last = min(max(last, first), head.end)
    rows_span = (first - head.start, last - head.start)
    begin, end = (head.offset + place for place in head.routes.extent(rows_span))
    part = known[begin:end] if end <= len(known) else read(begin, end)
    try:
        rows = codec.decode_part(head.routes, part, span=rows_span)
    except ValueError as error:
        layers = f"{head.shape.layers[0]} to {head.shape.layers[-1]}"
        raise ValueError(f"tokens {first} to {last - 1}, layers {layers}: {error}") from None
    ends = np.cumsum(head.runs[:, 0])
    runs = np.searchsorted(ends, np.arange(*rows_span), side="right")
    return RecordedRoutes(
        start=first,
        rows=rows,
        versions=head.runs[runs, 1].astype(np.int32),
    )


def runs_of(values: np.ndarray) -> Sequence[tuple[int, int]]:
    """Run-length encode values as ``(count, value)``."""
    if not len(values):
        return []
    firsts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(values))])
    counts = np.diff(firsts, append=len(values))
    return list(zip(counts.tolist(), values[firsts].tolist(), strict=True))


def _encoded_metadata(start: int, versions: np.ndarray, shape: RouteShape) -> bytes:
    return msgspec.json.encode(
        _Metadata(
            start=start,
            layers=shape.layers,
            decoder_layers=shape.decoder_layers,
            experts=shape.experts,
            k=shape.k,
            versions=list(runs_of(versions)),
        )
    )


@functools.lru_cache(maxsize=64)  # many short replies of a step have equal metadata
def _decoded_metadata(metadata: bytes) -> tuple[int, RouteShape, np.ndarray]:
    """Decode metadata into the first token, the shape and the runs of versions."""
    try:
        found = msgspec.json.decode(metadata, type=_Metadata)
        shape = RouteShape(
            layers=found.layers,
            decoder_layers=found.decoder_layers,
            experts=found.experts,
            k=found.k,
        )
        runs = np.array(found.versions, np.int64).reshape(-1, 2)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ValueError(f"routes are damaged: {error}") from None
    runs.flags.writeable = False  # the cached array is shared
    return found.start, shape, runs


def _checked_head(metadata: bytes, routes: codec.Head, offset: int) -> RecordingHead:
    start, shape, runs = _decoded_metadata(metadata)
    fits = (routes.layers, routes.k, routes.experts) == (len(shape.layers), shape.k, shape.experts)
    counts, versions = runs[:, 0], runs[:, 1]
    plausible = (
        start >= 0
        and bool((counts >= 1).all() and (counts <= routes.tokens).all())
        and bool((versions >= 0).all() and (versions < 2**31).all())
        and int(counts.sum()) == routes.tokens
    )
    if not fits or not plausible:
        raise ValueError("routes are damaged: their metadata do not match them")
    return RecordingHead(start=start, shape=shape, runs=runs, routes=routes, offset=offset)
