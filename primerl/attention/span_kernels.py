"""Attention of spans by operators of torch, on a CPU and wherever no variable-length kernel fits.

Spans of equal lengths are computed in one call. On a CPU, short spans are padded to equal lengths,
because many small calls take longer. With a window or chunks, the queries of a span are divided
into blocks, and each block gets only the keys that it sees. So the work is proportional to the
window.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from primerl._common.host_memory import to_device
from primerl.attention.documents import Span, once_per_tensor

HOST = torch.device("cpu")

# On a CPU, attention to at most this many tokens is faster in float32 than in bfloat16.
WIDENED_LENGTH = 256
# Such spans are padded to a multiple of this many queries, and of four times as many keys, but not
# where spans of equal lengths have more scores than ``PADDED_SCORES``: their own call is no waste.
PADDED_TO = 16
PADDED_SCORES = 2**15
# The maximum number of queries of a block with a window; the minimum is an eighth.
BLOCK = 512
# The maximum number of scores that are kept at a time where no kernel computes them.
MAX_SCORES = 2**24


class EqualSpans(NamedTuple):
    """Spans of equal lengths, blocks of such spans, or padded spans, for a single call."""

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
    real: Tensor | None = None
    """Indices of the queries that are no padding; None without padding."""
    hidden: Tensor | None = None
    """With padding: which keys each query does not see, ``[size, 1, length, seen]``."""

    @property
    def real_queries(self) -> Tensor:
        """Row indices of the queries, without padding."""
        return self.queries if self.real is None else self.queries.index_select(0, self.real)


# A plan holds the number of runs, which are groups of spans of equal lengths, then ``count, length,
# seen`` of each run, then the rows of all queries, run by run, and finally the rows of all keys,
# run by run. It is in host memory and decoded there, so that nothing waits for a GPU.


@once_per_tensor
def groups_of(plan: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Return the number, queries and keys of spans of equal lengths, from ``Layout.plan``."""
    found = plan[1 : 1 + 3 * int(plan[0])].view(-1, 3).tolist()
    return tuple((number, queries, keys) for number, queries, keys in found)


@once_per_tensor  # all layers have the same plan
def equal_spans(plan: Tensor, device: torch.device) -> list[EqualSpans]:
    """Decode the runs of ``Layout.plan``, with rows on a device."""
    groups = groups_of(plan)
    with torch.inference_mode(False):  # backward passes can't save inference tensors
        # A clone, because the cached result would keep a plan alive whose views it has.
        rows = to_device(plan[1 + 3 * len(groups) :].clone(), device)
    start_k = sum(count * length for count, length, _ in groups)
    found, start = [], 0
    for count, length, seen in groups:
        end, end_k = start + count * length, start_k + count * seen
        found.append(EqualSpans(count, length, seen, rows[start:end], rows[start_k:end_k]))
        start, start_k = end, end_k
    return found


def spans_of(plan: Tensor) -> tuple[Span, ...]:
    """Decode the spans of ``Layout.plan`` that have queries, in the order of their queries."""
    found = []
    for run in equal_spans(plan, HOST):
        if run.length:
            begins = run.queries.view(run.size, -1)[:, 0].tolist()
            for begin, keys in zip(begins, run.keys.view(run.size, -1).numpy(), strict=True):
                found.append(Span(begin, begin + run.length, _ranges(keys)))
    return tuple(sorted(found))


def _ranges(rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the ranges of consecutive rows that make up ``rows``."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)


@once_per_tensor  # all layers have the same plan
def padded_spans(plan: Tensor) -> list[EqualSpans]:
    """Decode a plan for a CPU, and pad short spans, so that fewer calls suffice."""
    found: list[EqualSpans] = []
    short: dict[tuple[int, int], list[EqualSpans]] = {}
    for run in equal_spans(plan, HOST):
        scores = run.size * run.length * run.seen
        if run.length and run.seen <= WIDENED_LENGTH and scores <= PADDED_SCORES:
            size = -(-run.length // PADDED_TO), -(-run.seen // (4 * PADDED_TO))
            short.setdefault(size, []).append(run)
        else:
            found.append(run)
    found += [_padded(runs) if len(runs) > 1 else runs[0] for runs in short.values()]
    return found


def _padded(runs: list[EqualSpans]) -> EqualSpans:
    """Pad spans by their last query and their last key, which are hidden or not used."""
    sizes = torch.tensor([run.size for run in runs], device=HOST)
    lengths, seen = (
        torch.tensor(sizes_of, device=HOST).repeat_interleave(sizes).unsqueeze(1)
        for sizes_of in ([run.length for run in runs], [run.seen for run in runs])
    )
    query, key = (torch.arange(int(x.max()), device=HOST) for x in (lengths, seen))
    queries, keys = [], []
    for run in runs:
        queries.append(run.queries.view(run.size, -1)[:, query.clamp(max=run.length - 1)])
        keys.append(run.keys.view(run.size, -1)[:, key.clamp(max=run.seen - 1)])
    position = seen - lengths + torch.minimum(query, lengths - 1)
    return EqualSpans(
        size=len(lengths),
        length=len(query),
        seen=len(key),
        queries=torch.cat(queries).flatten(),
        keys=torch.cat(keys).flatten(),
        real=(query < lengths).flatten().nonzero().flatten(),
        hidden=(key > position.unsqueeze(-1)).unsqueeze(1),
    )


def blocks(
    plan: Tensor,
    device: torch.device,
    *,
    window: int,
    chunk: int,
    scores: int = 0,
    padded: bool = False,
) -> Iterator[EqualSpans]:
    """Yield blocks of a plan's queries, each with the keys that at least one of them sees.

    Args:
        plan: a ``Layout.plan``.
        device: the device of the rows.
        window: the number of keys that a query sees, including its own; 0 for no window.
        chunk: the length of the chunks of a document outside of which no key is seen; 0 for none.
        scores: the number of heads if a block's scores are to be bounded by ``MAX_SCORES``, or 0.
        padded: whether short spans may be padded, where neither window nor chunks divide them;
            on a CPU only.
    """
    padded = padded and not any(0 < limit < WIDENED_LENGTH for limit in (window, chunk))
    for run in padded_spans(plan) if padded else equal_spans(plan, device):
        whole = not scores and not chunk and not 0 < window < run.seen
        if whole or not run.length or run.hidden is not None:
            yield run
            continue
        queries, keys = run.queries.view(run.size, -1), run.keys.view(run.size, -1)
        before, begin = run.seen - run.length, 0
        most = min(max(window // 2, BLOCK // 8), BLOCK) if 0 < window < run.seen else run.length
        if scores:
            reach = min(run.seen, window + most if window else run.seen, chunk or run.seen)
            most = max(min(most, MAX_SCORES // (run.size * scores * reach)), 1)
        while begin < run.length:
            first = (before + begin) // chunk * chunk if chunk else 0
            end = min(begin + most, run.length)
            end = min(end, first + chunk - before) if chunk else end
            first = max(first, before + begin + 1 - window) if window else first
            seen = keys[:, first : before + end]
            rows = queries[:, begin:end].flatten()
            yield EqualSpans(run.size, end - begin, seen.shape[1], rows, seen.flatten())
            begin = end


def stacked(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Select rows of ``[t, heads, d]``, and return them as ``[spans, heads, length, d]``."""
    return x.index_select(0, rows).view(count, -1, *x.shape[1:]).transpose(1, 2)


def hidden_keys(run: EqualSpans, window: int, device: torch.device) -> Tensor | None:
    """Return which keys each query of a block doesn't see, ``[length, seen]``.

    It is None for plain causal attention. The last query sees the last key, and earlier queries see
    none of the keys of later ones.
    """
    before = run.seen - run.length
    windowed = 0 < window < run.seen
    if before == 0 and not windowed:
        return None
    hidden = torch.ones(run.length, run.seen, dtype=torch.bool, device=device)
    later = hidden.triu(before + 1)
    return later | hidden.tril(before - window) if windowed else later


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kernel_inputs(
    run: EqualSpans, q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[list[Tensor], Any]:
    """Return a run's queries, keys and values, and its mask: None for plain causal attention."""
    inputs = [stacked(q, run.queries, run.size)]
    inputs += [stacked(x, run.keys, run.size) for x in (k, v)]
    if run.seen <= WIDENED_LENGTH:
        inputs = [_widen(x) for x in inputs]
    hidden = hidden_keys(run, window, q.device) if run.hidden is None else run.hidden
    if hidden is None:
        return inputs, None
    return inputs, inputs[0].new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Reshape ``[spans, heads, ...]`` to ``[spans, kv_heads, heads per kv head, ...]``."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, cap: float) -> Tensor:
    """Return the scores of a block, ``[spans, kv_heads, heads per kv head, length, seen]``."""
    grouped = _grouped(q, k)
    scores = _widen(grouped @ k.unsqueeze(2).mT).mul_(scaling)
    if cap:
        scores = torch.tanh(scores.div_(cap)).mul_(cap)
    if mask is None:
        mask = scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
    return scores.add_(mask)


def _explicit(
    inputs: list[Tensor], mask: Tensor | None, scaling: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Compute what the kernels of torch do, and cap the scores at ``cap``, if it is not 0."""
    q, k, v = inputs
    scores = _scores(q, k, mask, scaling, cap)
    sums = scores.logsumexp(-1)
    weights = scores.sub_(sums.unsqueeze(-1)).exp_()
    attended = weights.to(v.dtype) @ v.unsqueeze(2)
    return attended.flatten(1, 2), sums.flatten(1, 2)


def _explicit_gradients(
    upstream: Tensor,
    inputs: list[Tensor],
    attended: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    scaling: float,
    cap: float,
) -> tuple[Tensor, ...]:
    q, k, v = inputs
    grouped, arriving, out = (_grouped(x, k) for x in (q, upstream, attended))
    scores = _scores(q, k, mask, scaling, cap)
    weights = (scores - _grouped(sums, k).unsqueeze(-1)).exp_()
    of_values = weights.to(v.dtype).mT @ arriving
    inner = _widen(arriving * out).sum(-1, keepdim=True)
    slopes = weights * (_widen(arriving @ v.unsqueeze(2).mT) - inner)
    if cap:  # the derivative of cap tanh(x / cap)
        slopes *= 1 - scores.masked_fill_(scores.isinf(), 0.0).div_(cap).square_()
    slopes = slopes.mul_(scaling).to(k.dtype)
    of_queries = slopes @ k.unsqueeze(2)
    of_keys = slopes.mT @ grouped
    return of_queries.flatten(1, 2), of_keys.sum(2), of_values.sum(2)


# The kernel of scaled_dot_product_attention and its gradient. Custom operators call them directly,
# because a compiled model must not trace code that depends on the layout, and gradients need the
# logsumexp.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _is_explicit(q: Tensor, cap: float) -> bool:
    return bool(cap) or q.device.type != "cpu"


# A sink is a key with the same score for all queries, and a value of zero. It divides a query's
# output by a larger sum. With this sum, and with the output so divided, the gradient of attention
# without a sink is the gradient with one.


@torch.library.custom_op("primerl::attend", mutates_args=())
def attend_by_span(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: Tensor,
    scaling: float,
    window: int,
    chunk: int,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, ``[t, heads, d]``, and the logsumexp of the scores, ``[t, heads]``."""
    out, logsumexp = _empty_outputs(q)
    explicit = _is_explicit(q, cap)
    bounded = q.shape[1] if explicit else 0
    for run in blocks(
        plan, q.device, window=window, chunk=chunk, scores=bounded, padded=not explicit
    ):
        inputs, mask = _kernel_inputs(run, q, k, v, window)
        if explicit:
            outputs, sums = _explicit(inputs, mask, scaling, cap)
        else:
            outputs, sums = _KERNEL(*inputs, 0.0, mask is None, attn_mask=mask, scale=scaling)
        if sinks is not None:
            column = sinks.to(sums.dtype).view(1, -1, 1)
            outputs = outputs * torch.sigmoid(sums - column).unsqueeze(-1).to(outputs.dtype)
            sums = torch.logaddexp(sums, column)
        _store(outputs, run, out)
        _store(sums, run, logsumexp)
    return out, logsumexp


def _store(found: Tensor, run: EqualSpans, rows: Tensor) -> None:
    """Copy what was found for each query, ``[spans, heads, length, ...]``, into its row."""
    by_query = found.transpose(1, 2).flatten(0, 1)
    if run.real is not None:
        by_query = by_query.index_select(0, run.real)
    rows.index_copy_(0, run.real_queries, by_query.to(rows.dtype))


def _upstream(gradient: Tensor, run: EqualSpans) -> Tensor:
    """Return the gradients of a run's outputs, ``[spans, heads, length, d]``; padding has none."""
    if run.real is None:
        return stacked(gradient, run.queries, run.size)
    found = gradient.new_zeros(len(run.queries), *gradient.shape[1:])
    found.index_copy_(0, run.real, gradient.index_select(0, run.real_queries))
    return found.view(run.size, -1, *found.shape[1:]).transpose(1, 2)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("primerl::attend_backward", mutates_args=())
def attend_by_span_gradients(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    grad_q = q.new_empty(q.shape)
    # Zeros, because the gradient of a key that several spans share is summed over the spans.
    grad_k, grad_v = (torch.zeros_like(_widen(x)) for x in (k, v))
    explicit = _is_explicit(q, cap)
    bounded = q.shape[1] if explicit else 0
    for run in blocks(
        plan, q.device, window=window, chunk=chunk, scores=bounded, padded=not explicit
    ):
        inputs, mask = _kernel_inputs(run, q, k, v, window)
        upstream, attended = (
            x.to(inputs[0].dtype)
            for x in (_upstream(gradient, run), stacked(out, run.queries, run.size))
        )
        sums = logsumexp.index_select(0, run.queries).view(run.size, run.length, -1).mT
        if explicit:
            found = _explicit_gradients(upstream, inputs, attended, sums, mask, scaling, cap)
        else:
            found = _KERNEL_GRADIENT(
                *(upstream, *inputs, attended, sums, 0.0, mask is None),
                attn_mask=mask,
                scale=scaling,
            )
        _store(found[0], run, grad_q)
        run_k, run_v = (x.transpose(1, 2).flatten(0, 1) for x in found[1:])
        grad_k.index_add_(0, run.keys, run_k.to(grad_k.dtype))
        grad_v.index_add_(0, run.keys, run_v.to(grad_v.dtype))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@attend_by_span.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@attend_by_span_gradients.register_fake
def _(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, plan, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, plan, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    found = attend_by_span_gradients(gradient, *saved, *ctx.options)
    of_sinks = None
    if sinks is not None:
        out, logsumexp = saved[3], saved[4]
        shares = (sinks.to(logsumexp.dtype) - logsumexp).exp()
        of_sinks = -(shares * (gradient * out).to(logsumexp.dtype).sum(-1)).sum(0).to(sinks.dtype)
    return *found, of_sinks, None, None, None, None, None


attend_by_span.register_autograd(_backward, setup_context=_save_inputs)
