"""Bookkeeping of the KV cache: the tokens whose keys and values each page holds.

A page has room for ``PAGE_TOKENS`` tokens. Pages form a tree: a page is found by its parent, the
page of the tokens before it, and by its own tokens. So requests that begin alike share pages, as do
the turns of a conversation. A page that no request uses is kept until its room is needed; the least
recently used page is discarded first. This module needs no torch.

Layers with windows have a pool of their own, for fewer pages. A page has room there from when its
first token is computed until no coming token sees its tokens and another page needs the room.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

PAGE_TOKENS = 32
# How many children of a page are compared, newest first, to find one that begins alike.
COMPARED = 64


@attrs.define(eq=False)
class Page:
    """A page of the cache.

    Args:
        index: where its keys and values are; page 0 is never given out.
        window_index: where those of layers with windows are; 0 if they are not in the cache.
    """

    index: int
    window_index: int = 0
    parent: "Page | None" = None
    key: tuple[int, ...] | None = None
    """The tokens under which ``parent`` lists the page; None if it can't be found."""
    children: "dict[tuple[int, ...], Page]" = attrs.Factory(dict)
    filled: int = 0
    """How many tokens have keys and values, those of the coming forward pass included."""
    computed: int = 0
    """How many tokens have keys and values, those of the coming forward pass not included."""
    users: int = 0
    window_users: int = 0
    """How many users still see its tokens in layers with windows."""
    routes: tuple[np.ndarray, np.ndarray] | None = None
    """If routes are recorded: each token's experts ``[PAGE_TOKENS, layers, k]``, and the version of
    the weights that computed them."""


@attrs.frozen
class CacheSize:
    """How many tokens a cache has room for.

    Args:
        tokens: in layers that see all tokens. If all layers have windows, the number of tokens that
            can be found in the cache by their pages.
        windowed_tokens: in layers with windows.
    """

    tokens: int
    windowed_tokens: int = 0

    @property
    def pages(self) -> int:
        """The number of pages, without page 0."""
        return -(-self.tokens // PAGE_TOKENS)

    @property
    def windowed_pages(self) -> int:
        """The number of pages in layers with windows, without page 0."""
        return -(-self.windowed_tokens // PAGE_TOKENS)


@attrs.frozen(eq=False)
class Prefix:
    """The part of a request's tokens that is in the cache.

    Args:
        pages: complete pages, to be shared.
        partial: a page that begins like the tokens after ``pages``, to be copied.
        tokens: how many of its tokens are the same.
        pending: whether another request is about to compute more of these tokens.
    """

    pages: list[Page]
    partial: Page | None = None
    tokens: int = 0
    pending: bool = False


class PagePool:
    """Room for the keys and values of pages, in layers of one kind.

    Args:
        size: for how many pages, page 0 not counted.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.idle: OrderedDict[Page, None] = OrderedDict()
        """The pages whose room nobody uses, the least recently used one first."""
        self.reallocated: list[int] = []
        """Indices taken since this list was cleared that hold older keys and values."""
        self.free = list(range(size, 0, -1))
        self._highest = 0  # indices above it have never been used

    @property
    def available(self) -> int:
        """How many indices are free, or can be made free."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """How many indices are used by requests."""
        return self.size - self.available

    def take(self) -> int:
        """Return a free index."""
        index = self.free.pop()
        if index <= self._highest:
            self.reallocated.append(index)
        self._highest = max(self._highest, index)
        return index

    def take_reallocated(self) -> list[int]:
        """Return ``reallocated``, and clear it."""
        reallocated, self.reallocated = self.reallocated, []
        return reallocated


class PageTable:
    """The pages of a cache, and the tree in which they are found.

    Args:
        pages: how many there are, page 0 not counted.
        window: how many tokens layers with windows see, the newest one included; None if there are
            no such layers.
        windowed_pages: how many pages can have room in layers with windows.
    """

    def __init__(self, pages: int, *, window: int | None = None, windowed_pages: int = 0) -> None:
        self.pool = PagePool(pages)
        self.window = window
        self.windowed_pool = PagePool(windowed_pages)
        self.epoch = 0
        """How many times all pages were forgotten."""
        self._root = Page(index=0)

    @property
    def pools(self) -> "tuple[PagePool, PagePool]":
        """The pool of layers that see everything, and that of layers with windows."""
        return self.pool, self.windowed_pool

    @property
    def usage(self) -> float:
        """The part of a pool that requests use, from 0 to 1; the larger one of both pools."""
        return max(pool.used / pool.size for pool in self.pools if pool.size)

    def fits(self, pages: int, windowed_pages: int) -> bool:
        """Return whether so many pages can be allocated, and be given room for windows."""
        enough = self.window is None or self.windowed_pool.available >= windowed_pages
        return enough and self.pool.available >= pages

    def first_seen(self, computed: int) -> int:
        """Return the number of the first page that the token after ``computed`` others sees.

        Only layers with windows are meant; the others see all pages.
        """
        return 0 if self.window is None else max(0, computed + 1 - self.window) // PAGE_TOKENS

    def find(self, tokens: Sequence[int]) -> Prefix:
        """Find what the cache holds of ``tokens``, except for the last one.

        The last token is always computed, because its logits are needed. See also ``shorten``.
        """
        place = self._root
        pages: list[Page] = []
        last = len(tokens) - 1
        for start in range(0, last, PAGE_TOKENS):
            page = place.children.get(tuple(tokens[start : start + PAGE_TOKENS]))
            if page is None or start + PAGE_TOKENS > last:
                return self._find_partial(place, pages, tokens[start:last])
            if page.filled < PAGE_TOKENS:
                return Prefix(pages, pending=True)
            pages.append(page)
            place = page
        return Prefix(pages)

    def shorten(self, prefix: Prefix) -> Prefix:
        """Return the longest part of a prefix whose next token sees all that it has to see.

        The prefix itself is returned, unless keys and values of layers with windows were given up.
        """
        whole = self._has_window(prefix.pages, len(prefix.pages), prefix)
        if prefix.pending or whole:
            return prefix
        end = len(prefix.pages)
        while not self._has_window(prefix.pages, end):
            end -= 1
        return Prefix(prefix.pages[:end])

    def allocate(self) -> Page:
        """Return a page for one user; it takes the room of an idle one if none is free.

        Raises:
            IndexError: all pages are used.
        """
        if not self.pool.free:
            if not self.pool.idle:
                raise IndexError("all pages of the cache are used")
            self._discard(next(iter(self.pool.idle)))
        return Page(index=self.pool.take(), users=1)

    def allocate_window(self, page: Page) -> None:
        """Give a page of one user room in layers with windows, if there are any.

        Raises:
            IndexError: all of it is used.
        """
        if self.window is None or page.window_index:
            return
        if not self.windowed_pool.free:
            if not self.windowed_pool.idle:
                raise IndexError("all pages of layers with windows are used")
            self._give_up_window(next(iter(self.windowed_pool.idle)))
        page.window_index, page.window_users = self.windowed_pool.take(), 1

    def share(self, page: Page) -> None:
        """Add a user to a page."""
        page.users += 1
        self.pool.idle.pop(page, None)

    def share_window(self, page: Page) -> None:
        """Add a user who sees the page's tokens in layers with windows."""
        if self.window is not None:
            page.window_users += 1
            self.windowed_pool.idle.pop(page, None)

    def list_under(self, parent: Page | None, page: Page, tokens: Sequence[int]) -> Page:
        """Make ``page`` findable by its tokens; return it, or the page that already is.

        A page whose parent can't be found can't be found either.
        """
        place = self._root if parent is None else parent
        if place is not self._root and place.key is None:
            return page
        self._unlist(page)
        key = tuple(tokens)
        listed = place.children.setdefault(key, page)
        if listed is page:
            page.parent, page.key = place, key
        return listed

    def release(self, pages: Sequence[Page], *, keep: bool = True) -> None:
        """Take one user from each page; keep those that can be found, if ``keep`` is set."""
        for page in reversed(pages):  # so that a page is discarded before its parent
            page.users -= 1
            if page.users:
                continue
            # A page whose tokens were never computed would keep others waiting.
            if keep and page.key is not None and page.computed >= len(page.key):
                self.pool.idle[page] = None
            else:
                self._free(page)

    def release_windows(
        self,
        pages: Sequence[Page],
        places: Sequence[Page],
        *,
        keep: bool = True,
        likely: bool = True,
    ) -> None:
        """Take one user from each page that has room in layers with windows.

        Args:
            pages: the pages, which may have no such room.
            places: for each page the one that is found by its tokens. If that one has given up its
                room, it gets the page's.
            keep: whether what can be found is kept until its room is needed.
            likely: whether others are likely to go on from here; the rest is discarded first.
        """
        if self.window is None:
            return
        for page, place in zip(pages, places, strict=True):
            if not page.window_index:
                continue
            page.window_users -= 1
            if page.window_users:
                continue
            complete = page.computed == place.computed == len(place.key or ()) == PAGE_TOKENS
            if keep and place is not page and complete and not place.window_index:
                place.window_index, page.window_index = page.window_index, 0
                self._keep_window(place, likely=likely)
            elif keep and page.key is not None and page.computed >= len(page.key):
                self._keep_window(page, likely=likely)
            else:
                self._give_up_window(page)

    def forget(self) -> None:
        """Make every page unfindable, because the weights have changed."""
        self.epoch += 1
        for page in list(self.pool.idle):
            self._discard(page)
        for page in list(self.windowed_pool.idle):
            self._give_up_window(page)
        for page in self._below(self._root):
            page.key, page.parent = None, None
        self._root.children.clear()

    def _has_window(self, pages: Sequence[Page], end: int, prefix: Prefix | None = None) -> bool:
        """Whether the token after ``end`` pages, and after the partial page, sees all it has to."""
        if self.window is None:
            return True
        tokens = end * PAGE_TOKENS + (0 if prefix is None else prefix.tokens)
        seen = pages[self.first_seen(tokens) : end]
        partial = [] if prefix is None or prefix.partial is None else [prefix.partial]
        return all(page.window_index for page in itertools.chain(seen, partial))

    def _find_partial(self, place: Page, pages: list[Page], tokens: Sequence[int]) -> Prefix:
        wanted = list(tokens[:PAGE_TOKENS])
        best, length = None, 0
        for page in itertools.islice(reversed(place.children.values()), COMPARED):
            same = _common(page.key or (), wanted)
            if same > length:
                best, length = page, same
        if best is None:
            return Prefix(pages)
        if best.computed < length:  # it will be, unless its user ends before
            return Prefix(pages, pending=True)
        return Prefix(pages, partial=best, tokens=length)

    def _below(self, place: Page) -> Iterator[Page]:
        rest = list(place.children.values())
        while rest:
            page = rest.pop()
            rest += page.children.values()
            page.children.clear()
            yield page

    def _discard(self, page: Page) -> None:
        del self.pool.idle[page]
        self._free(page)

    def _free(self, page: Page) -> None:
        """Take the room of a page without users."""
        self._unlist(page)
        self.pool.free.append(page.index)
        if page.window_index:
            self._give_up_window(page)

    def _keep_window(self, page: Page, *, likely: bool) -> None:
        self.windowed_pool.idle[page] = None
        self.windowed_pool.idle.move_to_end(page, last=likely)

    def _give_up_window(self, page: Page) -> None:
        self.windowed_pool.idle.pop(page, None)
        self.windowed_pool.free.append(page.window_index)
        page.window_index = 0

    def _unlist(self, page: Page) -> None:
        siblings = page.parent.children if page.parent is not None else {}
        if page.key is not None and siblings.get(page.key) is page:
            del siblings[page.key]
        page.parent, page.key = None, None


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    if not first or not second or first[0] != second[0]:
        return 0
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


def pages_of_span(tokens: int) -> int:
    """Return how many pages so many consecutive tokens can be on, at most."""
    return -(-(tokens - 1) // PAGE_TOKENS) + 1
