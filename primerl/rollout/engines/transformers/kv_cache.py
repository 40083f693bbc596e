"""Keys and values of all requests, in pages, and close together for requests that decode.

A token's key and value lie side by side. The layers are those of attention: the n-th call of the
attention function in a forward pass has the n-th layer of the cache.

Layers with windows have fewer pages, and shorter rows. Their rows, and the pages that a chunk of a
prompt reads, begin at a multiple of ``KEY_BLOCK`` tokens, so that sums over keys round alike.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl.rollout.engines.transformers.attention_scores import KEY_BLOCK
from primerl.rollout.engines.transformers.pages import PAGE_TOKENS, pages_of_span
from primerl.rollout.engines.transformers.scheduler import BatchedRequest, PageCopy
from primerl.rollout.engines.transformers.transfers import to_device

# The smallest number of tokens that a row of decoding requests has room for.
SMALLEST_ROW = 64


@attrs.frozen
class LayerShape:
    """The shape of one layer's keys and values."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    """How many tokens a token sees, itself included; None if it sees all."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor, window: int | None = None) -> "LayerShape":
        """Return the shape of ``key`` ``[1, heads, t, d]`` and ``value`` ``[1, heads, t, dv]``."""
        if key.shape[1] != value.shape[1]:
            raise ValueError(
                f"attention has {key.shape[1]} heads of keys and {value.shape[1]} of values; "
                "expected the same number"
            )
        sizes = (key.shape[1], key.shape[3], value.shape[3])
        return cls(*sizes, dtype=key.dtype, device=key.device, window=window)

    @property
    def width(self) -> int:
        """The size of a key and a value together."""
        return self.key_size + self.value_size

    @property
    def token_bytes(self) -> int:
        """How many bytes one token takes."""
        return self.heads * self.width * self.dtype.itemsize


class PagedCache:
    """The keys and values of all pages.

    Args:
        shapes: the shape of each layer; none if the model has no attention.
        device: where keys and values are.
        pages: the number of pages, without page 0, which stays empty and fills up shorter tables.
        windowed_pages: the same for layers with windows.

    Raises:
        MemoryError: they don't fit into the memory.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        device: torch.device,
        pages: int,
        windowed_pages: int = 0,
    ) -> None:
        self.shapes = list(shapes)
        self.device = device
        self.window = largest_window(shapes)
        """The largest window of a layer; None if no layer has one."""
        self.windowed = [one.window is not None for one in shapes]
        """For each layer, whether it has a window."""
        counts = [windowed_pages if windowed else pages for windowed in self.windowed]
        self.layers = [
            allocate_zeros((one.heads, (count + 1) * PAGE_TOKENS, one.width), one.dtype, one.device)
            for one, count in zip(shapes, counts, strict=True)
        ]
        """For each layer ``[heads, tokens, width]``."""

    @property
    def window_pages(self) -> int:
        """How many pages a token sees in layers with windows, at most."""
        return 0 if self.window is None else pages_of_span(self.window)

    def window_start(self, position: int, *, aligned: bool) -> int:
        """Return the number of the first page that a token sees in layers with windows.

        With ``aligned``, return that of a page before it, which begins a block of keys.
        """
        assert self.window is not None
        unit = KEY_BLOCK if aligned else PAGE_TOKENS
        return max(0, position + 1 - self.window) // unit * (unit // PAGE_TOKENS)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first tokens of pages, as if one page were copied after another."""
        if not copies:
            return
        slots = self._slots([(one.source.index, one.target.index, one.tokens) for one in copies])
        windowed_slots = slots
        if self.window is not None:
            windowed_slots = self._slots(
                [(one.source.window_index, one.target.window_index, one.tokens) for one in copies]
            )
        for layer, windowed in zip(self.layers, self.windowed, strict=True):
            sources, targets = windowed_slots if windowed else slots
            layer[:, targets] = layer[:, sources]

    def _slots(self, copies: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Return from where to where tokens are copied at once.

        Args:
            copies: for each page its source, its target, and the number of tokens.
        """
        origin: dict[int, int] = {}  # a page may be copied to, and then copied from
        for source, target, tokens in copies:
            for token in range(tokens):
                slot = source * PAGE_TOKENS + token
                origin[target * PAGE_TOKENS + token] = origin.get(slot, slot)
        return (
            to_device(list(origin.values()), torch.int64, self.device),
            to_device(list(origin), torch.int64, self.device),
        )

    def erase(self, pages: Sequence[int], windowed_pages: Sequence[int] = ()) -> None:
        """Set pages to zero, in case they hold NaN, which would spoil the sums of later tokens.

        Args:
            pages: the pages' indices.
            windowed_pages: the same in layers with windows.
        """
        for erased, kind in ((pages, False), (windowed_pages, True)):
            if not erased:
                continue
            index = to_device(erased, torch.int64, self.device)
            for layer, windowed in zip(self.layers, self.windowed, strict=True):
                if windowed == kind:
                    paged = layer.view(layer.shape[0], -1, PAGE_TOKENS, layer.shape[2])
                    paged.index_fill_(1, index, 0)

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """Copy the keys and values of pages ``[n, p]`` of ``n`` requests, ``[n, heads, t, width]``.

        ``t`` is the number of tokens in ``p`` pages.
        """
        heads, _, width = self.layers[layer].shape
        paged = self.layers[layer].view(heads, -1, PAGE_TOKENS, width)
        found = paged.index_select(1, pages.flatten())
        return found.view(heads, len(pages), -1, width).transpose(0, 1)


class DecodingRows:
    """The keys and values of decoding requests, one row each, so that a step copies nothing.

    A row is filled from the pages when its request begins to decode, and grows with it. All rows
    have the same room, and the rows in use are the first ones. In layers with windows, rows have
    less room, and a row that is full loses its first tokens, which the request no longer sees.

    Args:
        cache: the pages.
        room: how many tokens a row has room for.
    """

    def __init__(self, cache: PagedCache, room: int) -> None:
        self.room = room
        self.window_room = min(room, window_room(cache))
        """How many tokens a row has room for in layers with windows."""
        self.requests: list[BatchedRequest] = []
        self.starts: list[int] = []
        """For each row, the position of its first token in layers with windows."""
        self._cache = cache
        self.layers: list[Tensor] = []
        """For each layer ``[rows, heads, room, width]``."""

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self._cache.device

    @property
    def windowed(self) -> list[bool]:
        """For each layer, whether it has a window."""
        return self._cache.windowed

    def keep(self, requests: set[BatchedRequest]) -> None:
        """Remove the rows of all other requests; the last rows take their places."""
        kept = [row for row, request in enumerate(self.requests) if request in requests]
        count = len(kept)
        moved = [row for row in kept if row >= count]
        for row, known in enumerate(self.requests[:count]):
            if known in requests:
                continue
            last = moved.pop()
            for layer in self.layers:
                layer[row] = layer[last]
            self.requests[row], self.starts[row] = self.requests[last], self.starts[last]
        del self.requests[count:], self.starts[count:]

    def slide(self) -> None:
        """Make room for the next token in rows of layers with windows."""
        for row, (request, start) in enumerate(zip(self.requests, self.starts, strict=True)):
            if request.computed - start < self.window_room:
                continue
            self.starts[row] = self._start(request)
            lost = self.starts[row] - start
            for layer, windowed in zip(self.layers, self.windowed, strict=True):
                if windowed:
                    layer[row, :, :-lost] = layer[row, :, lost:].clone()

    def add(self, requests: Sequence[BatchedRequest]) -> None:
        """Add rows with the keys and values that the requests have in their pages."""
        first = len(self.requests)
        self.requests += requests
        self._reserve(len(self.requests))
        self.starts += map(self._start, requests)
        pages = self._table(requests)
        windowed_pages = pages if self._cache.window is None else self._window_table(requests)
        for number, layer in enumerate(self.layers):
            windowed = self.windowed[number]
            found = self._cache.gather(number, windowed_pages if windowed else pages)
            tokens = min(found.shape[2], layer.shape[2])
            layer[first : first + len(requests), :, :tokens] = found[:, :, :tokens]

    def _table(self, requests: Sequence[BatchedRequest]) -> Tensor:
        longest = max(len(request.pages) for request in requests)
        table = [request.table(longest) for request in requests]
        return to_device(table, torch.int64, self.device)

    def _window_table(self, requests: Sequence[BatchedRequest]) -> Tensor:
        starts = [self._start(request) // PAGE_TOKENS for request in requests]
        pairs = list(zip(requests, starts, strict=True))
        longest = max(len(request.pages) - start for request, start in pairs)
        table = [request.window_table(start, longest) for request, start in pairs]
        return to_device(table, torch.int64, self.device)

    def _start(self, request: BatchedRequest) -> int:
        """Return the position of a row's first token in layers with windows."""
        if self._cache.window is None or request.computed < self.window_room:
            return 0
        return self._cache.window_start(request.computed, aligned=True) * PAGE_TOKENS

    def _reserve(self, rows: int) -> None:
        have = len(self.layers[0]) if self.layers else 0
        if rows <= have:
            return
        wanted = max(rows, 2 * have)
        grown = []
        for number, shape in enumerate(self._cache.shapes):
            room = self.window_room if self.windowed[number] else self.room
            size = (wanted, shape.heads, room, shape.width)
            layer = allocate_zeros(size, shape.dtype, shape.device)
            if have:
                layer[:have] = self.layers[number]
            grown.append(layer)
        self.layers = grown


class DecodingBatch:
    """All decoding requests, in rows whose room is a power of two times ``SMALLEST_ROW``."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._rows: dict[int, DecodingRows] = {}
        self._room: dict[BatchedRequest, int] = {}

    def arrange(self, requests: Sequence[BatchedRequest]) -> list[DecodingRows]:
        """Give each request a row with room for its next token; return the rows in use."""
        new: dict[int, list[BatchedRequest]] = {}
        wanted: dict[BatchedRequest, int] = {}
        for request in requests:
            known = self._room.get(request, 0)
            room = known if request.computed < known else self._room_for(request.computed + 1)
            wanted[request] = room
            if room != known:
                new.setdefault(room, []).append(request)
        for room, rows in list(self._rows.items()):
            rows.keep({request for request, its in wanted.items() if its == room})
            if not rows.requests and room not in new:
                del self._rows[room]
        for room, added in new.items():
            self._rows.setdefault(room, DecodingRows(self._cache, room)).add(added)
        self._room = wanted
        if self._cache.window is not None:
            for rows in self._rows.values():
                rows.slide()
        return list(self._rows.values())

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._room.clear()

    def _room_for(self, tokens: int) -> int:
        room = SMALLEST_ROW
        while room < tokens:
            room *= 2
        if self._cache.window is None or not all(self._cache.windowed):
            return room
        return min(room, window_room(self._cache))


def window_room(cache: PagedCache) -> int:
    """Return how many tokens a row has room for in layers with windows.

    The window, up to ``KEY_BLOCK`` tokens before it, and ``KEY_BLOCK`` after it, until it slides.
    """
    return 0 if cache.window is None else (-(-cache.window // KEY_BLOCK) + 2) * KEY_BLOCK


def largest_window(shapes: Sequence[LayerShape]) -> int | None:
    """Return the largest window of a layer; None if no layer has one."""
    return max((one.window for one in shapes if one.window is not None), default=None)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros; on a CPU, memory is taken only where something is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    plain = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(plain).view(dtype)
