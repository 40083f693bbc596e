"""Calls of torch's FlashAttention 2, for all spans at once."""

import torch
from torch import Tensor

from primerl.attention.end_to_end.interface import SpanInputs, equally_wide, narrowed, widened

_KERNEL = torch.ops.aten._flash_attention_forward
_KERNEL_GRADIENT = torch.ops.aten._flash_attention_backward


def forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs and logsumexp."""
    found = _KERNEL(
        *equally_wide(x.q, x.k, x.v),
        *(x.layout.query_ends, x.layout.key_ends, *x.sizes, 0.0, not x.window, False),
        scale=x.scaling,
        window_size_left=x.window - 1 if x.window else -1,
        window_size_right=0,
    )
    return found[0][..., : x.v.shape[-1]], found[1]


def backward(x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values."""
    q, k, v = equally_wide(x.q, x.k, x.v)
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    found = _KERNEL_GRADIENT(
        *(widened(gradient, v.shape[-1]), q, k, v, widened(out, v.shape[-1]), logsumexp),
        *(x.layout.query_ends, x.layout.key_ends, *x.sizes, 0.0, not x.window),
        *(random_state, torch.empty(0, device=q.device)),
        scale=x.scaling,
        window_size_left=x.window - 1 if x.window else -1,
        window_size_right=0,
    )
    return narrowed(found, x)
