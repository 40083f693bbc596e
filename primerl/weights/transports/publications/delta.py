"""Lossless differences between two versions of a tensor's bytes.

A training step at a small learning rate changes few of the 16-bit words that are sent to engines. A
difference has two integers per changed word: the gap to the previous changed word, and the change.
Both are variable-length integers (LEB128: 7 bits per byte, least significant first). Together they
take about 3 bytes per changed word.

An encoded difference consists of three ``uint64`` (bytes of the tensor, changed words, bytes of
gaps), the gaps, and the changes, all little-endian. A gap is the number of unchanged words in
between. A change is ``new - old`` modulo 2^16, as a signed number in zigzag order (0, -1, 1, -2,
...). If the number of bytes is odd, the last byte counts as a word.
"""

import numpy as np
from jaxtyping import UInt8, UInt16, UInt64

_HEADER = 3 * 8
_MAX_VARINT = 5  # bytes: 2^35 words, more than any tensor has
_ARE_BITS = np.uint64(0x7F)


def encode(old: UInt8[np.ndarray, " n"], new: UInt8[np.ndarray, " n_too"]) -> np.ndarray | None:
    """Encode the difference that turns ``old`` into ``new``.

    Returns:
        ``uint8[m]``, or None if this would not be shorter than ``new`` (m >= n).

    Raises:
        ValueError: ``old`` and ``new`` have different lengths.
    """
    if len(old) != len(new):
        raise ValueError(f"a difference needs equal lengths, got {len(old)} and {len(new)}")
    before, after = _words(old), _words(new)
    at = np.flatnonzero(before != after)
    if _HEADER + 2 * len(at) >= len(new):
        return None
    gaps = _varints(np.diff(at, prepend=-1).astype(np.uint64) - 1)
    change = (after[at] - before[at]).view(np.int16).astype(np.int32)
    changes = _varints(((change << 1) ^ (change >> 31)).astype(np.uint64))
    header = np.array([len(new), len(at), len(gaps)], dtype="<u8").view(np.uint8)
    encoded = np.concatenate([header, gaps, changes])
    return encoded if len(encoded) < len(new) else None


def apply(encoded: UInt8[np.ndarray, " m"], target: UInt8[np.ndarray, " n"]) -> None:
    """Apply a difference to ``target`` in place, which turns its old bytes into the new ones.

    Raises:
        ValueError: ``encoded`` is damaged or is for another tensor; ``target`` is unchanged.
    """
    if len(encoded) < _HEADER:
        raise ValueError(f"the difference is truncated: it has only {len(encoded)} bytes")
    size, count, gap_bytes = (int(x) for x in encoded[:_HEADER].copy().view("<u8"))
    if size != len(target):
        raise ValueError(f"the difference is for {size} bytes, the tensor has {len(target)}")
    if gap_bytes > len(encoded) - _HEADER:
        raise ValueError(f"the difference is truncated: it has only {len(encoded)} bytes")
    words = (size + 1) // 2
    gaps = _integers(encoded[_HEADER : _HEADER + gap_bytes], count)
    changes = _integers(encoded[_HEADER + gap_bytes :], count)
    if not count:
        return
    # Gaps are below 2^35, so a sum that wrapped would first have exceeded `words`: max() finds it.
    at = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)
    if int(at.max()) >= words:
        raise ValueError(
            f"the difference changes word {int(at.max())}, but the number of words is {words}"
        )
    if int(changes.max()) >= 1 << 16:
        raise ValueError("the difference holds a change of more than 16 bits")
    delta = ((changes >> np.uint64(1)) ^ (np.uint64(0) - (changes & np.uint64(1)))).astype(
        np.uint16
    )
    _add(target, at.astype(np.int64), delta)


def _add(target: np.ndarray, at: np.ndarray, delta: np.ndarray) -> None:
    even = target[: len(target) // 2 * 2].view("<u2")
    if at[-1] == len(even):  # the odd last byte
        last = int(target[-1]) + int(delta[-1]) & 0xFFFF
        if last > 0xFF:
            raise ValueError("the difference makes the last byte exceed 255")
        target[-1] = last
        at, delta = at[:-1], delta[:-1]
    even[at] += delta


def _words(data: UInt8[np.ndarray, " n"]) -> UInt16[np.ndarray, " w"]:
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    return data.view("<u2")


def _varints(values: UInt64[np.ndarray, " k"]) -> UInt8[np.ndarray, " b"]:
    lengths = np.ones(len(values), dtype=np.int64)
    for digit in range(1, _MAX_VARINT):
        lengths += values >= np.uint64(1 << 7 * digit)
    ends = np.cumsum(lengths)
    out = np.empty(int(lengths.sum()), dtype=np.uint8)
    for digit in range(int(lengths.max(initial=0))):
        some = lengths > digit
        bits = (values[some] >> np.uint64(7 * digit)) & _ARE_BITS
        more = (lengths[some] > digit + 1).astype(np.uint64) << np.uint64(7)
        out[(ends - lengths)[some] + digit] = bits | more
    return out


def _integers(stream: UInt8[np.ndarray, " b"], count: int) -> UInt64[np.ndarray, " k"]:
    ends = np.flatnonzero(stream < 0x80) + 1
    if len(ends) != count or (int(ends[-1]) if count else 0) != len(stream):
        raise ValueError(f"the difference is damaged: {len(ends)} numbers, {count} expected")
    if not count:
        return np.zeros(0, dtype=np.uint64)
    lengths = np.diff(ends, prepend=0)
    if int(lengths.max()) > _MAX_VARINT:
        raise ValueError(
            f"the difference is damaged: an encoded integer has {int(lengths.max())} bytes, which "
            "is too many"
        )
    starts = ends - lengths
    digit = (np.arange(len(stream)) - np.repeat(starts, lengths)).astype(np.uint64)
    bits = (stream.astype(np.uint64) & _ARE_BITS) << (np.uint64(7) * digit)
    return np.add.reduceat(bits, starts)
