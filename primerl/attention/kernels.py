"""Causal attention within documents, or parts of documents, whose rows lie end to end.

No mask over all rows is ever built. On a GPU, the kernels of ``end_to_end`` compute all spans. On
other devices, and where none of these kernels fits, ``span_kernels`` does. ``kernel_table`` says
which kernel is taken.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from primerl.attention.documents import Layout
from primerl.attention.end_to_end.choice import choose_for, choose_kernel, log_choice
from primerl.attention.end_to_end.interface import equally_wide
from primerl.attention.end_to_end.operators import attend_end_to_end
from primerl.attention.kernel_table import END_TO_END, KernelName
from primerl.attention.span_kernels import (
    EqualSpans,
    attend_by_span,
    blocks,
    hidden_keys,
    stacked,
)

__all__ = ["attend", "choose_kernel"]


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
    kernel: KernelName | None = None,
) -> Float[Tensor, "t heads dv"]:
    """Compute causal attention of each span's queries to its keys.

        s_ij = scaling q_i . k_j, or c tanh(s_ij / c) with a soft cap c
        y_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij))    over the keys j that i sees

    ``choose_kernel`` says which kernel computes it. ``torch.compile`` traces this function once for
    all layouts. With ``"sdpa"``, the function breaks the graph.

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
        kernel: the only kernel that may be used; by default, the environment variable
            ``PRIMERL_ATTENTION``, if it is set, or the best.

    Raises:
        ValueError: dropout is combined with a soft cap or sinks, or the kernel can't compute this.
    """
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    name = _kernel_for(
        *(query.device, query.dtype, query.shape[-1], value.shape[-1]),
        *(bool(softcap), sinks is not None, bool(dropout), kernel),
    )
    width = value.shape[-1]
    if name in END_TO_END:
        options = (scaling, window or 0, chunk or 0, softcap or 0.0, kernel or "")
        found: Tensor = attend_end_to_end(query, key, value, sinks, layout.plan, *options)[0]
        return found
    if name == "sdpa":
        limits = {"window": window or 0, "chunk": chunk or 0}
        by_length: Tensor = _attend_by_length(query, key, value, layout, scaling, dropout, **limits)
        return by_length
    q, k, v = equally_wide(query, key, value)
    by_span = (scaling, window or 0, chunk or 0, softcap or 0.0)
    attended: Tensor = attend_by_span(q, k, v, sinks, layout.plan, *by_span)[0]
    return attended[..., :width]


# A compiler takes the result for a constant, and does not trace what finds it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    softcap: bool,
    sinks: bool,
    dropout: bool,
    kernel: KernelName | None,
) -> KernelName:
    """Choose a kernel before the lengths are known; ``end_to_end`` chooses again with them."""
    name, reason = choose_for(
        device,
        dtype,
        (width, value_width),
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        kernel=kernel,
    )
    if name not in END_TO_END:
        log_choice(name, reason, device.type)
    return name


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
    runs = list(blocks(layout.plan, query.device, window=window, chunk=chunk))
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
