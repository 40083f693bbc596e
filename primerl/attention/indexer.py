"""Choose keys with the indexer of sparse attention, separately for each document."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from primerl.attention.admission import CONTEXT_SPARSE_ATTENTION, SPARSE_ATTENTION
from primerl.attention.documents import (
    Layout,
    Span,
    batch_layout,
    find_documents,
    lay_out,
    once_per_tensor,
    spans_within,
)

# The maximum number of query-key scores held in memory at a time.
MAX_SCORES = 2**27

GatherRows = Callable[[Tensor], tuple[Tensor, int]]
"""Function ``rows -> (rows of all ranks that share documents, this rank's index among them)``.

It passes no gradient.
"""

SWITCH_BACK = (
    "this model was switched to packed attention by primerl.loss.model_logprobs; to generate or "
    "to pad, call model.set_attn_implementation('sdpa') first"
)

# The documents of each indexer output, for attention that does not receive the documents.
OUTPUT_LAYOUTS = WeakTensorKeyDictionary()


def max_rows(scores: int) -> int:
    """Return the maximum number of rows to compute at once, given the number of scores per row."""
    return max(1, MAX_SCORES // scores)


class DocumentIndexer(nn.Module):
    """Wrapper that calls a model's indexer on one document at a time.

    It returns ``[b, t, index_topk]``, int32: for each row, the positions of the chosen keys within
    the row's document. A row sees all keys chosen for it. If it sees fewer than ``index_topk``
    keys, the other entries are 0, the position of the first key. If no row of a document sees more
    than ``index_topk`` keys, all its entries are 0, because attention then uses all visible keys.

    If no document is longer than ``index_topk``, it returns ``[b, t, 0]``, and each row attends to
    all keys that it sees.
    """

    def __init__(self, indexer: nn.Module, gather: GatherRows | None = None) -> None:
        super().__init__()
        if next(indexer.named_parameters(recurse=False), None) or indexer._buffers:
            raise ValueError(
                f"{type(indexer).__name__} has parameters outside its submodules, so it can't be "
                "wrapped for packed documents"
            )
        for name, child in indexer.named_children():
            self.add_module(name, child)
        # In a tuple, so that the indexer's parameters are not registered a second time.
        self.wrapped = (indexer,)
        self.gather = gather

    @torch.no_grad()
    def forward(
        self,
        hidden: Float[Tensor, "b t h"],
        q_latent: Float[Tensor, "b t r"],
        rotation: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Int[Tensor, "_ t"],
        past_key_values: Any = None,
        *,
        cache: Any = None,  # the argument's name since transformers 5.24
    ) -> Int[Tensor, "b t k"]:
        """Choose the keys to which each row attends; the model's indexer has the same arguments."""
        indexer: Any = self.wrapped[0]
        cache = past_key_values if cache is None else cache
        switched = (SPARSE_ATTENTION, CONTEXT_SPARSE_ATTENTION)
        if indexer.config._attn_implementation not in switched:
            whole: Tensor = indexer(hidden, q_latent, rotation, attention_mask, position_ids, cache)
            return whole
        if cache is not None:
            raise ValueError(f"a cache of keys is not supported; {SWITCH_BACK}")
        batch, length = hidden.shape[:2]
        layout = _find_layout(position_ids, batch, hidden.device, self.gather)
        if layout.max_keys <= indexer.index_topk:
            nothing = hidden.new_zeros(batch, length, 0, dtype=torch.int32)
            OUTPUT_LAYOUTS[nothing] = layout
            return nothing
        inputs = [hidden, q_latent, *rotation, position_ids]
        rows = [x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in inputs]
        keys, rank = _keys(indexer, rows), 0
        if self.gather is not None:
            keys, rank = self.gather(keys)
        chosen = hidden.new_zeros(batch * length, indexer.index_topk, dtype=torch.int32)
        for span in spans_within(layout.spans, rank * length, batch * length):
            if span.seen > indexer.index_topk:
                queries = [x[span.begin : span.end] for x in rows]
                chosen[span.begin : span.end] = _choose(indexer, queries, span_rows(keys, span))
        chosen = chosen.view(batch, length, -1)
        OUTPUT_LAYOUTS[chosen] = layout
        return chosen


class _Recorder:
    """Replacement of the model's cache that records the indexer's keys and returns the first."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:  # noqa: ARG002
        self.keys = keys[0]
        return keys[:, :1]


class _FixedKeys:
    """Replacement of the model's cache that makes the indexer score given keys."""

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
    """Choose keys for the last rows of a document, a limited number of rows at a time."""
    length, before = len(rows[0]), len(keys) - len(rows[0])
    at_once = max_rows(indexer.n_heads * len(keys))
    position, parts = torch.arange(len(keys), device=keys.device), []
    for begin in range(0, length, at_once):
        part = [x[begin : begin + at_once] for x in rows]
        here = position[before + begin :][: len(part[0])].unsqueeze(1)
        seen = before + begin + len(part[0])
        chosen = _call(indexer, part, position[:seen] <= here, _FixedKeys(keys[:seen]))
        chosen = chosen.masked_fill(chosen > here, 0)  # rows that see fewer than index_topk keys
        parts.append(F.pad(chosen, (0, indexer.index_topk - chosen.shape[1])))
    return torch.cat(parts)


@once_per_tensor
def _find_layout(
    position_ids: Tensor, batch: int, device: torch.device, gather: GatherRows | None
) -> Layout:
    """Make the layout of all documents on the ranks that share documents with this rank."""
    if gather is None:
        return batch_layout(position_ids, batch, device)
    positions, _ = gather(position_ids.expand(batch, -1).flatten())
    return lay_out(find_documents(positions), device)


def span_rows(x: Tensor, span: Span) -> Tensor:
    """Concatenate the key rows of a span."""
    return torch.cat([x[begin:end] for begin, end in span.keys])
