"""The binary form of a sequence's per-token arrays: one block in a run's ``rollouts.bin``.

A block is a zstd frame with a checksum. Its content is the arrays, in the order in which the line
of the sequence in ``rollouts.jsonl`` names them with numpy's names of their types (``<i4``: 32-bit
integers, lowest byte first). An array is stored as byte planes, which compress better: the first
byte of every entry, then the second byte of every entry, and so on.
"""

from collections.abc import Mapping

import numpy as np
import zstandard

TYPES = ("<i4", "<f4", "|b1")
LEVEL = 1  # higher levels save 3% and take longer


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the block of arrays ``[t]`` of the same length, whose types are among ``TYPES``."""
    content = np.empty(sum(array.nbytes for array in arrays.values()), np.uint8)
    start = 0
    for array in arrays.values():
        planes = array.view(np.uint8).reshape(-1, array.itemsize).T
        end = start + array.nbytes
        content[start:end].reshape(planes.shape)[...] = planes  # without the GIL, unlike tobytes
        start = end
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(content.data)


def types_of(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the type of each array, little-endian, by numpy's name."""
    return {name: array.dtype.newbyteorder("<").str for name, array in arrays.items()}


def unpacked(block: bytes, types: Mapping[str, str], tokens: int) -> dict[str, np.ndarray]:
    """Return the arrays ``[tokens]`` of a block, the inverse of ``packed``.

    Raises:
        ValueError: the block is damaged, or holds other arrays than ``types``.
    """
    if unknown := set(types.values()) - set(TYPES):
        raise ValueError(f"arrays have the types {sorted(unknown)}, expected {', '.join(TYPES)}")
    dtypes = {name: np.dtype(kind) for name, kind in types.items()}
    size = tokens * sum(dtype.itemsize for dtype in dtypes.values())
    try:
        found = zstandard.frame_content_size(block)
        if found != size:  # checked first, so that a damaged size allocates nothing
            raise ValueError(f"a block holds {found} bytes of arrays, expected {size}")
        content = zstandard.ZstdDecompressor().decompress(block, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a block of arrays is damaged: {error}") from None
    arrays = {}
    start = 0
    for name, dtype in dtypes.items():
        planes = np.frombuffer(content, np.uint8, tokens * dtype.itemsize, start)
        whole = planes.reshape(dtype.itemsize, tokens).T.copy()
        arrays[name] = whole.reshape(-1).view(dtype)
        start += tokens * dtype.itemsize
    return arrays
