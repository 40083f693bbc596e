"""A compressed encoding of expert routes, from which any span of tokens can be decoded.

The format, little-endian:

    magic[8]  tokens u64  layers u32  k u32  experts u32  chunk_tokens u32  by_popularity u32
    [order[layers, experts] u8 or u16]  lengths[chunks] u32  checksums[chunks] u64  xxh3 u64
    chunk 0, chunk 1, ...

The content of a chunk, before compression:

    [bits[layers, t]: not recorded]  gaps[k, layers, t]

A set in increasing order ``x[0] < x[1] < ...`` has the gaps ``x[0], x[1] - x[0] - 1, ...``. If ids
have two bytes, each index in a set has a plane of low bytes, then one of high bytes. The bits are
left out if all sets of the chunk are recorded. Each index in a set has its own Huffman code.

All bytes before ``chunk 0`` are the head, which has its own checksum. With ``by_popularity``, the
experts of each layer are renumbered by how many tokens chose them, and ``order[layer, number]`` is
the expert. Sets of popular experts then have small gaps. Experts are renumbered only if that saves
more bytes than the table takes.

The table shows encoded sizes of 4096 tokens, relative to one raw byte per chosen expert. 8 of 128
has 48 layers, 8 of 256 has 75. Skewed: the n-th expert has the weight 1/n. Trained: four layers of
a toy model trained on this project's source, 16384 tokens. Bound: the entropy of sets with these
popularities. From "one code" on, sizes exclude the table, which takes 0.004, 0.008 and 0.001:

                                 8 of 128           8 of 256       8 of 128
                              uniform  skewed    uniform  skewed    trained
    bound                      0.631    0.483     0.758    0.569     0.571
    here                       0.658    0.515     0.788    0.605     0.578
    one code for all indices   0.656    0.516     0.784    0.599     0.592
    columns by layer first     0.656    0.551     0.784    0.650     0.593
    zstd level 3               0.656    0.544     0.784    0.622     0.593
    zstd level 6               0.656    0.538     0.784    0.618     0.593
    experts not renumbered     0.658    0.655     0.788    0.785     0.657
    sets without gaps          0.788    0.632     0.888    0.692     0.827
    zstd level 3 of raw bytes  0.875    0.873     1.000    1.000     0.798

Higher zstd levels search for repetitions, but there are none. Differences from the previous token
are not coded, because they would have to be decoded token by token. The toy's successive tokens
have 1.4 of 8 experts in common, and a code that exploits this, but not popularity, needs at least
0.599. ``bench/test_replay.py`` measures speeds, and a case with 3 experts in common.
"""

import functools
import math
import struct
from collections.abc import Sequence

import attrs
import numpy as np
import xxhash
import zstandard

from primerl.replay.shapes import expert_twice, missing_sets

MAX_EXPANSION = 256
"""The largest ratio of decoded to encoded bytes, so that a small file can't claim to hold a large
array. Encoded chunks below 1/256 of their columns' bytes are padded with zeros."""

# Searching gaps for repetitions is not worthwhile: with a table of 64 positions and matches of at
# least 7 bytes, nearly all is left to the Huffman stage, at twice the speed of level 1.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7
)


def id_dtype(experts: int) -> np.dtype:
    """Return the narrowest dtype of expert ids: uint8 or uint16."""
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


def column_bytes(tokens: int, layers: int, k: int, experts: int) -> int:
    """Return the number of bytes of a chunk's columns before compression."""
    return tokens * layers * k * id_dtype(experts).itemsize


def encode_chunk(
    ids: np.ndarray,
    *,
    experts: int,
    labels: np.ndarray | None,
    first_token: int,
    layers: Sequence[int],
) -> bytes:
    """Encode one chunk of routes, ``ids[t, layers, k]``.

    Args:
        ids: integers; -1 in all k entries if nothing was recorded.
        experts: number of experts per layer.
        labels: ``[layers, experts]``, the label that replaces each expert id: its rank by
            popularity. None to keep the ids.
        first_token: the token of row 0, for errors.
        layers: the indices of the layers, for errors.

    Raises:
        ValueError: a set has an expert twice, an id out of range, or -1 in only some entries; the
            message names layer and token.
    """
    tokens, layer_count, k = ids.shape
    missing = missing_sets(ids, experts=experts, first_token=first_token, layers=layers)
    if missing is not None:
        missing = np.ascontiguousarray(missing.T)
    columns = np.empty((k, layer_count, tokens), id_dtype(experts))
    for place in range(k):
        np.copyto(columns[place], ids[:, :, place].T, casting="unsafe")
        if missing is not None:
            columns[place][missing] = place  # any valid set
    if labels is not None:
        _rename(columns, labels)
    places = _sorted(columns)
    gaps = np.empty_like(columns)
    gaps[0] = places[0]
    for place in range(1, k):
        np.subtract(places[place], places[place - 1], out=gaps[place])
    if not gaps[1:].all():
        layer, token = np.argwhere((gaps[1:] == 0).any(0))[0]
        raise expert_twice(ids[token, layer], layers[layer], first_token + int(token))
    gaps[1:] -= 1
    bits = np.zeros(0, np.uint8)
    if missing is not None:
        gaps[:, missing] = 0
        bits = np.packbits(missing)
    blocks = [bits, *(_planes(place) for place in gaps)]
    return _compress(blocks).ljust(-(-gaps.nbytes // MAX_EXPANSION), b"\0")


def decode_chunk(
    data: bytes | memoryview,
    *,
    tokens: int,
    layers: int,
    k: int,
    experts: int,
    order: np.ndarray | None,
) -> np.ndarray:
    """Decode a chunk to int16 ``[tokens, layers, k]``, with each expert set in increasing order.

    Args:
        data: the bytes that ``encode_chunk`` returned.
        tokens: number of tokens in the chunk.
        layers: number of layers.
        k: number of experts in a set.
        experts: number of experts per layer.
        order: ``[layers, experts]``, the id of the expert with each label; None if the chunk has
            expert ids instead of labels.

    Raises:
        ValueError: the data are damaged, or not of a chunk of this shape.
    """
    dtype = id_dtype(experts)
    size = column_bytes(tokens, layers, k, experts)
    bit_bytes = -(-tokens * layers // 8)
    content = _decompress(data, sizes=(size, size + bit_bytes))
    gaps = _from_planes(content[len(content) - size :].reshape(k, -1), dtype)
    gaps = gaps.reshape(k, layers, tokens)
    columns = np.empty_like(gaps)
    columns[0] = gaps[0]
    in_order = True
    for place in range(1, k):
        np.add(columns[place - 1], gaps[place], out=columns[place])
        columns[place] += 1
        # A sum that doesn't fit into the type wraps around to a smaller one.
        in_order &= bool((columns[place] > columns[place - 1]).all())
    if not in_order or columns[-1].max() >= experts:
        raise ValueError(
            f"routes are damaged: a set must have {k} of {experts} experts, all distinct"
        )
    places = list(columns)
    if order is not None:
        _rename(columns, order)
        places = _sorted(columns)
    rows = np.empty((tokens, layers, k), np.int16)
    for place, column in enumerate(places):
        rows[:, :, place] = column.T
    if len(content) > size:
        bits = np.unpackbits(content[:bit_bytes], count=tokens * layers)
        rows[bits.reshape(layers, tokens).T.astype(bool)] = -1
    return rows


def _rename(columns: np.ndarray, names: np.ndarray) -> None:
    for layer, layer_names in enumerate(names):
        ids = columns[:, layer]
        ids[...] = layer_names.take(ids, mode="clip")  # twice as fast as "raise"


def _sorted(columns: np.ndarray) -> list[np.ndarray]:
    """Sort ``[k, layers, t]`` along k, and return the k sorted columns; overwrites ``columns``.

    A sorting network compares whole columns, ten times as fast as ``numpy.sort``.
    """
    places = list(columns)
    spare = np.empty_like(columns[0])
    for low, high in _comparators(len(places)):
        np.minimum(places[low], places[high], out=spare)
        np.maximum(places[low], places[high], out=places[high])
        places[low], spare = spare, places[low]
    return places


@functools.cache
def _comparators(k: int) -> tuple[tuple[int, int], ...]:
    """Return the index pairs that Batcher's odd-even merge sort of k items compares, in order."""
    pairs = []
    run = 1
    while run < k:
        distance = run
        while distance >= 1:
            for low in range(distance % run, k - distance):
                in_step = (low - distance % run) % (2 * distance) < distance
                if in_step and low // (2 * run) == (low + distance) // (2 * run):
                    pairs.append((low, low + distance))
            distance //= 2
        run *= 2
    return tuple(pairs)


def _planes(ids: np.ndarray) -> np.ndarray:
    flat = ids.reshape(-1)
    if ids.dtype == np.uint8:
        return flat
    return np.concatenate([flat.astype(np.uint8), (flat >> 8).astype(np.uint8)])


def _from_planes(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.uint8:
        return planes
    low, high = np.split(planes, 2, axis=1)
    ids: np.ndarray = low | (high.astype(dtype) << 8)
    return ids


def _compress(blocks: Sequence[np.ndarray]) -> bytes:
    """Compress blocks into one zstd frame, with a separate Huffman code for each block."""
    compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
    stream = compressor.compressobj(size=sum(block.nbytes for block in blocks))
    parts = []
    for block in blocks:
        parts.append(stream.compress(block.data))
        parts.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join([*parts, stream.flush()])


def _decompress(data: bytes | memoryview, *, sizes: tuple[int, int]) -> np.ndarray:
    try:
        # Checked first, because zstandard allocates the size that the frame states.
        size = zstandard.frame_content_size(data)
        if size not in sizes:
            raise ValueError(f"routes are damaged: a chunk has {size} bytes, expected {sizes}")
        content = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"routes are damaged: {error}") from None
    return np.frombuffer(content, np.uint8)


Span = tuple[int, int]

# ---- the whole encoding: a head and its chunks ----

_MAGIC = b"routes\0\1"
_PROLOGUE = struct.Struct("<8sQIIIII")
_LENGTH, _CHECKSUM = np.dtype("<u4"), np.dtype("<u8")
_CHUNK_BYTES = 1 << 19  # of a chunk's columns, so that sorting them stays within a core's cache
_SAMPLED = 1024  # tokens from which the popularity of experts is estimated
_LARGEST = 2**15  # most experts per layer, because ids are decoded to int16

PROLOGUE_BYTES = _PROLOGUE.size
"""Number of first bytes that ``head_bytes`` needs."""


def encode(
    rows: np.ndarray, *, experts: int, start: int = 0, layers: Sequence[int] | None = None
) -> bytes:
    """Encode ``rows[t, layers, k]``; the order of experts within a set is not kept.

    Args:
        rows: integers; -1 in all k entries of a (token, layer) that was not recorded.
        experts: number of experts per layer, at most 32768.
        start: the token of row 0, for errors.
        layers: the indices of the layers, for errors; 0, 1, ... by default.

    Raises:
        ValueError: a set has an expert twice, an id out of range, or -1 in only some entries (the
            message names layer and token); or the rows are not an integer array of this shape.
    """
    return b"".join(encoded_parts(rows, experts=experts, start=start, layers=layers))


def encoded_parts(
    rows: np.ndarray, *, experts: int, start: int = 0, layers: Sequence[int] | None = None
) -> list[bytes]:
    """Encode like ``encode``, but return parts: joining large ones would block other threads."""
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or 0 in rows.shape[1:]:
        raise ValueError(
            f"routes have shape {rows.shape} and type {rows.dtype}; expected integers "
            "[t, layers, k]"
        )
    tokens, layer_count, k = rows.shape
    if not k <= experts <= _LARGEST:
        raise ValueError(
            f"{k} of {experts} experts per token; expected at most {_LARGEST} experts, and no more "
            "experts per token than there are"
        )
    chunk_tokens = max(1, _CHUNK_BYTES // column_bytes(1, layer_count, k, experts))
    order = _by_popularity(rows, experts)
    labels = None if order is None else np.argsort(order, axis=1).astype(order.dtype)
    chunks = [
        encode_chunk(
            rows[first : first + chunk_tokens],
            experts=experts,
            labels=labels,
            first_token=start + first,
            layers=range(layer_count) if layers is None else layers,
        )
        for first in range(0, tokens, chunk_tokens)
    ]
    prologue = _PROLOGUE.pack(
        _MAGIC, tokens, layer_count, k, experts, chunk_tokens, int(order is not None)
    )
    table = b"" if order is None else order.astype(order.dtype.newbyteorder("<")).tobytes()
    lengths = np.array([len(chunk) for chunk in chunks], _LENGTH).tobytes()
    checksums = np.array([xxhash.xxh3_64_intdigest(chunk) for chunk in chunks], _CHECKSUM).tobytes()
    head = prologue + table + lengths + checksums
    return [head, np.array(xxhash.xxh3_64_intdigest(head), _CHECKSUM).tobytes(), *chunks]


def decode(data: bytes | memoryview, *, span: Span | None = None) -> np.ndarray:
    """Decode ``encode``'s bytes to int16 ``[t, layers, k]``, each set in increasing order.

    With ``span=(first, last + 1)``, only the chunks that hold these tokens are decoded.

    Raises:
        ValueError: the data are cut off, damaged or not encoded routes, or the span is out of
            range.
    """
    head = read_head(data, total=len(data))
    begin, end = head.extent(span)
    return decode_part(head, memoryview(data)[begin:end], span=span)


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """The parsed head of encoded routes, which precedes the chunks."""

    tokens: int
    layers: int
    k: int
    experts: int
    chunk_tokens: int
    order: np.ndarray | None
    """``[layers, experts]``: the expert of each number; None if experts were not renumbered."""
    ends: np.ndarray
    """``int64[chunks + 1]``: byte offsets in the data; chunk i is from ends[i] to ends[i + 1]."""
    checksums: np.ndarray
    """xxh3_64 of each chunk, ``uint64[chunks]``."""

    def extent(self, span: Span | None) -> tuple[int, int]:
        """Return the first byte, and the one after the last, of the chunks that hold a span.

        Raises:
            ValueError: the span is out of range.
        """
        first, stop = self._chunks(span)
        return int(self.ends[first]), int(self.ends[stop])

    def _chunks(self, span: Span | None) -> tuple[int, int]:
        first, last = (0, self.tokens) if span is None else span
        if not 0 <= first <= last <= self.tokens:
            raise ValueError(f"span {span} is outside of the {self.tokens} tokens recorded")
        if first == last:
            return 0, 0
        return first // self.chunk_tokens, -(-last // self.chunk_tokens)


def head_bytes(prologue: bytes | memoryview, *, total: int) -> int:
    """Compute the length of the head from its first ``PROLOGUE_BYTES``.

    ``total`` is the length of the head and the chunks together.

    Raises:
        ValueError: these are not encoded routes, or the head would be larger than the data.
    """
    if len(prologue) < PROLOGUE_BYTES or bytes(prologue[:8]) != _MAGIC:
        raise ValueError("these are not encoded routes, or they are cut off")
    _, tokens, layers, k, experts, chunk_tokens, by_popularity = _PROLOGUE.unpack_from(prologue)
    plausible = (
        layers and 1 <= k <= experts <= _LARGEST and chunk_tokens and by_popularity in (0, 1)
    )
    claimed = column_bytes(tokens, layers, k, experts)
    if not plausible or claimed > MAX_EXPANSION * total:
        raise ValueError(
            f"routes are damaged: {tokens} tokens of {layers} layers with {k} of {experts} experts "
            f"can't be in {total} bytes"
        )
    chunks = -(-tokens // chunk_tokens)
    table = by_popularity * layers * experts * id_dtype(experts).itemsize
    entries = chunks * (_LENGTH.itemsize + _CHECKSUM.itemsize)
    length: int = PROLOGUE_BYTES + table + entries + _CHECKSUM.itemsize
    if length > total:
        raise ValueError(
            f"routes are cut off: they have {total} bytes in all, but their head takes {length}"
        )
    return length


def read_head(data: bytes | memoryview, *, total: int) -> Head:
    """Read the head of encoded routes.

    Args:
        data: at least the head.
        total: the length of all data in bytes.

    Raises:
        ValueError: the head is damaged, or the data don't have the length that it states.
    """
    length = head_bytes(data[:PROLOGUE_BYTES], total=total)
    head = bytes(data[:length])
    body, checksum = head[: -_CHECKSUM.itemsize], head[-_CHECKSUM.itemsize :]
    if len(head) < length or xxhash.xxh3_64_intdigest(body) != int.from_bytes(checksum, "little"):
        raise ValueError("routes are damaged: the checksum of their head is wrong")
    _, tokens, layers, k, experts, chunk_tokens, by_popularity = _PROLOGUE.unpack_from(body)
    chunks = -(-tokens // chunk_tokens)
    place = PROLOGUE_BYTES
    order = None
    if by_popularity:
        dtype = id_dtype(experts).newbyteorder("<")
        order = np.frombuffer(body, dtype, layers * experts, place)
        order = order.astype(id_dtype(experts)).reshape(layers, experts)
        place += order.nbytes
        if (np.sort(order, axis=1) != np.arange(experts)).any():
            raise ValueError("routes are damaged: their table of experts is not a permutation")
    lengths = np.frombuffer(body, _LENGTH, chunks, place).astype(np.int64)
    ends = length + np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if ends[-1] != total:
        raise ValueError(f"routes are cut off or damaged: {total} bytes, expected {ends[-1]}")
    held = np.minimum(chunk_tokens, tokens - chunk_tokens * np.arange(chunks))
    if (held * column_bytes(1, layers, k, experts) > MAX_EXPANSION * lengths).any():
        raise ValueError("routes are damaged: a chunk claims more tokens than its bytes can hold")
    return Head(
        tokens=tokens,
        layers=layers,
        k=k,
        experts=experts,
        chunk_tokens=chunk_tokens,
        order=order,
        ends=ends,
        checksums=np.frombuffer(body, _CHECKSUM, chunks, place + chunks * _LENGTH.itemsize),
    )


def decode_part(head: Head, part: bytes | memoryview, *, span: Span | None = None) -> np.ndarray:
    """Decode a span's tokens from the bytes of ``head.extent(span)``: int16 ``[t, layers, k]``.

    Raises:
        ValueError: the part is cut off or damaged, or the span is out of range.
    """
    first, last = (0, head.tokens) if span is None else span
    begin, end = head.extent(span)
    if len(part) != end - begin:
        raise ValueError(f"routes are cut off: {len(part)} bytes of chunks, expected {end - begin}")
    rows = np.empty((last - first, head.layers, head.k), np.int16)
    for number in range(*head._chunks(span)):
        chunk = memoryview(part)[head.ends[number] - begin : head.ends[number + 1] - begin]
        if xxhash.xxh3_64_intdigest(chunk) != head.checksums[number]:
            raise ValueError(f"routes are damaged: the checksum of chunk {number} is wrong")
        chunk_first = number * head.chunk_tokens
        tokens = min(head.chunk_tokens, head.tokens - chunk_first)
        decoded = decode_chunk(
            chunk,
            tokens=tokens,
            layers=head.layers,
            k=head.k,
            experts=head.experts,
            order=head.order,
        )
        low, high = max(first, chunk_first), min(last, chunk_first + tokens)
        rows[low - first : high - first] = decoded[low - chunk_first : high - chunk_first]
    return rows


def _by_popularity(rows: np.ndarray, experts: int) -> np.ndarray | None:
    """Rank the experts of each layer by popularity; None if the table takes more than it saves.

    The bits saved per set are estimated from n sampled sets: the entropy of independent choices of
    equal popularity minus that of the sample, ``sum_e h(p_e)`` with ``h(p) = -p log2 p - (1 - p)
    log2 (1 - p)``. The sample's entropy is too low by about ``experts / (2 n ln 2)``.
    """
    tokens, layers, k = rows.shape
    sample = rows[:: max(1, tokens // _SAMPLED)]
    counts = np.empty((layers, experts), np.int64)
    for layer in range(layers):
        ids = sample[:, layer].reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= experts):
            ids = ids[(ids >= 0) & (ids < experts)]  # invalid ids are reported by encode_chunk
        counts[layer] = np.bincount(ids, minlength=experts)
    sets = counts.sum(axis=1) / k
    shares = np.minimum(counts / np.maximum(sets, 1)[:, None], 1.0)
    equal = _entropy(np.full(experts, k / experts)).sum()
    saved = sets * (equal - _entropy(shares).sum(axis=1))
    bits = (saved - experts / (2 * math.log(2))).sum() * tokens / max(1, len(sample))
    if bits <= 8 * layers * experts * id_dtype(experts).itemsize:
        return None
    return np.argsort(-counts, axis=1, kind="stable").astype(id_dtype(experts))


def _entropy(shares: np.ndarray) -> np.ndarray:
    inside = np.clip(shares, 1e-12, 1 - 1e-12)
    entropy: np.ndarray = -(inside * np.log2(inside) + (1 - inside) * np.log2(1 - inside))
    return entropy
