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
from torch.utils.weak import WeakTensorKeyDictionary

from primerl._optional import require
from primerl.attention import MASKED_ATTENTION, find_documents, packed_attention
from primerl.spans import Document

SPARSE_ATTENTION = "primerl_sparse"
# The most elements that one call holds of scores between queries and keys.
SCORES = 2**27


def attend_sparsely(model: nn.Module) -> None:
    """Switch a model of DeepSeek sparse attention to choose and attend document by document.

    Each indexer is replaced by a module that calls it, and has its parameters under their names.

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
            attention.set_submodule("indexer", DocumentIndexer(indexer))
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(SPARSE_ATTENTION, _sparse_attention)
    transformers.AttentionMaskInterface.register(SPARSE_ATTENTION, _placeholder)
    model.set_attn_implementation(SPARSE_ATTENTION)  # type: ignore[operator]


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


class DocumentIndexer(nn.Module):
    """Calls an indexer on one document at a time.

    ``[b, t, index_topk]``, int32: for each row, the places in its document of the keys chosen, all
    of them visible; a row that sees fewer repeats the first. Without a last dimension's extent
    (``[b, t, 0]``) if no document is longer than ``index_topk``: each row attends to all it sees.
    """

    def __init__(self, indexer: nn.Module) -> None:
        super().__init__()
        if next(indexer.named_parameters(recurse=False), None) or indexer._buffers:
            raise ValueError(f"{type(indexer).__name__} has parameters beside its layers'")
        for name, child in indexer.named_children():
            self.add_module(name, child)
        # In a tuple, so that its parameters are not registered a second time.
        self.of_model = (indexer,)

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
        if indexer.config._attn_implementation != SPARSE_ATTENTION:
            whole: Tensor = indexer(
                hidden, q_latent, rotation, attention_mask, position_ids, past_key_values
            )
            return whole
        if past_key_values is not None:
            raise ValueError(f"a cache of keys is not computed; {_SWITCH_BACK}")
        batch, length = hidden.shape[:2]
        documents = _documents_at(position_ids, batch)
        if max(one.length for one in documents) <= indexer.index_topk:
            return hidden.new_zeros(batch, length, 0, dtype=torch.int32)
        inputs = [hidden, q_latent, *rotation, position_ids]
        rows = [x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in inputs]
        keys = _keys(indexer, rows)
        chosen = torch.zeros(len(keys), indexer.index_topk, dtype=torch.int32, device=keys.device)
        for one in documents:
            if one.length > indexer.index_topk:
                own = [x[one.begin : one.end] for x in rows]
                chosen[one.begin : one.end] = _choose(indexer, own, _of_document(keys, one))
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


def _documents_at(position_ids: Tensor, batch: int) -> tuple[Document, ...]:
    if position_ids.is_inference():  # has no version to tell a write by
        return find_documents(position_ids.expand(batch, -1).flatten())
    known: Any = _DOCUMENTS
    documents: tuple[Document, ...]
    version, documents = known.get(position_ids, (None, ()))
    if version != (position_ids._version, batch):
        documents = find_documents(position_ids.expand(batch, -1).flatten())
        known[position_ids] = (position_ids._version, batch), documents
    return documents


def _of_document(x: Tensor, one: Document, dim: int = 0) -> Tensor:
    """Its rows, after those that it shares."""
    own = x.narrow(dim, one.begin, one.end - one.begin)
    return torch.cat([x.narrow(dim, one.root, one.shared), own], dim) if one.shared else own


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
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    chosen = indices.flatten(0, 1)
    outputs = []
    for one in documents:
        own, sees = slice(one.begin, one.end), one.length
        kd, vd = (_of_document(x, one, dim=1) for x in (k, v))
        picked = chosen[own] if sees > chosen.shape[1] else None
        outputs.append(_attend(q[:, own], kd, vd, picked, scaling=scaling, dropout=dropout))
    attended = torch.cat(outputs, dim=1).transpose(0, 1)
    return attended.reshape(batch, length, *attended.shape[1:]), None


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
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, dropout_p=dropout, enable_gqa=gqa
    )
    return attended.squeeze(0)
