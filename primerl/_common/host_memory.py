"""Host memory for copies of tensors, reused from one copy to the next."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


class HostMemory:
    """Keeps a copy of each named tensor in host memory, pinned if the tensor is on a GPU."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, Tensor] = {}

    def copied(self, tensors: Iterable[tuple[K, Tensor]]) -> list[tuple[K, Tensor]]:
        """Copy tensors. A later copy with the same key overwrites the earlier one."""
        copies = []
        on_gpu = False
        for key, tensor in tensors:
            host = self._copies.get(key)
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[key] = host
            copies.append((key, host.copy_(tensor, non_blocking=True)))
            on_gpu = on_gpu or tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        return copies
