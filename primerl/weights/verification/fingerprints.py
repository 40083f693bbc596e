"""Fingerprints of a model's weights, by which a change is noticed, of whatever kind."""

import math

import torch
from torch import Tensor, nn

from primerl._common.digests import as_bytes
from primerl._common.ranks import local_part, saved_tensors

_WORD = torch.int64.itemsize


def fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """Return the fingerprint of each parameter and saved buffer, of this rank's shard, by name.

    The bytes of a tensor are read as 64-bit integers and laid out as a square. Its fingerprint is
    the sum of each row and of each column, modulo 2^64, and what does not fit into the square:
    ``int64[about 2 to 4 sqrt(n)]``. It reads a tensor twice, on its device: 0.1 s for 540 MB on a
    CPU.
    """
    return {name: fingerprint(local_part(one)) for name, one in saved_tensors(model).items()}


def changed_since(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return the names of the tensors that have changed since ``fingerprints``, or came or went."""
    now = fingerprints(model)
    return [
        name
        for name in before | now
        if name not in before
        or name not in now
        or before[name].shape != now[name].shape
        or not torch.equal(before[name], now[name].to(before[name].device))
    ]


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a tensor; see ``fingerprints``."""
    data = as_bytes(tensor.detach())
    if data.storage_offset() % _WORD:
        data = data.clone()
    words = data[: len(data) // _WORD * _WORD].view(torch.int64)
    side = math.isqrt(len(words))
    square = words[: side * side].view(side, side)
    last = data[len(words) * _WORD :].to(torch.int64)
    return torch.cat([square.sum(0), square.sum(1), words[side * side :], last])
