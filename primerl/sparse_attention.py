"""DeepSeek sparse attention of packed documents, for unmodified Hugging Face models.

An indexer chooses the keys that each query attends to (arXiv 2512.02556). ``transformers`` lets it
score the whole pack against itself, under a square mask. Here it chooses document by document,
some rows at a time, and a document in which every token may see every other, because it is no
longer than ``index_topk``, needs no choice at all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from primerl._optional import require
from primerl.attention import (
    CONTEXT_ATTENTION,
    MASKED_ATTENTION,
    Document,
    find_documents,
    packed_attention,
)

SPARSE_ATTENTION = "primerl_sparse"
CONTEXT_SPARSE_ATTENTION = f"{CONTEXT_ATTENTION}_sparse"
# The most elements that one call holds of scores between queries and keys.
SCORES = 2**27

Others = Callable[[Tensor], tuple[Tensor, int]]
"""``rows -> (rows of all ranks that share documents, which of them this is)``, without gradient."""


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
        if isinstance(indexer, nn.Module) and not isinstance(indexer, DocumentIndexer):
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
        raise ValueError(f"padding is not computed; {_SWITCH_BACK}")
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


_SWITCH_BACK = (
    "this model was switched to packed attention by primerl.loss.model_logprobs; to generate or "
    "to pad, call model.set_attn_implementation('sdpa') first"
)


class Part(NamedTuple):
    """Rows ``begin .. end - 1``, part of a document, the last of which sees all ``keys``.

    These are ranges of rows, which may be those of all ranks that share documents.
    """

    begin: int
    end: int
    keys: tuple[tuple[int, int], ...]

    @property
    def seen(self) -> int:
        """How many keys the last row sees."""
        return sum(end - begin for begin, end in self.keys)


class DocumentIndexer(nn.Module):
    """Calls an indexer on one document at a time.

    ``[b, t, index_topk]``, int32: for each row, the places in its document of the keys chosen, all
    of them visible; a row that sees fewer repeats the first. Without a last dimension's extent
    (``[b, t, 0]``) if no document is longer than ``index_topk``: each row attends to all it sees.
    """

    def __init__(self, indexer: nn.Module, others: Others | None = None) -> None:
        super().__init__()
        if next(indexer.named_parameters(recurse=False), None) or indexer._buffers:
            raise ValueError(f"{type(indexer).__name__} has parameters beside its layers'")
        for name, child in indexer.named_children():
            self.add_module(name, child)
        # In a tuple, so that its parameters are not registered a second time.
        self.of_model = (indexer,)
        self.others = others

    @torch.no_grad()
    def forward(
        self,
        hidden: Float[Tensor, "b t h"],
        q_latent: Float[Tensor, "b t r"],
        rotation: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Int[Tensor, "_ t"],
        past_key_values: Any = None,
    ) -> Int[Tensor, "b t k"]:
        """The keys chosen for each row, in the form that the model's indexer returns by itself."""
        indexer: Any = self.of_model[0]
        name = SPARSE_ATTENTION if self.others is None else CONTEXT_SPARSE_ATTENTION
        if indexer.config._attn_implementation != name:
            whole: Tensor = indexer(
                hidden, q_latent, rotation, attention_mask, position_ids, past_key_values
            )
            return whole
        if past_key_values is not None:
            raise ValueError(f"a cache of keys is not computed; {_SWITCH_BACK}")
        batch, length = hidden.shape[:2]
        documents = _documents_at(position_ids, batch, self.others)
        if max(one.length for one in documents) <= indexer.index_topk:
            return hidden.new_zeros(batch, length, 0, dtype=torch.int32)
        inputs = [hidden, q_latent, *rotation, position_ids]
        rows = [x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in inputs]
        keys, rank = _keys(indexer, rows), 0
        if self.others is not None:
            keys, rank = self.others(keys)
        chosen = hidden.new_zeros(batch * length, indexer.index_topk, dtype=torch.int32)
        for part in parts_of(documents, rank * length, batch * length):
            if part.seen > indexer.index_topk:
                own = [x[part.begin : part.end] for x in rows]
                chosen[part.begin : part.end] = _choose(indexer, own, _keys_of(keys, part))
        return chosen.view(batch, length, -1)


class _Recorder:
    """In place of the model's cache: keeps the indexer's keys, and has it score next to nothing."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:  # noqa: ARG002
        self.keys = keys[0]
        return keys[:, :1]


class _Given:
    """In place of the model's cache: has the indexer score these keys."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:  # noqa: ARG002
        return self.keys.unsqueeze(0)


def _call(indexer: Any, rows: list[Tensor], visible: Tensor, cache: Any) -> Tensor:
    hidden, q_latent, cos, sin, positions = (x.unsqueeze(0) for x in rows)
    chosen: Tensor = indexer(hidden, q_latent, (cos, sin), visible.unsqueeze(0), positions, cache)
    return chosen.squeeze(0)


def _keys(indexer: Any, rows: list[Tensor]) -> Float[Tensor, "t d"]:
    recorder = _Recorder()
    length, device = rows[0].shape[0], rows[0].device
    _call(indexer, rows, torch.ones(length, 1, dtype=torch.bool, device=device), recorder)
    return recorder.keys


def _choose(indexer: Any, rows: list[Tensor], keys: Float[Tensor, "s d"]) -> Int[Tensor, "t k"]:
    """The keys chosen for the last rows of a document, which come some at a time."""
    length, before = len(rows[0]), len(keys) - len(rows[0])
    at_once = max(1, SCORES // (indexer.n_heads * len(keys)))
    place, parts = torch.arange(len(keys), device=keys.device), []
    for begin in range(0, length, at_once):
        part = [x[begin : begin + at_once] for x in rows]
        here = place[before + begin :][: len(part[0])].unsqueeze(1)
        seen = before + begin + len(part[0])
        chosen = _call(indexer, part, place[:seen] <= here, _Given(keys[:seen]))
        chosen = chosen.masked_fill(chosen > here, 0)  # what a row sees is chosen, if so little
        parts.append(F.pad(chosen, (0, indexer.index_topk - chosen.shape[1])))
    return torch.cat(parts)


# Found once for all layers. A key is a tensor, not its values, so no write may have followed.
_DOCUMENTS = WeakTensorKeyDictionary()


def _documents_at(position_ids: Tensor, batch: int, others: Others | None) -> tuple[Document, ...]:
    """The documents that this rank's rows are in, and those of the ranks that share them."""
    traced = not position_ids.is_inference()  # otherwise it has no version to tell a write by
    state = (position_ids._version, batch) if traced else None
    known, documents = _DOCUMENTS.get(position_ids, (None, ()))
    if state is None or known != state:
        positions = position_ids.expand(batch, -1).flatten()
        documents = find_documents(positions if others is None else others(positions)[0])
        _DOCUMENTS[position_ids] = state, documents
    return documents


def parts_of(documents: tuple[Document, ...], first: int, rows: int) -> list[Part]:
    """What of the documents lies in ``rows`` rows from ``first`` on."""
    parts = []
    for one in documents:
        begin, end = max(one.begin, first), min(one.end, first + rows)
        if begin < end:
            shared = ((one.root, one.root + one.shared),) if one.shared else ()
            parts.append(Part(begin - first, end - first, (*shared, (one.begin, end))))
    return parts


def _keys_of(x: Tensor, part: Part) -> Tensor:
    """Its rows of ``x``."""
    return torch.cat([x[begin:end] for begin, end in part.keys])


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
    documents: tuple[Document, ...] | None = None,
    **other: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Attention to the chosen keys of each document: an entry of ``AttentionInterface``."""
    indexer = getattr(module, "indexer", None)
    if indices is None or not isinstance(indexer, DocumentIndexer | None):
        raise ValueError(
            f"{type(module).__name__} chooses keys for the whole pack; score it by "
            "primerl.loss.model_logprobs first"
        )
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
    if documents is None:
        begins = range(0, batch * length, length)
        documents = tuple(Document(begin, begin + length, begin, 0) for begin in begins)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    parts = parts_of(documents, 0, batch * length)
    attended = attend_to_chosen(
        q, k, v, parts, indices.flatten(0, 1), scaling=scaling, dropout=dropout
    )
    return attended.reshape(batch, length, *attended.shape[1:]), None


def attend_to_chosen(
    q: Float[Tensor, "t heads d"],
    k: Float[Tensor, "s kv_heads d"],
    v: Float[Tensor, "s kv_heads dv"],
    parts: list[Part],
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
        of_part = [x.transpose(0, 1) for x in (q[own], _keys_of(k, part), _keys_of(v, part))]
        outputs.append(_attend(*of_part, picked, scaling=scaling, dropout=dropout))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, **options: Any) -> Tensor:
    """The last rows of one document, some at a time: no mask spans a long one.

    With several parts, each is computed again in the backward pass, so that one mask is held.
    """
    # A CPU without a fused kernel holds the scores of all heads; others, the mask of one.
    each = k.shape[1] * (q.shape[0] if q.device.type == "cpu" else 1)
    at_once = max(1, SCORES // each)
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
    batched = (x.unsqueeze(0) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        *batched, attn_mask=mask, scale=scaling, dropout_p=dropout, enable_gqa=gqa
    )
    return attended.squeeze(0)
