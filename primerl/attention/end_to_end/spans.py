"""Calls of ``span_kernels``, which compute the same on every device."""

from torch import Tensor

from primerl.attention.end_to_end.interface import SpanInputs, equally_wide, narrowed, widened
from primerl.attention.span_kernels import attend_by_span, attend_by_span_gradients


def forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs and logsumexp."""
    q, k, v = equally_wide(x.q, x.k, x.v)
    options = (x.scaling, x.window, 0, x.cap)
    out, sums = attend_by_span(q, k, v, None, x.layout.plan, *options)
    return out[..., : x.v.shape[-1]], sums.T


def backward(x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values."""
    q, k, v = equally_wide(x.q, x.k, x.v)
    upstream, attended = (widened(one, v.shape[-1]) for one in (gradient, out))
    options = (x.scaling, x.window, 0, x.cap)
    found = attend_by_span_gradients(
        upstream, q, k, v, attended, logsumexp.T.contiguous(), x.layout.plan, *options
    )
    return narrowed(found, x)
