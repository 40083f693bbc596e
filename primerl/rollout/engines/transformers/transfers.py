"""Transfers of small values from Python to a device."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of numbers on ``device``; a GPU does not have to finish its work before."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
