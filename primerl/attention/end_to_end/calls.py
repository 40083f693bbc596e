"""Calls of a kernel by its name, with the keys in the order that it needs."""

import torch
from torch import Tensor

from primerl.attention.end_to_end import cudnn, flash4, spans, varlen
from primerl.attention.end_to_end.interface import SpanInputs
from primerl.attention.span_kernels import groups_of

_FORWARD = {
    "flash4": flash4.forward,
    "cudnn": cudnn.forward,
    "varlen": varlen.forward,
    "spans": spans.forward,
}
_BACKWARD = {
    "flash4": flash4.backward,
    "cudnn": cudnn.backward,
    "varlen": varlen.backward,
    "spans": spans.backward,
}


def forward(name: str, x: SpanInputs) -> tuple[Tensor, Tensor]:
    """Return a kernel's outputs, ``[t, heads, dv]``, and logsumexp, ``[heads, t]``."""
    return _FORWARD[name](_as_needed(name, x))


def backward(
    name: str, x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a kernel's gradients of queries, and of all keys and values."""
    of_q, of_k, of_v = _BACKWARD[name](_as_needed(name, x), gradient, out, logsumexp)
    gathered = None if name == "spans" else x.layout.gathered
    return of_q.contiguous(), _of_all_keys(of_k, x.k, gathered), _of_all_keys(of_v, x.v, gathered)


def _as_needed(name: str, x: SpanInputs) -> SpanInputs:
    """Return the inputs of a kernel, with the keys of the spans end to end, if it needs that."""
    k, v = x.k, x.v
    if name != "spans":  # it reads the keys' rows from the plan
        if x.layout.gathered is not None:
            k, v = (one.index_select(0, x.layout.gathered) for one in (k, v))
        else:
            seen = sum(number * keys for number, _, keys in groups_of(x.layout.plan))
            k, v = k[:seen], v[:seen]
    return x._replace(
        q=x.q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        window=x.window if 0 < x.window < x.layout.max_keys else 0,
    )


def _of_all_keys(found: Tensor, like: Tensor, gathered: Tensor | None) -> Tensor:
    """Return the gradient of all keys from that of the keys that a kernel got."""
    if len(found) == len(like) and gathered is None:
        return found.contiguous()
    # In float32: the gradient of a key that several spans share is summed over the spans.
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = torch.zeros(like.shape, dtype=wide, device=like.device)
    if gathered is None:
        rows[: len(found)] = found  # no span sees the others
    else:
        rows.index_add_(0, gathered, found.to(wide))
    return rows.to(like.dtype)
