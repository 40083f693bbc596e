"""Attention of a batch of requests over their own pages, for unmodified Hugging Face models.

All tokens of a step lie end to end in one row, which the model sees as its batch. The attention
function, an entry of transformers' ``AttentionInterface``, stores their keys and values and lets
each token attend to its own request. The model is called without a cache.

In float32 on a CPU, the result for a token has the same bits whatever else is in the batch, and
however its request is divided into steps: products have at least ``LEAST_ROWS`` rows, and sums over
keys are taken in blocks that begin at the request's first token.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl._common.optional import require
from primerl.rollout.engines.transformers.kv_cache import DecodingRows, LayerShape, PagedCache
from primerl.rollout.engines.transformers.pages import PAGE_TOKENS
from primerl.rollout.engines.transformers.scheduler import Chunk
from primerl.rollout.engines.transformers.sparse_keys import PagedIndexer

PAGED_ATTENTION = "primerl_paged"
SPARSE_ATTENTION = "primerl_paged_sparse"
# Below this number of rows, the matrix products of CPU libraries round differently.
LEAST_ROWS = 4
# The number of keys whose weighted values are summed in one product.
KEY_BLOCK = 512
# The largest number of scores that are held in memory at a time.
MAX_SCORES = 2**25

# The dtype of a mask that only holds the size of the window.
_WINDOW_DTYPE = torch.int32
# The arguments of attention that don't change what it computes here.
_IGNORED = frozenset({"position_ids", "dropout", "logits_to_keep", "output_attentions"})


IndexedRequest = tuple[int, int, int, Callable[[], Tensor]]
"""A request's first row in the batch, its tokens before, its tokens in this step, and its keys."""


@attrs.define(eq=False)
class Scoring:
    """How the scores of queries and keys become weights."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """One score for each head, of a key without a value."""


@attrs.define(eq=False)
class AttentionStep:
    """A forward pass, as the attention function needs to know it.

    Args:
        cache: the pages.
        slots: where in the cache each token's key and value go, int64[t].
        rows: the decoding requests, whose tokens come first, in the same order.
        chunks: the other requests' tokens, which come next. More tokens may follow, of nobody.
    """

    cache: PagedCache
    slots: Int[Tensor, " t"]
    rows: list[DecodingRows]
    chunks: list[Chunk]
    calls: int = 0
    """How many layers have been computed."""
    _masks: dict[Any, Tensor] = attrs.Factory(dict)

    def attend(
        self,
        query: Float[Tensor, "1 heads t d"],
        key: Float[Tensor, "1 kv_heads t d"],
        value: Float[Tensor, "1 kv_heads t dv"],
        scoring: Scoring,
        chosen: Int[Tensor, "1 t k"] | None,
    ) -> Float[Tensor, "1 t heads dv"]:
        """Store the keys and values, and attend to them and to earlier ones."""
        kv_heads, size = key.shape[1], key.shape[3]
        q = query.view(kv_heads, -1, *query.shape[2:])  # [kv_heads, group, t, d]
        new = torch.cat([key[0], value[0]], dim=-1)
        layer = self._store(new)
        picked = None if chosen is None or chosen.shape[2] == 0 else chosen[0].long()
        parts = []
        start = 0
        for rows in self.rows:
            part = slice(start, start + len(rows.requests))
            mask = None if picked is None else picked[part]
            inputs = (q[:, :, part], new[:, part], mask)
            parts.append(self._decode(layer, rows, *inputs, size, scoring))
            start = part.stop
        for chunk in self.chunks:
            part = slice(start, start + chunk.count)
            mask = None if picked is None else picked[part]
            parts.append(self._prefill(layer, chunk, q[:, :, part], mask, size, scoring))
            start = part.stop
        if start < query.shape[2]:
            parts.append(query.new_zeros(query.shape[2] - start, query.shape[1], value.shape[3]))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.unsqueeze(0).contiguous()

    def store_index_keys(self, keys: Float[Tensor, "1 1 t d"]) -> list[IndexedRequest]:
        """Store an indexer's keys; return where each request's tokens and keys are."""
        layer = self._store(keys[0])
        requests = [Chunk(request, 1) for rows in self.rows for request in rows.requests]
        found: list[IndexedRequest] = []
        start = 0
        for chunk in requests + self.chunks:
            gather = functools.partial(self._index_keys, layer, chunk)
            found.append((start, chunk.request.computed, chunk.count, gather))
            start += chunk.count
        return found

    def _store(self, new: Float[Tensor, "kv_heads t width"]) -> int:
        """Store the keys and values of the next layer; return the layer's number."""
        layer, self.calls = self.calls, self.calls + 1
        self.cache.layers[layer].index_copy_(1, self.slots, new[:, : len(self.slots)])
        return layer

    def _index_keys(self, layer: int, chunk: Chunk) -> Float[Tensor, "s d"]:
        return self.cache.gather(layer, self._pages(chunk))[0, 0]

    def _pages(self, chunk: Chunk) -> Int[Tensor, "1 pages"]:
        """Return the pages that a request's tokens have after this step."""
        key = (chunk.request, "pages")
        if key not in self._masks:
            count = -(-(chunk.request.computed + chunk.count) // PAGE_TOKENS)
            indices = [page.index for page in chunk.request.pages[:count]]
            self._masks[key] = torch.tensor([indices], device=self.slots.device)
        return self._masks[key]

    def _decode(
        self,
        layer: int,
        rows: DecodingRows,
        q: Float[Tensor, "kv_heads group n d"],
        new: Float[Tensor, "kv_heads n width"],
        chosen: Int[Tensor, "n k"] | None,
        size: int,
        scoring: Scoring,
    ) -> Float[Tensor, "n heads dv"]:
        """Attend from the newest token of each row."""
        count = len(rows.requests)
        stored = rows.layers[layer]
        index = self._row_index(rows, len(new))
        stored.view(-1, new.shape[2]).index_copy_(0, index, new.reshape(-1, new.shape[2]))
        longest = max(request.computed for request in rows.requests) + 1
        longest = min(rows.room, -(-longest // PAGE_TOKENS) * PAGE_TOKENS)
        seen = stored[:count, :, :longest]
        mask = self._decoding_mask(rows, longest, scoring.window)
        if chosen is not None:
            mask = mask + _mask_of_chosen(chosen, longest).view(count, 1, 1, longest)
        attended = weigh(
            q.permute(2, 0, 1, 3),
            seen[..., :size],
            seen[..., size:],
            mask,
            scoring,
        )
        return attended.flatten(1, 2)

    def _prefill(
        self,
        layer: int,
        chunk: Chunk,
        q: Float[Tensor, "kv_heads group t d"],
        chosen: Int[Tensor, "t k"] | None,
        size: int,
        scoring: Scoring,
    ) -> Float[Tensor, "t heads dv"]:
        """Attend from a part of a prompt to the prompt so far."""
        seen = self.cache.gather(layer, self._pages(chunk))
        kv_heads, group, count, _ = q.shape
        at_once = max(1, MAX_SCORES // (kv_heads * group * seen.shape[2]))
        parts = []
        for start in range(0, count, at_once):
            queries = q[:, :, start : start + at_once]
            rows = queries.shape[2]
            mask = self._prompt_mask(chunk, start, rows, seen.shape[2], scoring.window)
            if chosen is not None:
                mask = mask + _mask_of_chosen(chosen[start : start + rows], seen.shape[2])
            part = weigh(
                queries.flatten(1, 2).unsqueeze(0),
                seen[..., :size],
                seen[..., size:],
                mask.repeat(group, 1).unsqueeze(0).unsqueeze(0),
                scoring,
            )
            parts.append(part.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).flatten(1, 2))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _positions(self, rows: DecodingRows) -> Int[Tensor, " n"]:
        key = (rows, "positions")
        if key not in self._masks:
            positions = [request.computed for request in rows.requests]
            self._masks[key] = torch.tensor(positions, device=self.slots.device)
        return self._masks[key]

    def _row_index(self, rows: DecodingRows, kv_heads: int) -> Int[Tensor, " kv_heads*n"]:
        """Return where the newest token of each head and row belongs, in rows laid end to end."""
        key = (rows, "index", kv_heads)
        if key not in self._masks:
            positions = self._positions(rows)
            row = torch.arange(len(positions), device=positions.device)
            head = torch.arange(kv_heads, device=positions.device).unsqueeze(1)
            index = (row * kv_heads + head) * rows.room + positions
            self._masks[key] = index.flatten()
        return self._masks[key]

    def _decoding_mask(
        self, rows: DecodingRows, longest: int, window: int | None
    ) -> Float[Tensor, "n 1 1 s"]:
        key = (rows, window)
        if key not in self._masks:
            positions = self._positions(rows)
            mask = _mask(positions.unsqueeze(1), longest, window)
            self._masks[key] = mask.view(len(positions), 1, 1, longest)
        return self._masks[key]

    def _prompt_mask(
        self, chunk: Chunk, start: int, rows: int, seen: int, window: int | None
    ) -> Float[Tensor, "t s"]:
        key = (chunk.request, start, window)
        if key not in self._masks:
            first = chunk.request.computed + start
            positions = torch.arange(first, first + rows, device=self.slots.device)
            self._masks[key] = _mask(positions.unsqueeze(1), seen, window)
        return self._masks[key]


def _mask(positions: Int[Tensor, "t 1"], seen: int, window: int | None) -> Float[Tensor, "t s"]:
    """Return 0 where a token sees a key, else minus infinity."""
    keys = torch.arange(seen, device=positions.device)
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    return torch.zeros(visible.shape, device=positions.device).masked_fill_(~visible, float("-inf"))


def _mask_of_chosen(chosen: Int[Tensor, "t k"], seen: int) -> Float[Tensor, "t s"]:
    """Return 0 at the chosen keys, or everywhere in rows of -1, else minus infinity."""
    hidden = torch.ones(len(chosen), seen, dtype=torch.bool, device=chosen.device)
    hidden.scatter_(1, chosen.clamp(min=0), False)
    hidden &= chosen[:, :1] >= 0
    return torch.zeros(hidden.shape, device=chosen.device).masked_fill_(hidden, float("-inf"))


def weigh(
    query: Float[Tensor, "n kv_heads rows d"],
    key: Float[Tensor, "n kv_heads s d"],
    value: Float[Tensor, "n kv_heads s dv"],
    mask: Float[Tensor, "n 1 q s"],
    scoring: Scoring,
) -> Float[Tensor, "n kv_heads rows dv"]:
    """Return the values, weighted by ``softmax(scaling query . key + mask)``."""
    plain = scoring.softcap is None and scoring.sinks is None
    exact = query.dtype == torch.float32 and query.device.type == "cpu"
    if plain and not exact:
        mask = mask.to(query.dtype).expand(-1, -1, query.shape[2], -1)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scaling
        )
    rows = query.shape[2]
    if rows < LEAST_ROWS:
        query = F.pad(query, (0, 0, 0, LEAST_ROWS - rows))
        mask = mask if mask.shape[2] == 1 else F.pad(mask, (0, 0, 0, LEAST_ROWS - rows))
    scores = torch.matmul(query * scoring.scaling, key.transpose(2, 3)).float()
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh_() * scoring.softcap
    scores += mask
    weights = _softmax(scores, scoring.sinks, rows).to(value.dtype)
    result = torch.matmul(weights[..., :KEY_BLOCK], value[:, :, :KEY_BLOCK])
    for start in range(KEY_BLOCK, value.shape[2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        result += torch.matmul(weights[..., block], value[:, :, block])
    return result[:, :, :rows]


def _softmax(scores: Tensor, sinks: Tensor | None, rows: int) -> Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    kv_heads, padded = scores.shape[1:3]
    each = sinks.view(1, kv_heads, -1, 1).float()  # heads of a group are equal parts of the rows
    each = each.repeat_interleave(rows // each.shape[2], dim=2)
    each = F.pad(each, (0, 0, 0, padded - rows)).expand(len(scores), -1, -1, -1)
    return torch.cat([scores, each], dim=-1).softmax(dim=-1)[..., :-1]


_STEP: "ContextVar[AttentionStep | ShapeProbe]" = ContextVar("_STEP")


@contextlib.contextmanager
def attending(step: "AttentionStep | ShapeProbe") -> Iterator[None]:
    """Use ``step`` in the forward passes of this context."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def switch_to_pages(model: nn.Module) -> None:
    """Register the attention function with transformers, and switch a model to it.

    Raises:
        ValueError: the model's attention can't be switched.
    """
    transformers = require("transformers", extra="transformers")
    sparse = False
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            # The trainer's forward pass may have wrapped it before.
            (indexer,) = getattr(indexer, "wrapped", (indexer,))
            module.set_submodule("indexer", PagedIndexer(indexer, _STEP.get))
            sparse = True
    name = SPARSE_ATTENTION if sparse else PAGED_ATTENTION
    transformers.AttentionInterface.register(name, _paged_attention)
    transformers.AttentionMaskInterface.register(name, _no_mask if sparse else _window_as_mask)
    model.set_attn_implementation(name)  # type: ignore[operator]
    config: Any = model.config
    if config._attn_implementation != name:
        raise ValueError(f"{config.model_type} has its own attention implementation")


def _window_as_mask(*_: Any, local_size: int | None = None, **_others: Any) -> Tensor | None:
    """Entry of ``AttentionMaskInterface``: tell attention the window, if there is one."""
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size, dtype=_WINDOW_DTYPE)


def _no_mask(*_: Any, **_others: Any) -> Tensor:
    """Entry of ``AttentionMaskInterface`` for layers that require a mask; nothing reads it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _paged_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads t d"],
    key: Float[Tensor, "1 kv_heads t d"],
    value: Float[Tensor, "1 kv_heads t dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "1 t heads dv"], None]:
    """Entry of ``AttentionInterface``."""
    step = _STEP.get(None)
    if step is None:
        raise RuntimeError(
            "this model is served by TransformersEngine, and can't be called by others; "
            "model.set_attn_implementation('sdpa') switches it back"
        )
    _refuse_other_attention(module, attention_mask, asked)
    window = sliding_window
    if attention_mask is not None and attention_mask.dtype == _WINDOW_DTYPE:
        window = int(attention_mask.flatten()[0])
    scoring = Scoring(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    return step.attend(query, key, value, scoring, indices), None


def _refuse_other_attention(module: nn.Module, mask: Tensor | None, asked: dict[str, Any]) -> None:
    if mask is not None and mask.dtype not in (_WINDOW_DTYPE, torch.bool):
        raise ValueError(
            f"{type(module).__name__} makes its own mask, which this engine does not support; "
            "serve the model with vLLM"
        )
    causal = asked.get("is_causal", getattr(module, "is_causal", True))
    if causal is False:
        raise ValueError(f"{type(module).__name__} attends to later tokens too")
    for name, value in asked.items():
        if not (name in _IGNORED or value is None or isinstance(value, bool)):
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which this engine does not compute; "
                "serve the model with vLLM"
            )


@attrs.define(eq=False)
class ShapeProbe:
    """In place of an ``AttentionStep``: finds the shape of each layer's keys and values."""

    shapes: list[LayerShape] = attrs.Factory(list)

    def store_index_keys(self, keys: Tensor) -> list[IndexedRequest]:
        """Note the shape of an indexer's keys."""
        self.shapes.append(LayerShape.of(keys, keys[..., :0]))
        return []

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,  # noqa: ARG002
        chosen: Tensor | None,  # noqa: ARG002
    ) -> Tensor:
        """Note the shapes, and return zeros."""
        self.shapes.append(LayerShape.of(key, value))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
