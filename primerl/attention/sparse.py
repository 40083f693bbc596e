"""DeepSeek sparse attention within packed documents, for unmodified Hugging Face models.

An indexer chooses the keys that each query attends to (arXiv:2512.02556). In ``transformers``, it
scores the whole pack against itself, under a square mask. Here, it scores each document separately,
a limited number of rows at a time. It skips documents of at most ``index_topk`` tokens, in which
each query attends to all keys that it sees.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from primerl.attention.admission import (
    CONTEXT_SPARSE_ATTENTION,
    MASKED_ATTENTION,
    SPARSE_ATTENTION,
)
from primerl.attention.documents import Layout, Span, spans_within
from primerl.attention.indexer import (
    OUTPUT_LAYOUTS,
    SWITCH_BACK,
    DocumentIndexer,
    GatherRows,
    max_rows,
    span_rows,
)
from primerl.attention.packed import not_passed_on, packed_attention, switch_attention


def attend_sparsely(
    model: nn.Module, *, gather: GatherRows | None = None, attention: Any = None
) -> None:
    """Switch a model with DeepSeek sparse attention to choose keys and attend within each document.

    Each indexer is wrapped in a ``DocumentIndexer``, which keeps the names of its parameters.

    Args:
        model: a model of one of the ``SPARSE_FAMILIES``.
        gather: gathers the rows of all ranks that share documents, in order.
        attention: with ``gather``, an entry of ``AttentionInterface`` that works over these ranks.
    """
    config: Any = model.config
    if config._attn_implementation not in (*MASKED_ATTENTION, SPARSE_ATTENTION):
        raise ValueError(
            f"{config.model_type} uses {config._attn_implementation} attention, where an indexer "
            "chooses keys for the whole pack; load it with attn_implementation='sdpa'"
        )
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, DocumentIndexer):
            if indexer.gather is gather:
                continue
            indexer = indexer.wrapped[0]
        if isinstance(indexer, nn.Module):
            module.set_submodule("indexer", DocumentIndexer(indexer, gather))
    name = SPARSE_ATTENTION if gather is None else CONTEXT_SPARSE_ATTENTION
    switch_attention(model, name, attention or _sparse_attention, _placeholder)


def _placeholder(
    *_: Any, attention_mask: Tensor | None = None, device: Any = "cpu", **_others: Any
) -> Tensor:
    """Make a one-element mask without information, for layers that require a mask."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(f"padding is not supported; {SWITCH_BACK}")
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _sparse_attention(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    indices: Int[Tensor, "b t k"] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: Layout | None = None,
    **other: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Entry of ``AttentionInterface``: attention to the chosen keys of each document."""
    indexer = getattr(module, "indexer", None)
    if indices is None or not isinstance(indexer, DocumentIndexer | None):
        raise ValueError(
            f"{type(module).__name__} chooses keys for the whole pack; call "
            "primerl.loss.model_logprobs once, which switches the model to packed documents"
        )
    if documents is None:
        documents = OUTPUT_LAYOUTS.get(indices)  # type: ignore[no-untyped-call]
        if documents is None:
            raise ValueError(not_passed_on(module))
    if indices.shape[-1] == 0:
        return packed_attention(
            module,
            query,
            key,
            value,
            None,
            scaling=scaling,
            dropout=dropout,
            documents=documents,
            **other,
        )
    batch, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    spans = spans_within(documents.spans, 0, batch * length)
    attended = attend_to_chosen(
        q, k, v, spans, indices.flatten(0, 1), scaling=scaling, dropout=dropout
    )
    return attended.reshape(batch, length, *attended.shape[1:]), None


def attend_to_chosen(
    q: Float[Tensor, "t heads d"],
    k: Float[Tensor, "s kv_heads d"],
    v: Float[Tensor, "s kv_heads dv"],
    spans: list[Span],
    chosen: Int[Tensor, "t k"],
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "t heads dv"]:
    """Compute the attention of each span's queries to the keys that were chosen for them.

        y_i = sum_j softmax_j(scaling q_i . k_j) v_j    over the keys j of ``chosen[i]``

    If a span sees no more keys than can be chosen, each of its queries attends to all keys that it
    sees.
    """
    outputs = []
    for span in spans:
        rows = slice(span.begin, span.end)
        picked = chosen[rows] if span.seen > chosen.shape[1] > 0 else None
        inputs = (q[rows], span_rows(k, span), span_rows(v, span))
        queries, keys, values = (x.transpose(0, 1) for x in inputs)
        outputs.append(_attend(queries, keys, values, picked, scaling=scaling, dropout=dropout))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, **options: Any) -> Tensor:
    """Compute attention for the last rows of one document, split to bound the size of the mask.

    If there are several parts, each is recomputed in the backward pass, so that only one mask is in
    memory at a time.
    """
    # On a CPU, masked attention isn't fused: it holds the scores of all heads, not just one mask.
    each = k.shape[1] * (q.shape[0] if q.device.type == "cpu" else 1)
    at_once = max_rows(each)
    if q.shape[1] <= at_once:
        return _attend_rows(q, k, v, chosen, **options)
    shared, outputs = k.shape[1] - q.shape[1], []
    for begin in range(0, q.shape[1], at_once):
        rows = slice(begin, begin + at_once)
        seen = shared + min(begin + at_once, q.shape[1])
        picked = None if chosen is None else chosen[rows]
        part = (q[:, rows], k[:, :seen], v[:, :seen], picked)
        outputs.append(checkpoint(_attend_rows, *part, use_reentrant=False, **options))
    return torch.cat(outputs, dim=1)


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, *, scaling: Any, dropout: float
) -> Tensor:
    rows, seen = q.shape[1], k.shape[1]
    if chosen is None:
        mask = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril(seen - rows)
    else:
        mask = torch.zeros(rows, seen, dtype=torch.bool, device=q.device)
        mask = mask.scatter(1, chosen.long(), True)
    gqa = q.shape[0] != k.shape[0]
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=gqa,
    )
    return attended.squeeze(0)
