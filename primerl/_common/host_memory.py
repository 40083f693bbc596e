"""Copies of tensors between host and device for which the host waits as little as possible."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


# The source of each tensor that to_device copied, and the versions of both at that time.
_SOURCES = WeakTensorKeyDictionary()


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device, from pinned memory if that is a GPU, without waiting.

    ``on_host`` finds the host tensor again, as long as neither of the two is modified in place.
    """
    device = torch.device(device)
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    copy = tensor.pin_memory().to(device, non_blocking=True)
    if not (tensor.is_inference() or copy.is_inference()):  # these have no versions
        _SOURCES[copy] = tensor, tensor._version, copy._version
    return copy


def known_on_host(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor in host memory if no copy is needed for it, otherwise None."""
    if tensor.device.type == "cpu":
        return tensor
    if tensor.is_inference():
        return None
    source, *versions = _SOURCES.get(tensor, (None,))  # type: ignore[no-untyped-call]
    if source is None or versions != [source._version, tensor._version]:
        return None
    found: Tensor = source
    return found


def on_host(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in host memory; wait for the device if they are not known."""
    known = known_on_host(tensor)
    return tensor.detach().cpu() if known is None else known


def together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in host memory if all are known there, otherwise as they are.

    For checks, which make the host wait for a device.
    """
    known = [known_on_host(tensor) for tensor in tensors]
    found = tuple(tensor for tensor in known if tensor is not None)
    return found if len(found) == len(tensors) else tensors


def true_rows(rows: Bool[Tensor, " t"]) -> Int[Tensor, " n"]:
    """Return the indices of the true rows, on the device of ``rows``."""
    known = known_on_host(rows)
    if known is None:
        return rows.nonzero().squeeze(1)  # waits for the device
    return to_device(known.nonzero().squeeze(1), rows.device)
