"""One chunk of encoded routes: sets of experts as gaps, column by column, for zstd's Huffman stage.

The content of a chunk, before compression:

    [bits[layers, t]: not recorded]  gaps[k, layers, t]

A set in increasing order ``x[0] < x[1] < ...`` has the gaps ``x[0], x[1] - x[0] - 1, ...``. Ids of
two bytes have, for each place in a set, a plane of low bytes before one of high bytes. The bits are
left out where all is recorded. Each place is compressed with a code of its own. See ``codec`` for
what was measured.
"""

import functools
from collections.abc import Sequence

import numpy as np
import zstandard

from primerl.replay.sets import expert_twice, missing_sets

MAX_EXPANSION = 256
"""Encoded chunks have at least 1/256 of their columns' bytes, so that a small file can't claim to
hold a large array; shorter ones are filled up with zeros."""

# Gaps have no repetitions worth a search: a table of 64 positions and matches of 7 bytes leave
# nearly everything to the Huffman stage, at twice the speed of level 1.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7
)


def id_dtype(experts: int) -> np.dtype:
    """The narrowest type of an expert's id: uint8 or uint16."""
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


def column_bytes(tokens: int, layers: int, k: int, experts: int) -> int:
    """The bytes of a chunk's columns before compression."""
    return tokens * layers * k * id_dtype(experts).itemsize


def encode_chunk(
    ids: np.ndarray,
    *,
    experts: int,
    labels: np.ndarray | None,
    first_token: int,
    layers: Sequence[int],
) -> bytes:
    """Encode ``ids[t, layers, k]``.

    Args:
        ids: integers, -1 in all k places where nothing was recorded.
        experts: of a layer.
        labels: ``[layers, experts]``, what each expert is called here; None for its own id.
        first_token: the number of row 0, for errors.
        layers: the numbers of the layers, for errors.

    Raises:
        ValueError: naming layer and token: an expert twice in a set, an id that is no expert's, or
            -1 in only some places.
    """
    tokens, layer_count, k = ids.shape
    missing = missing_sets(ids, experts=experts, first_token=first_token, layers=layers)
    if missing is not None:
        missing = np.ascontiguousarray(missing.T)
    columns = np.empty((k, layer_count, tokens), id_dtype(experts))
    for place in range(k):
        np.copyto(columns[place], ids[:, :, place].T, casting="unsafe")
        if missing is not None:
            columns[place][missing] = place  # any set will do
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
    """Decode a chunk to int16 ``[tokens, layers, k]``, each set in increasing order.

    Args:
        data: as ``encode_chunk`` made it.
        tokens: of the chunk.
        layers: how many.
        k: experts of a set.
        experts: of a layer.
        order: ``[layers, experts]``, the expert of each label, or None.

    Raises:
        ValueError: it isn't what ``encode_chunk`` makes of such a chunk.
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
        raise ValueError(f"routes are damaged: a set is not one of {k} in {experts} experts")
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
    """Sort ``[k, layers, t]`` along k, in place but for the order of the columns.

    Whole columns are compared, ten times as fast as ``numpy.sort``, set by set.
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
    """Batcher's odd-even merge sort: the pairs of places to compare, in order."""
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
    """A frame in which each block has a Huffman code of its own."""
    compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
    stream = compressor.compressobj(size=sum(block.nbytes for block in blocks))
    parts = []
    for block in blocks:
        parts.append(stream.compress(block.data))
        parts.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join([*parts, stream.flush()])


def _decompress(data: bytes | memoryview, *, sizes: tuple[int, int]) -> np.ndarray:
    try:
        # What the frame says of its size is what zstandard would allocate.
        size = zstandard.frame_content_size(data)
        if size not in sizes:
            raise ValueError(f"routes are damaged: a chunk of {size} bytes, expected {sizes}")
        content = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"routes are damaged: {error}") from None
    return np.frombuffer(content, np.uint8)
