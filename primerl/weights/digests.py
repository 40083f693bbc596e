"""Digests of tensors: xxh3_128, to find accidents, not attacks."""

from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
import xxhash
from torch import Tensor
from torch import uint8 as torch_uint8

_BLOCK = 1 << 20  # stays in the core's cache while it is hashed


@attrs.frozen
class TensorDigest:
    """What one tensor is: element type, shape, and digest of its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor in row-major order, ``uint8[n]``; on the CPU they are not copied."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch_uint8).numpy()


def digest_of(tensor: Tensor) -> TensorDigest:
    """Element type, shape and xxh3_128 of the bytes of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorDigest(
        dtype, tuple(tensor.shape), xxhash.xxh3_128_hexdigest(raw_bytes(tensor).data)
    )


def digest_of_all(tensors: Mapping[str, TensorDigest]) -> str:
    """One digest of a set of named tensors, in whatever order they come."""
    lines = (f"{n}\0{t.dtype}\0{list(t.shape)}\0{t.digest}\n" for n, t in sorted(tensors.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def digest_of_file(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    total = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            total.update(block[:read])
    return total.hexdigest()
