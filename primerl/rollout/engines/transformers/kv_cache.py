"""Keys and values of all requests, in pages, and close together for requests that decode.

A token's key and value lie side by side. The layers are those of attention: the n-th call of the
attention function in a forward pass has the n-th layer of the cache.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl.rollout.engines.transformers.pages import PAGE_TOKENS
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

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "LayerShape":
        """Return the shape of ``key`` ``[1, heads, t, d]`` and ``value`` ``[1, heads, t, dv]``."""
        if key.shape[1] != value.shape[1]:
            raise ValueError(
                f"attention has {key.shape[1]} heads of keys and {value.shape[1]} of values; "
                "expected the same number"
            )
        sizes = (key.shape[1], key.shape[3], value.shape[3])
        return cls(*sizes, dtype=key.dtype, device=key.device)

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

    Raises:
        MemoryError: they don't fit into the memory.
    """

    def __init__(self, shapes: Sequence[LayerShape], *, device: torch.device, pages: int) -> None:
        self.shapes = list(shapes)
        self.device = device
        tokens = (pages + 1) * PAGE_TOKENS
        self.layers = [
            allocate_zeros((one.heads, tokens, one.width), one.dtype, one.device) for one in shapes
        ]
        """For each layer ``[heads, tokens, width]``."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first tokens of pages, one after another."""
        for one in copies:
            source, target = one.source.index * PAGE_TOKENS, one.target.index * PAGE_TOKENS
            for layer in self.layers:
                layer[:, target : target + one.tokens] = layer[:, source : source + one.tokens]

    def erase(self, pages: Sequence[int]) -> None:
        """Set pages to zero, in case they hold NaN, which would spoil the sums of later tokens."""
        if not pages:
            return
        index = to_device(pages, torch.int64, self.device)
        for layer in self.layers:
            layer.view(layer.shape[0], -1, PAGE_TOKENS, layer.shape[2]).index_fill_(1, index, 0)

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
    have the same room, and the rows in use are the first ones.

    Args:
        cache: the pages.
        room: how many tokens a row has room for.
    """

    def __init__(self, cache: PagedCache, room: int) -> None:
        self.room = room
        self.requests: list[BatchedRequest] = []
        self._cache = cache
        self.layers: list[Tensor] = []
        """For each layer ``[rows, heads, room, width]``."""

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self._cache.device

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
            self.requests[row] = self.requests[last]
        del self.requests[count:]

    def add(self, requests: Sequence[BatchedRequest]) -> None:
        """Add rows with the keys and values that the requests have in their pages."""
        first = len(self.requests)
        self.requests += requests
        self._reserve(len(self.requests))
        longest = max(len(request.pages) for request in requests)
        table = [request.table(longest) for request in requests]
        pages = to_device(table, torch.int64, self.device)
        tokens = min(longest * PAGE_TOKENS, self.room)
        for number, layer in enumerate(self.layers):
            found = self._cache.gather(number, pages)
            layer[first : first + len(requests), :, :tokens] = found[:, :, :tokens]

    def _reserve(self, rows: int) -> None:
        have = len(self.layers[0]) if self.layers else 0
        if rows <= have:
            return
        wanted = max(rows, 2 * have)
        grown = []
        for number, shape in enumerate(self._cache.shapes):
            size = (wanted, shape.heads, self.room, shape.width)
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
            room = known if request.computed < known else _room(request.computed + 1)
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
        return list(self._rows.values())

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._room.clear()


def _room(tokens: int) -> int:
    room = SMALLEST_ROW
    while room < tokens:
        room *= 2
    return room


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros; on a CPU, memory is taken only where something is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    plain = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(plain).view(dtype)
