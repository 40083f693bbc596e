"""Causal attention within documents, or parts of documents, whose rows lie end to end.

No mask over all rows is ever built. On a GPU, a variable-length kernel computes all spans. On other
devices, spans of equal lengths are computed in one call.
"""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from primerl.attention.documents import Layout

# On a CPU, attention to at most this many tokens is faster in float32 than in bfloat16.
WIDENED_LENGTH = 256


def attend(
    query: Float[Tensor, "t heads d"],
    key: Float[Tensor, "s kv_heads d"],
    value: Float[Tensor, "s kv_heads dv"],
    layout: Layout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "t heads dv"]:
    """Compute causal attention of each span's queries to its keys.

        y_i = sum_j softmax_j(scaling q_i . k_j) v_j    over the keys j that query i sees

    ``torch.nn.attention.varlen`` computes it in bfloat16 and float16 on a GPU; otherwise, the
    kernels of ``scaled_dot_product_attention`` do. ``torch.compile`` traces this function once for
    all layouts. With dropout, or in float32 on a GPU, the function breaks the graph.

    Args:
        query: the queries of all spans, end to end.
        key: the keys; their number of heads divides that of the queries.
        value: the values, with the heads of the keys; their width may differ.
        layout: the layout of the spans, made by ``lay_out``.
        scaling: the factor that multiplies the scores, by default ``1 / sqrt(d)``.
        dropout: the probability that an attention weight is dropped.
    """
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    widths = (query.shape[-1], value.shape[-1])
    fits = query.dtype in (torch.bfloat16, torch.float16) and not dropout
    fits = fits and max(widths) <= 256 and not any(width % 8 for width in widths)
    if fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return _attend_end_to_end(query, key, value, layout, scaling)
    if query.device.type == "cpu" and not dropout:
        q, k, v = _equally_wide(query, key, value)
        attended: Tensor = _attend_on_cpu(q, k, v, layout.plan, scaling)[0]
    else:
        attended = _attend_by_length(query, key, value, layout, scaling, dropout)
    return attended[..., : widths[1]]


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """Pad queries, keys and values with zeros to the same width, which kernels require."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


class _EqualSpans(NamedTuple):
    """Spans of equal lengths, computed in one call."""

    size: int
    """Number of spans."""
    length: int
    """Number of queries of each span."""
    seen: int
    """Number of keys of each span."""
    queries: Tensor
    """Row indices of the queries of all spans."""
    keys: Tensor
    """Row indices of the keys of all spans."""


def _runs(plan: Tensor) -> list[_EqualSpans]:
    """Decode the runs of ``Layout.plan``, which are groups of spans of equal lengths.

    A plan holds the number of runs, then ``count, length, seen`` of each run, then the rows of all
    queries, run by run, and finally the rows of all keys, run by run.
    """
    runs = int(plan[0])
    alike, rows = plan[1 : 1 + 3 * runs].view(-1, 3).tolist(), plan[1 + 3 * runs :]
    start_k = sum(count * length for count, length, _ in alike)
    found, start = [], 0
    for count, length, seen in alike:
        end, end_k = start + count * length, start_k + count * seen
        found.append(_EqualSpans(count, length, seen, rows[start:end], rows[start_k:end_k]))
        start, start_k = end, end_k
    return found


def _stacked(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Select rows of ``[t, heads, d]``, and return them as ``[spans, heads, length, d]``."""
    return x.index_select(0, rows).view(count, -1, *x.shape[1:]).transpose(1, 2)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kernel_inputs(run: _EqualSpans, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], Any]:
    """Return a run's queries, keys and values, and its mask: None for plain causal attention."""
    inputs = [_stacked(q, run.queries, run.size)]
    inputs += [_stacked(x, run.keys, run.size) for x in (k, v)]
    if run.seen <= WIDENED_LENGTH:
        inputs = [_widen(x) for x in inputs]
    if run.length == run.seen:
        return inputs, None
    mask = inputs[0].new_full((run.length, run.seen), -torch.inf)
    return inputs, mask.triu(run.seen - run.length + 1)


# The kernel of scaled_dot_product_attention and its gradient. Custom operators call them directly,
# because a compiled model must not trace code that depends on the layout, and gradients need the
# logsumexp.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("primerl::attend", mutates_args=())
def _attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs, ``[t, heads, d]``, and the logsumexp of the scores, ``[t, heads]``."""
    out, logsumexp = _empty_outputs(q)
    for run in _runs(plan):
        inputs, mask = _kernel_inputs(run, q, k, v)
        outputs, sums = _KERNEL(*inputs, 0.0, mask is None, attn_mask=mask, scale=scaling)
        out.index_copy_(0, run.queries, outputs.transpose(1, 2).flatten(0, 1).to(q.dtype))
        logsumexp.index_copy_(0, run.queries, sums.transpose(1, 2).flatten(0, 1))
    return out, logsumexp


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("primerl::attend_backward", mutates_args=())
def _gradients_on_cpu(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    plan: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q = q.new_empty(q.shape)
    # Zeros, because the gradient of a key that several spans share is summed over the spans.
    grad_k, grad_v = (torch.zeros_like(_widen(x)) for x in (k, v))
    for run in _runs(plan):
        inputs, mask = _kernel_inputs(run, q, k, v)
        outputs = [_stacked(x, run.queries, run.size) for x in (gradient, out)]
        upstream, attended = (x.to(inputs[0].dtype) for x in outputs)
        sums = logsumexp.index_select(0, run.queries).view(run.size, run.length, -1)
        run_gradients = _KERNEL_GRADIENT(
            *(upstream, *inputs, attended, sums.transpose(1, 2), 0.0, mask is None),
            attn_mask=mask,
            scale=scaling,
        )
        run_q, run_k, run_v = (x.transpose(1, 2).flatten(0, 1) for x in run_gradients)
        grad_q.index_copy_(0, run.queries, run_q.to(q.dtype))
        grad_k.index_add_(0, run.keys, run_k.to(grad_k.dtype))
        grad_v.index_add_(0, run.keys, run_v.to(grad_v.dtype))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@_attend_on_cpu.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@_gradients_on_cpu.register_fake
def _(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, plan, ctx.scaling = inputs
    ctx.save_for_backward(q, k, v, *output, plan)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients_on_cpu(gradient, *ctx.saved_tensors, ctx.scaling), None, None


_attend_on_cpu.register_autograd(_backward, setup_context=_save_inputs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float, dropout: float
) -> Tensor:
    runs, outputs = _runs(layout.plan.to(query.device)), []
    for run in runs:
        q = _stacked(query, run.queries, run.size)
        k, v = (_stacked(x, run.keys, run.size) for x in (key, value))
        mask = causal_lower_right(run.length, run.seen) if run.length < run.seen else None
        attended = F.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    in_order = torch.cat([run.queries for run in runs]).argsort()
    return torch.cat(outputs).index_select(0, in_order)


_VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)


def _attend_end_to_end(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float
) -> Tensor:
    kernel: Any = varlen_attn
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in _VARLEN_ARGUMENTS:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in _VARLEN_ARGUMENTS:  # not in torch 2.11
            options["enable_gqa"] = True
        else:
            copies = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    q, k, v = _equally_wide(query, key, value)
    if layout.gathered is not None:
        k, v = (x[layout.gathered] for x in (k, v))
    attended: Tensor = kernel(
        *(q, k, v, layout.query_ends, layout.key_ends, layout.max_queries, layout.max_keys),
        **options,
    )
    return attended[..., : value.shape[-1]]
