"""Pinned host memory for optimizer states, without torch's rounding to powers of two."""

from collections.abc import Iterable

import torch
from torch import Tensor

from primerl._common.ranks import local_part

MOST_BYTES = 2**32
ALIGNMENT = 512


class PinnedMemory:
    """Pinned host memory that long-lived tensors share, in few large blocks.

    torch rounds each pinned allocation up to a power of two, so that a tensor of 192 MiB would take
    256 MiB. Here, the size of each block is a power of two, and tensors are views of blocks. A
    block is no larger than the sum of the expected tensors, or than a single tensor needs; smaller
    tensors fill gaps that larger ones leave. Memory returns to torch when this object and all
    tensors of a block are gone; until then, the memory of single tensors is not used again.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._used: list[int] = []  # bytes of each block
        self._expected = 0  # bytes

    def expect(self, values: Iterable[Tensor], *, dtype: torch.dtype | None = None) -> None:
        """Announce that tensors like these will be allocated next."""
        self._expected = sum(_size(local_part(value), dtype or value.dtype) for value in values)

    def like(self, value: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of unspecified values with the shape, strides and sharding of another."""
        dtype = dtype or value.dtype
        local = local_part(value)
        memory = self._take(_size(local, dtype))[: local.numel() * dtype.itemsize].view(dtype)
        axes = zip(local.shape, local.stride(), strict=True)
        if 1 + sum((length - 1) * stride for length, stride in axes) == local.numel():
            memory = memory.as_strided(local.shape, local.stride())
        else:  # a view with gaps or repetitions
            memory = memory.view(local.shape)
        if local is value:
            return memory
        sharded = torch.empty_like(value, dtype=dtype, device="cpu")
        with torch.no_grad():  # so that the local part is no view
            local_part(sharded).set_(
                memory.untyped_storage(),
                memory.storage_offset(),
                memory.shape,
                memory.stride(),
            )
        return sharded

    def _take(self, size: int) -> Tensor:
        """Return ``size`` bytes of a block."""
        expected = max(size, min(self._expected, MOST_BYTES))
        self._expected = max(0, self._expected - size)
        for n, block in enumerate(self._blocks):
            used = self._used[n]
            if used + size <= len(block):
                self._used[n] += size
                return block[used : used + size]
        holds_one = 1 << (size - 1).bit_length()
        length = max(holds_one, 1 << (expected.bit_length() - 1))
        self._blocks.append(self._allocate(length))
        self._used.append(size)
        return self._blocks[-1][:size]

    def _allocate(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, pin_memory=True)


def _size(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in a dtype, with those that align the next one."""
    return -(-max(tensor.numel() * dtype.itemsize, 1) // ALIGNMENT) * ALIGNMENT
