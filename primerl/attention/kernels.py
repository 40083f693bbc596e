"""Causal attention within documents, or parts of documents, whose rows lie end to end.

No mask over all rows is ever built. On a GPU, a variable-length kernel computes all spans. On other
devices, and where that kernel does not fit, ``span_kernels`` does.
"""

import functools
import inspect
import logging
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from primerl.attention.documents import Layout, Span, lay_out, once_per_tensor
from primerl.attention.span_kernels import (
    EqualSpans,
    attend_by_span,
    blocks,
    hidden_keys,
    stacked,
)

KernelName = Literal["varlen", "spans", "sdpa"]
_VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)

log = logging.getLogger(__name__)


def attend(
    query: Float[Tensor, "t heads d"],
    key: Float[Tensor, "s kv_heads d"],
    value: Float[Tensor, "s kv_heads dv"],
    layout: Layout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "t heads dv"]:
    """Compute causal attention of each span's queries to its keys.

        s_ij = scaling q_i . k_j, or c tanh(s_ij / c) with a soft cap c
        y_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij))    over the keys j that i sees

    ``choose_kernel`` says which kernel computes it. ``torch.compile`` traces this function once for
    all layouts. With ``"sdpa"``, or with chunks and ``"varlen"``, the function breaks the graph.

    Args:
        query: the queries of all spans, end to end.
        key: the keys; their number of heads divides that of the queries.
        value: the values, with the heads of the keys; their width may differ.
        layout: the layout of the spans, made by ``lay_out``.
        scaling: the factor that multiplies the scores, by default ``1 / sqrt(d)``.
        dropout: the probability that an attention weight is dropped.
        window: the number of keys that a query sees at most: its own and those before it.
        chunk: the length of chunks of a document; a query sees only the keys of its chunk.
        softcap: the bound of scores.
        sinks: a score for each head that counts in the softmax, but has no value.

    Raises:
        ValueError: dropout is combined with a soft cap or sinks.
    """
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    name, reason = choose_kernel(
        query, value, dropout=dropout, softcap=softcap, sinks=sinks is not None
    )
    if not torch.compiler.is_compiling():
        _log_choice(name, reason, query.device.type)
    width = value.shape[-1]
    if name == "varlen":
        if chunk and chunk < layout.max_keys:
            layout = _chunked(layout.plan, layout.spans, chunk, query.device)
        return _attend_end_to_end(query, key, value, layout, scaling, window=window)
    if name == "sdpa":
        limits = {"window": window or 0, "chunk": chunk or 0}
        by_length: Tensor = _attend_by_length(query, key, value, layout, scaling, dropout, **limits)
        return by_length
    q, k, v = _equally_wide(query, key, value)
    options = (scaling, window or 0, chunk or 0, softcap or 0.0)
    attended: Tensor = attend_by_span(q, k, v, sinks, layout.plan, *options)[0]
    return attended[..., :width]


def choose_kernel(
    query: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[KernelName, str]:
    """Choose the kernel of ``attend`` by device, dtype and what a model's attention computes.

    Returns:
        ``"varlen"`` (``torch.nn.attention.varlen``), ``"spans"`` (operators of torch, span by span)
        or ``"sdpa"`` (``scaled_dot_product_attention``, span by span), and the reason.

    Raises:
        ValueError: dropout is combined with a soft cap or sinks.
    """
    special = "capped scores" if softcap else "sinks" if sinks else ""
    if dropout:
        if special:
            raise ValueError(
                f"attention has {special} and dropout={dropout}, which no kernel computes together;"
                " set the model's attention_dropout to 0"
            )
        return "sdpa", "only scaled_dot_product_attention has dropout"
    if query.device.type == "cpu":
        return "spans", "the device is a CPU"
    if special:
        return "spans", f"torch.nn.attention.varlen has no {special}"
    widths = (query.shape[-1], value.shape[-1])
    if query.dtype not in (torch.bfloat16, torch.float16):
        return "sdpa", f"torch.nn.attention.varlen does not compute {query.dtype}"
    if max(widths) > 256 or any(width % 8 for width in widths):
        return "sdpa", f"torch.nn.attention.varlen does not compute heads of {widths} numbers"
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return "sdpa", "torch.nn.attention.varlen needs a GPU of compute capability 8.0"
    return "varlen", "it computes all spans in one call"


@functools.cache
def _log_choice(name: str, reason: str, device: str) -> None:
    log.info("attention on %s: kernel %s, because %s", device, name, reason)


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """Pad queries, keys and values with zeros to the same width, which kernels require."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float,
    dropout: float,
    *,
    window: int = 0,
    chunk: int = 0,
) -> Tensor:
    runs = list(blocks(layout.plan.to(query.device), window=window, chunk=chunk))
    outputs = []
    for run in runs:
        q = stacked(query, run.queries, run.size)
        k, v = (stacked(x, run.keys, run.size) for x in (key, value))
        mask = _visible_keys(run, window, query.device)
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


def _visible_keys(run: EqualSpans, window: int, device: torch.device) -> Tensor | None:
    """Return the mask of a block; a causal bias, with which faster kernels run, if possible."""
    if not 0 < window < run.seen:
        return causal_lower_right(run.length, run.seen) if run.length < run.seen else None
    hidden = hidden_keys(run, window, device)
    return None if hidden is None else ~hidden


@torch.compiler.disable  # type: ignore[untyped-decorator]
@once_per_tensor  # all layers have the same spans
def _chunked(
    plan: Tensor,  # noqa: ARG001  for whose lifetime the result is cached
    spans: tuple[Any, ...],
    chunk: int,
    device: torch.device,
) -> Layout:
    """Make the layout of the chunks of spans; documents are divided from their first token on."""
    parts = []
    for one in spans:
        seen = sum(end - begin for begin, end in one.keys)
        offset, begin = seen - one.end, one.begin  # from rows to positions
        while begin < one.end:
            first = (begin + offset) // chunk * chunk
            end = min(one.end, first + chunk - offset)
            parts.append(Span(begin, end, _slice(one.keys, first, end + offset)))
            begin = end
    return lay_out(tuple(parts), device)


def _slice(
    ranges: tuple[tuple[int, int], ...], first: int, last: int
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the rows ``first .. last - 1`` of ``ranges``."""
    kept = []
    for begin, end in ranges:
        low, high = max(first, 0), min(last, end - begin)
        if low < high:
            kept.append((begin + low, begin + high))
        first, last = first - (end - begin), last - (end - begin)
    return tuple(kept)


def _attend_end_to_end(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float,
    *,
    window: int | None = None,
) -> Tensor:
    kernel: Any = varlen_attn
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in _VARLEN_ARGUMENTS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None and window < layout.max_keys:  # torch 2.11
        by_length: Tensor = _attend_by_length(
            query, key, value, layout, scaling, 0.0, window=window
        )
        return by_length
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
