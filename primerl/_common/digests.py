"""Digests of tensors by xxh3_128, which detects accidental damage, not attacks."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
import xxhash
from torch import Tensor

_BLOCK = 1 << 20  # stays in the core's cache while it is hashed
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class TensorDigest:
    """The dtype, the shape and the digest of the row-major bytes of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def flat(tensor: Tensor) -> Tensor:
    """Return all elements as a contiguous vector, without a copy where possible."""
    # Conjugated and negative views store other bits than their values have.
    elements = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element is contiguous whatever its stride, but a view as bytes requires a stride of 1.
    return elements.as_strided((1,), (1,)) if elements.numel() == 1 else elements


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in row-major order, ``uint8[n]``, without a copy where possible."""
    return flat(tensor).view(torch.uint8)


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """Return a tensor's bytes in row-major order, ``uint8[n]``; on the CPU without a copy."""
    return as_bytes(tensor.detach().cpu()).numpy()


def digest_of(tensor: Tensor) -> TensorDigest:
    """Compute the digest of a tensor: dtype, shape and xxh3_128 of its bytes."""
    return described(tensor, xxhash.xxh3_128_hexdigest(raw_bytes(tensor).data))


def described(tensor: Tensor, digest: str) -> TensorDigest:
    """Combine the dtype and the shape of a tensor with a digest of bytes; its own are not read."""
    return TensorDigest(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)


@attrs.frozen(eq=False)
class HashedTensor:
    """A tensor and its digest, which holds until the tensor is changed."""

    tensor: Tensor
    digest: TensorDigest
    _version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "HashedTensor":
        """Hash a tensor, whose bytes are read."""
        version = _version_of(tensor)
        return cls(tensor, digest_of(tensor), version)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the same object, which torch has not changed since."""
        return tensor is self.tensor and _version_of(tensor) == self._version >= 0


def _version_of(tensor: Tensor) -> int:
    """Return torch's count of changes of a tensor; -1 if it does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def digest_of_all(tensors: Mapping[str, TensorDigest]) -> str:
    """Combine the digests of named tensors into one, independent of their order."""
    lines = (f"{n}\0{t.dtype}\0{list(t.shape)}\0{t.digest}\n" for n, t in sorted(tensors.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def digest_of_file(path: Path) -> str:
    """Compute the xxh3_128 of a file's bytes."""
    total = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            total.update(block[:read])
    return total.hexdigest()


def content_of(tensor: Tensor) -> tuple[int, int]:
    """Compute the sum and the sum of squares of a tensor's words, independent of their order.

    A word is the bit pattern of an element, read as a signed integer. Zeros, with which engines
    pad, do not change the sums.
    """
    words = flat(tensor.detach()).view(_WORDS[tensor.dtype.itemsize])
    total = squares = 0
    for block in torch.split(words, _BLOCK):
        wide = block.to(torch.int64)
        total += int(wide.sum())
        squares += int((wide * wide).sum())
    return total, squares


def digest_of_contents(contents: Iterable[tuple[int, int]]) -> str:
    """Combine several results of ``content_of`` into one digest of both sums modulo 2^64."""
    totals, squares = zip(*contents, strict=True)
    return f"{sum(totals) % 2**64:016x}{sum(squares) % 2**64:016x}"
