"""DeepSeek sparse attention of packed documents, for unmodified Hugging Face models.

An indexer chooses the keys that each query attends to (arXiv 2512.02556). ``transformers`` lets it
score the whole pack against itself, under a square mask. Here it chooses document by document,
some rows at a time, and a document in which every token may see every other, because it is no
longer than ``index_topk``, needs no choice at all.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from primerl._optional import require
from primerl.attention.documents import Layout, Span, lay_out
from primerl.attention.indexer import (
    CONTEXT_SPARSE_ATTENTION,
    DOCUMENTS_OF_CHOICE,
    SPARSE_ATTENTION,
    SWITCH_BACK,
    DocumentIndexer,
    Others,
    keys_of,
    parts_of,
    rows_at_once,
)
from primerl.attention.packed import MASKED_ATTENTION, not_passed_on, packed_attention


def attend_sparsely(model: nn.Module, *, others: Others | None = None) -> None:
    """Switch a model of DeepSeek sparse attention to choose and attend document by document.

    Each indexer is replaced by a module that calls it, and has its parameters under their names.

    Args:
        model: of a family that ``attention.is_sparse`` knows.
        others: gives the rows of all ranks that share documents, in order, from this rank's; the
            attention that sees them is registered as ``CONTEXT_SPARSE_ATTENTION`` by the caller.

    Raises:
        ValueError: the model attends by kernels of its own.
    """
    config: Any = model.config
    if config._attn_implementation not in (*MASKED_ATTENTION, SPARSE_ATTENTION):
        raise ValueError(
            f"{config.model_type} attends by {config._attn_implementation}, where an indexer "
            "chooses keys for the whole pack; load it with attn_implementation='sdpa'"
        )
    for attention in list(model.modules()):
        indexer = getattr(attention, "indexer", None)
        if isinstance(indexer, DocumentIndexer):
            if indexer.others is others:
                continue
            indexer = indexer.of_model[0]
        if isinstance(indexer, nn.Module):
            attention.set_submodule("indexer", DocumentIndexer(indexer, others))
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(SPARSE_ATTENTION, _sparse_attention)
    name = SPARSE_ATTENTION if others is None else CONTEXT_SPARSE_ATTENTION
    transformers.AttentionMaskInterface.register(name, _placeholder)
    model.set_attn_implementation(name)  # type: ignore[operator]


def _placeholder(
    *_: Any, attention_mask: Tensor | None = None, device: Any = "cpu", **_others: Any
) -> Tensor:
    """What the model's layers pass on as the mask, which they must have."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(f"padding is not computed; {SWITCH_BACK}")
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
    """Attention to the chosen keys of each document: an entry of ``AttentionInterface``."""
    indexer = getattr(module, "indexer", None)
    if indices is None or not isinstance(indexer, DocumentIndexer | None):
        raise ValueError(
            f"{type(module).__name__} chooses keys for the whole pack; score it by "
            "primerl.loss.model_logprobs first"
        )
    if documents is None:
        chosen_among = DOCUMENTS_OF_CHOICE.get(indices)  # type: ignore[no-untyped-call]
        if chosen_among is None:
            raise ValueError(not_passed_on(module))
        documents = lay_out(chosen_among, query.device)
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
    parts = parts_of(documents.spans, 0, batch * length)
    attended = attend_to_chosen(
        q, k, v, parts, indices.flatten(0, 1), scaling=scaling, dropout=dropout
    )
    return attended.reshape(batch, length, *attended.shape[1:]), None


def attend_to_chosen(
    q: Float[Tensor, "t heads d"],
    k: Float[Tensor, "s kv_heads d"],
    v: Float[Tensor, "s kv_heads dv"],
    parts: list[Span],
    chosen: Int[Tensor, "t k"],
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "t heads dv"]:
    """Attention of each part's rows to the keys chosen among those of its document.

    y_i = sum_j softmax_j(scaling q_i . k_j) v_j    over the keys j of ``chosen[i]``, or all that
    row i sees, if its part sees no more than it could choose
    """
    outputs = []
    for part in parts:
        own = slice(part.begin, part.end)
        picked = chosen[own] if part.seen > chosen.shape[1] > 0 else None
        qp, kp, vp = (x.transpose(0, 1) for x in (q[own], keys_of(k, part), keys_of(v, part)))
        outputs.append(_attend(qp, kp, vp, picked, scaling=scaling, dropout=dropout))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, **options: Any) -> Tensor:
    """The last rows of one document, some at a time: no mask spans a long one.

    With several parts, each is computed again in the backward pass, so that one mask is held.
    """
    # A CPU without a fused kernel holds the scores of all heads; others, the mask of one.
    each = k.shape[1] * (q.shape[0] if q.device.type == "cpu" else 1)
    at_once = rows_at_once(each)
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
    attended = F.scaled_dot_product_attention(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=gqa,
    )
    return attended.squeeze(0)
