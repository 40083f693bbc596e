"""Bookkeeping of the KV cache: the tokens whose keys and values each page holds.

A page has room for ``PAGE_TOKENS`` tokens. Pages form a tree: a page is found by its parent, the
page of the tokens before it, and by its own tokens. So requests that begin alike share pages, as do
the turns of a conversation. A page that no request uses is kept until its room is needed; the least
recently used page is discarded first. This module needs no torch.
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
    """

    index: int
    parent: "Page | None" = None
    key: tuple[int, ...] | None = None
    """The tokens under which ``parent`` lists the page; None if it can't be found."""
    children: "dict[tuple[int, ...], Page]" = attrs.Factory(dict)
    filled: int = 0
    """How many tokens have keys and values, those of the coming forward pass included."""
    computed: int = 0
    """How many tokens have keys and values, those of the coming forward pass not included."""
    users: int = 0
    routes: tuple[np.ndarray, np.ndarray] | None = None
    """If routes are recorded: each token's experts ``[PAGE_TOKENS, layers, k]``, and the version of
    the weights that computed them."""


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


class PageTable:
    """The pages of a cache, and the tree in which they are found.

    Args:
        pages: how many there are, page 0 not counted.
    """

    def __init__(self, pages: int) -> None:
        self.size = pages
        self.epoch = 0
        """How many times all pages were forgotten."""
        self._root = Page(index=0)
        self._free = list(range(pages, 0, -1))
        self._highest = 0  # pages above it have never been used
        self.reallocated: list[int] = []
        """Pages allocated since this list was cleared that hold older keys and values."""
        self._idle: OrderedDict[Page, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many pages can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """How many pages are used by requests."""
        return self.size - self.available

    def find(self, tokens: Sequence[int]) -> Prefix:
        """Find what the cache holds of ``tokens``, except for the last one.

        The last token is always computed, because its logits are needed.
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

    def allocate(self) -> Page:
        """Return a page for one user; it takes the room of an idle one if none is free.

        Raises:
            IndexError: all pages are used.
        """
        if not self._free:
            if not self._idle:
                raise IndexError("all pages of the cache are used")
            self._discard(next(iter(self._idle)))
        index = self._free.pop()
        if index <= self._highest:
            self.reallocated.append(index)
        self._highest = max(self._highest, index)
        return Page(index=index, users=1)

    def share(self, page: Page) -> None:
        """Add a user to a page."""
        page.users += 1
        self._idle.pop(page, None)

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
                self._idle[page] = None
            else:
                self._unlist(page)
                self._free.append(page.index)

    def forget(self) -> None:
        """Make every page unfindable, because the weights have changed."""
        self.epoch += 1
        for page in list(self._idle):
            self._discard(page)
        for page in self._below(self._root):
            page.key, page.parent = None, None
        self._root.children.clear()

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
        del self._idle[page]
        self._unlist(page)
        self._free.append(page.index)

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
