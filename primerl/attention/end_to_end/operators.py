"""The operator of torch that attends, and the operator of its gradients."""

from typing import Any

import torch
from torch import Tensor

from primerl.attention.end_to_end import calls
from primerl.attention.end_to_end.choice import kernel_for_pack
from primerl.attention.end_to_end.interface import SpanInputs, empty_outputs
from primerl.attention.end_to_end.layouts import layout_of

# A sink is a key with the same score for all queries, and a value of zero. It divides a query's
# output by a larger sum. With this sum, and with the output so divided, the gradient of attention
# without a sink is the gradient with one. So kernels that know no sinks have them.


@torch.library.custom_op("primerl::attend_end_to_end", mutates_args=())
def attend_end_to_end(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: Tensor,
    scaling: float,
    window: int,
    chunk: int,
    cap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, ``[t, heads, dv]``, and the logsumexp of the scores, ``[heads, t]``."""
    if not len(q):
        return empty_outputs(q, v)
    layout = layout_of(plan, chunk, q.device)
    x = SpanInputs(q=q, k=k, v=v, layout=layout, scaling=scaling, window=window, cap=cap)
    name = kernel_for_pack(x, sinks=sinks is not None, kernel=kernel)
    out, logsumexp = calls.forward(name, x)
    if sinks is not None:
        column = sinks.to(logsumexp.dtype).unsqueeze(1)
        out = (out * torch.sigmoid(logsumexp - column).T.unsqueeze(-1)).to(out.dtype)
        logsumexp = torch.logaddexp(logsumexp, column)
    return out.contiguous(), logsumexp.contiguous()


@torch.library.custom_op("primerl::attend_end_to_end_backward", mutates_args=())
def attend_end_to_end_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    plan: Tensor,
    scaling: float,
    window: int,
    chunk: int,
    cap: float,
    kernel: str,
    sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    if not len(q):
        return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    layout = layout_of(plan, chunk, q.device)
    x = SpanInputs(q=q, k=k, v=v, layout=layout, scaling=scaling, window=window, cap=cap)
    name = kernel_for_pack(x, sinks=sinks, kernel=kernel)
    return calls.backward(name, x, gradient.contiguous(), out, logsumexp)


@attend_end_to_end.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


@attend_end_to_end_gradients.register_fake
def _(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, plan, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, plan, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    found = attend_end_to_end_gradients(gradient, *saved, *ctx.options, sinks is not None)
    of_sinks = None
    if sinks is not None:
        out, logsumexp = saved[3], saved[4]
        shares = (sinks.to(logsumexp.dtype).unsqueeze(1) - logsumexp).exp()
        arriving = (gradient * out).to(logsumexp.dtype).sum(-1).T
        of_sinks = -(shares * arriving).sum(1).to(sinks.dtype)
    return *found, of_sinks, *(None,) * 6


attend_end_to_end.register_autograd(_backward, setup_context=_save_inputs)
