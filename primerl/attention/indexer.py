"""The keys that an indexer of sparse attention chooses, document by document."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from primerl.attention.documents import Document, Span
from primerl.attention.packed import CONTEXT_ATTENTION, documents_of_batch, find_documents

SPARSE_ATTENTION = "primerl_sparse"
CONTEXT_SPARSE_ATTENTION = f"{CONTEXT_ATTENTION}_sparse"
# The most elements that one call holds of scores between queries and keys.
SCORES = 2**27

Others = Callable[[Tensor], tuple[Tensor, int]]
"""``rows -> (rows of all ranks that share documents, which of them this is)``, without gradient."""

SWITCH_BACK = (
    "this model was switched to packed attention by primerl.loss.model_logprobs; to generate or "
    "to pad, call model.set_attn_implementation('sdpa') first"
)


# Which documents an indexer's answer is about, for attention that was not told.
DOCUMENTS_OF_CHOICE = WeakTensorKeyDictionary()


def rows_at_once(scores: int) -> int:
    """How many rows may be computed together that have so many scores each."""
    return max(1, SCORES // scores)


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
        switched = (SPARSE_ATTENTION, CONTEXT_SPARSE_ATTENTION)
        if indexer.config._attn_implementation not in switched:
            whole: Tensor = indexer(
                hidden, q_latent, rotation, attention_mask, position_ids, past_key_values
            )
            return whole
        if past_key_values is not None:
            raise ValueError(f"a cache of keys is not computed; {SWITCH_BACK}")
        batch, length = hidden.shape[:2]
        documents = _documents_at(position_ids, batch, self.others)
        if max(one.length for one in documents) <= indexer.index_topk:
            nothing = hidden.new_zeros(batch, length, 0, dtype=torch.int32)
            DOCUMENTS_OF_CHOICE[nothing] = documents
            return nothing
        inputs = [hidden, q_latent, *rotation, position_ids]
        rows = [x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in inputs]
        keys, rank = _keys(indexer, rows), 0
        if self.others is not None:
            keys, rank = self.others(keys)
        chosen = hidden.new_zeros(batch * length, indexer.index_topk, dtype=torch.int32)
        for part in parts_of(documents, rank * length, batch * length):
            if part.seen > indexer.index_topk:
                own = [x[part.begin : part.end] for x in rows]
                chosen[part.begin : part.end] = _choose(indexer, own, keys_of(keys, part))
        chosen = chosen.view(batch, length, -1)
        DOCUMENTS_OF_CHOICE[chosen] = documents
        return chosen


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
    at_once = rows_at_once(indexer.n_heads * len(keys))
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
    if position_ids.is_inference():  # has no version to tell a write by
        return _find(position_ids, batch, others)
    known = _DOCUMENTS.get(position_ids)  # type: ignore[no-untyped-call]
    if known is None or known[0] != (position_ids._version, batch):
        known = (position_ids._version, batch), _find(position_ids, batch, others)
        _DOCUMENTS[position_ids] = known
    documents: tuple[Document, ...] = known[1]
    return documents


def _find(position_ids: Tensor, batch: int, others: Others | None) -> tuple[Document, ...]:
    positions = position_ids.expand(batch, -1)
    if others is None:
        return documents_of_batch(positions)
    return find_documents(others(positions.flatten())[0])


def parts_of(documents: tuple[Document, ...], first: int, rows: int) -> list[Span]:
    """What of the documents lies in ``rows`` rows from ``first`` on."""
    parts = []
    for one in documents:
        begin, end = max(one.begin, first), min(one.end, first + rows)
        if begin < end:
            parts.append(Span(begin - first, end - first, (*one.prefix, (one.begin, end))))
    return parts


def keys_of(x: Tensor, part: Span) -> Tensor:
    """Its rows of ``x``."""
    return torch.cat([x[begin:end] for begin, end in part.keys])
