"""Computing in 16 bits on a single rank, where nothing is sharded."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every forward pass compute in ``dtype``, while parameters and gradients keep theirs.

    By ``torch.autocast``, as sharding does by gathering parameters in ``dtype``: matrix products
    and attention are in 16 bits, reductions such as norms and softmax in 32.
    """
    entered: list[ExitStack] = []

    def enter(module: nn.Module, *_: Any) -> None:
        device = next(module.parameters()).device.type
        stack = ExitStack()
        stack.enter_context(torch.autocast(device, dtype))
        entered.append(stack)

    def leave(*_: Any) -> None:
        entered.pop().close()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
