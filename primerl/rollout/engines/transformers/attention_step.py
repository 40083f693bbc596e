"""A forward pass over the tokens of many requests, as attention sees it.

The tokens lie end to end. Attention stores their keys and values, and then lets each token attend
to its own request, in parts: requests that decode, and chunks of prompts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from primerl.rollout.engines.transformers.attention_scores import (
    Scoring,
    causal_mask,
    mask_of_chosen,
    weigh,
)
from primerl.rollout.engines.transformers.kv_cache import DecodingRows, PagedCache
from primerl.rollout.engines.transformers.pages import PAGE_TOKENS
from primerl.rollout.engines.transformers.recurrent_states import MixRows, StateStep
from primerl.rollout.engines.transformers.scheduler import BatchedRequest, Chunk
from primerl.rollout.engines.transformers.transfers import to_device

# The largest number of scores that are held in memory at a time.
MAX_SCORES = 2**25

IndexedRequest = tuple[int, int, int, Callable[[], Tensor]]
"""A request's first row in the batch, its tokens before, its tokens in this step, and its keys."""


@runtime_checkable
class Part(Protocol):
    """Some consecutive tokens of a forward pass, which attend in the same way."""

    @property
    def count(self) -> int:
        """The number of tokens."""
        ...

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "kv_heads group t d"],
        new: Float[Tensor, "kv_heads t width"],
        chosen: Int[Tensor, "t k"] | None,
        scoring: Scoring,
    ) -> Float[Tensor, "t heads dv"]:
        """Attend to the request's tokens so far; ``new`` are the keys and values of the part."""
        ...


@attrs.define(eq=False)
class AttentionStep:
    """A forward pass, as the attention function needs to know it.

    Args:
        cache: the pages.
        slots: where in the cache each token's key and value go, int64[t].
        window_slots: the same for layers with windows; the same numbers if there are none.
        parts: the tokens, in order. More tokens may follow, of nobody.
        chunks: the same tokens by request, for the indexers of sparse attention.
        states: the recurrent states, if the model has such states.
    """

    cache: PagedCache
    slots: Int[Tensor, " t"]
    window_slots: Int[Tensor, " t"]
    parts: Sequence[Part]
    chunks: Sequence[Chunk] = ()
    states: StateStep | None = None
    calls: int = 0
    """How many layers have been computed."""

    def attend(
        self,
        query: Float[Tensor, "1 heads t d"],
        key: Float[Tensor, "1 kv_heads t d"],
        value: Float[Tensor, "1 kv_heads t dv"],
        scoring: Scoring,
        chosen: Int[Tensor, "1 t k"] | None,
    ) -> Float[Tensor, "1 t heads dv"]:
        """Store the keys and values, and attend to them and to earlier ones."""
        grouped = query.view(key.shape[1], -1, *query.shape[2:])  # [kv_heads, group, t, d]
        new = torch.cat([key[0], value[0]], dim=-1)
        layer = self._store(new)
        _check_window(self.cache.shapes[layer].window, scoring.window)
        picked = None if chosen is None or chosen.shape[2] == 0 else chosen[0].long()
        results = []
        start = 0
        for part in self.parts:
            span = slice(start, start + part.count)
            its_choice = None if picked is None else picked[span]
            results.append(
                part.attend(layer, grouped[:, :, span], new[:, span], its_choice, scoring)
            )
            start = span.stop
        if start < query.shape[2]:
            results.append(query.new_zeros(query.shape[2] - start, query.shape[1], value.shape[3]))
        attended = results[0] if len(results) == 1 else torch.cat(results)
        return attended.unsqueeze(0).contiguous()

    def mix(
        self, mixer: int, hidden: Float[Tensor, "1 t h"], run: MixRows
    ) -> Float[Tensor, "1 t h"]:
        """Run a mixer on each request's tokens, from its states on."""
        assert self.states is not None
        return self.states.mix(mixer, hidden, run)

    def store_index_keys(self, keys: Float[Tensor, "1 1 t d"]) -> list[IndexedRequest]:
        """Store an indexer's keys; return where each request's tokens and keys are."""
        layer = self._store(keys[0])
        found: list[IndexedRequest] = []
        start = 0
        for chunk in self.chunks:
            gather = partial(self._index_keys, layer, chunk)
            found.append((start, chunk.request.computed, chunk.count, gather))
            start += chunk.count
        return found

    def _store(self, new: Float[Tensor, "kv_heads t width"]) -> int:
        """Store the keys and values of the next layer; return the layer's number."""
        layer, self.calls = self.calls, self.calls + 1
        slots = self.window_slots if self.cache.windowed[layer] else self.slots
        self.cache.layers[layer].index_copy_(1, slots, new[:, : len(slots)])
        return layer

    def _index_keys(self, layer: int, chunk: Chunk) -> Float[Tensor, "s d"]:
        return self.cache.gather(layer, _pages(chunk, self.slots.device))[0, 0]


class _Once(dict[Any, Tensor]):
    """Tensors that all layers of a forward pass use, made when the first layer needs them."""

    def make(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        if key not in self:
            self[key] = make()
        return self[key]


@attrs.define(eq=False)
class DecodingInRows:
    """The newest tokens of decoding requests, whose keys and values also lie in rows."""

    rows: DecodingRows
    _once: _Once = attrs.field(init=False, factory=_Once)

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self.rows.requests)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "kv_heads group n d"],
        new: Float[Tensor, "kv_heads n width"],
        chosen: Int[Tensor, "n k"] | None,
        scoring: Scoring,
    ) -> Float[Tensor, "n heads dv"]:
        """Add the newest token to each row, and attend to the row."""
        heads, _, width = new.shape
        stored = self.rows.layers[layer]
        windowed = self.rows.windowed[layer]
        index = self._once.make(("index", heads, windowed), lambda: self._index(heads, windowed))
        stored.view(-1, width).index_copy_(0, index, new.reshape(-1, width))
        longest = max(self._places(windowed)) + 1
        longest = min(stored.shape[2], -(-longest // PAGE_TOKENS) * PAGE_TOKENS)
        mask = self._once.make(
            ("mask", windowed, scoring.window),
            lambda: causal_mask(self._positions(windowed).unsqueeze(1), longest, scoring.window),
        )
        return _attend_each(query, stored[: self.count, :, :longest], mask, chosen, scoring)

    def _places(self, windowed: bool) -> list[int]:
        """Return the place of the newest token in each row."""
        starts = self.rows.starts if windowed else [0] * self.count
        pairs = zip(self.rows.requests, starts, strict=True)
        return [request.computed - start for request, start in pairs]

    def _positions(self, windowed: bool) -> Int[Tensor, " n"]:
        return self._once.make(
            ("positions", windowed),
            lambda: to_device(self._places(windowed), torch.int64, self.rows.device),
        )

    def _index(self, heads: int, windowed: bool) -> Int[Tensor, " heads*n"]:
        """Return where the newest token of each head and row belongs, in rows laid end to end."""
        positions = self._positions(windowed)
        row = torch.arange(self.count, device=positions.device)
        head = torch.arange(heads, device=positions.device).unsqueeze(1)
        room = self.rows.window_room if windowed else self.rows.room
        index: Tensor = (row * heads + head) * room + positions
        return index.flatten()


@attrs.define(eq=False)
class DecodingInPages:
    """The newest tokens of decoding requests, whose keys and values lie in their pages.

    Args:
        cache: the pages.
        table: the pages of each request, int64[n, p], filled up with page 0.
        positions: the position of each request's newest token, int64[n].
        window_table: in layers with windows, the pages that this token sees, int64[n, w].
        window_starts: the position of the first token of ``window_table``, int64[n].
    """

    cache: PagedCache
    table: Int[Tensor, "n p"]
    positions: Int[Tensor, " n"]
    window_table: Int[Tensor, "n w"]
    window_starts: Int[Tensor, " n"]
    _once: _Once = attrs.field(init=False, factory=_Once)

    @classmethod
    def of(cls, cache: PagedCache, requests: Sequence[BatchedRequest]) -> "DecodingInPages":
        """Return the part of ``requests``."""
        pages = max(len(request.pages) for request in requests)
        windows = [cls.window_of(cache, request, pages) for request in requests]

        def tensor(values: Sequence[Any]) -> Tensor:
            return to_device(values, torch.int64, cache.device)

        return cls(
            cache,
            table=tensor([request.table(pages) for request in requests]),
            positions=tensor([request.computed for request in requests]),
            window_table=tensor([table for _, table in windows]),
            window_starts=tensor([start for start, _ in windows]),
        )

    @staticmethod
    def window_of(cache: PagedCache, request: BatchedRequest, pages: int) -> tuple[int, list[int]]:
        """Return a request's row of ``window_starts`` and of ``window_table``.

        Args:
            cache: the pages.
            request: the request.
            pages: how many pages the longest request has.
        """
        if cache.window is None:
            return 0, []
        first = cache.window_start(request.computed, aligned=False)
        table = request.window_table(first, min(pages, cache.window_pages))
        return first * PAGE_TOKENS, table

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self.table)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "kv_heads group n d"],
        new: Float[Tensor, "kv_heads n width"],  # noqa: ARG002  they are in the pages
        chosen: Int[Tensor, "n k"] | None,
        scoring: Scoring,
    ) -> Float[Tensor, "n heads dv"]:
        """Copy each request's pages, and attend to them."""
        windowed = self.cache.windowed[layer]
        seen = self.cache.gather(layer, self.window_table if windowed else self.table)

        def make() -> Tensor:
            places = self.positions - self.window_starts if windowed else self.positions
            return causal_mask(places.unsqueeze(1), seen.shape[2], scoring.window)

        mask = self._once.make((windowed, scoring.window), make)
        return _attend_each(query, seen, mask, chosen, scoring)


@attrs.define(eq=False)
class PromptChunk:
    """Consecutive tokens of one request."""

    cache: PagedCache
    chunk: Chunk
    _once: _Once = attrs.field(init=False, factory=_Once)

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self.chunk.count

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "kv_heads group t d"],
        new: Float[Tensor, "kv_heads t width"],  # noqa: ARG002  they are in the pages
        chosen: Int[Tensor, "t k"] | None,
        scoring: Scoring,
    ) -> Float[Tensor, "t heads dv"]:
        """Copy the request's pages, and attend to them."""
        device = query.device
        windowed = self.cache.windowed[layer]
        pages = self._once.make(("pages", windowed), lambda: self._pages(windowed, device))
        seen = self.cache.gather(layer, pages)
        kv_heads, group, count, _ = query.shape
        at_once = max(1, MAX_SCORES // (kv_heads * group * seen.shape[2]))
        results = []
        for start in range(0, count, at_once):
            span = slice(start, min(start + at_once, count))
            mask = self._mask(span, seen.shape[2], scoring.window, windowed, device)
            if chosen is not None:
                mask = mask + mask_of_chosen(chosen[span], seen.shape[2])
            results.append(_attend_from_rows(query[:, :, span], seen, mask, scoring))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _pages(self, windowed: bool, device: torch.device) -> Int[Tensor, "1 pages"]:
        if not windowed:
            return _pages(self.chunk, device)
        first = self._first_page(windowed)
        table = self.chunk.request.window_table(first, _page_count(self.chunk) - first)
        return to_device([table], torch.int64, device)

    def _first_page(self, windowed: bool) -> int:
        if not windowed:
            return 0
        return self.cache.window_start(self.chunk.request.computed, aligned=True)

    def _mask(
        self, span: slice, seen: int, window: int | None, windowed: bool, device: torch.device
    ) -> Float[Tensor, "t s"]:
        first = self.chunk.request.computed - self._first_page(windowed) * PAGE_TOKENS

        def make() -> Tensor:
            places = torch.arange(first + span.start, first + span.stop, device=device)
            return causal_mask(places.unsqueeze(1), seen, window)

        return self._once.make((span.start, windowed, window), make)


def _attend_each(
    query: Float[Tensor, "kv_heads group n d"],
    seen: Float[Tensor, "n kv_heads s width"],
    mask: Float[Tensor, "n s"],
    chosen: Int[Tensor, "n k"] | None,
    scoring: Scoring,
) -> Float[Tensor, "n heads dv"]:
    """Attend from one token of each request to the request's own keys."""
    if chosen is not None:
        mask = mask + mask_of_chosen(chosen, seen.shape[2])
    size = query.shape[3]
    attended = weigh(
        query.permute(2, 0, 1, 3),
        seen[..., :size],
        seen[..., size:],
        mask.unsqueeze(1).unsqueeze(1),
        scoring,
    )
    return attended.flatten(1, 2)


def _attend_from_rows(
    query: Float[Tensor, "kv_heads group t d"],
    seen: Float[Tensor, "1 kv_heads s width"],
    mask: Float[Tensor, "t s"],
    scoring: Scoring,
) -> Float[Tensor, "t heads dv"]:
    """Attend from several tokens of a request to its keys."""
    kv_heads, group, rows, size = query.shape
    attended = weigh(
        query.flatten(1, 2).unsqueeze(0),
        seen[..., :size],
        seen[..., size:],
        mask.repeat(group, 1).unsqueeze(0).unsqueeze(0),
        scoring,
    )
    return attended.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _pages(chunk: Chunk, device: torch.device) -> Int[Tensor, "1 pages"]:
    """Return the pages that a request's tokens have after this step."""
    pages = chunk.request.pages[: _page_count(chunk)]
    return to_device([[page.index for page in pages]], torch.int64, device)


def _page_count(chunk: Chunk) -> int:
    return -(-(chunk.request.computed + chunk.count) // PAGE_TOKENS)


def _check_window(cached: int | None, asked: int | None) -> None:
    """Raise a RuntimeError if a layer asks for more keys than its pages hold."""
    if cached is not None and (asked is None or asked > cached):
        raise RuntimeError(
            f"a layer attends to a window of {asked} tokens, but asked for {cached} when the "
            "engine was made; serve the model with vLLM"
        )
