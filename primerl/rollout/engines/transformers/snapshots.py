"""Bookkeeping of recurrent states: which row each request has, and which rows are snapshots.

A snapshot is the state after the first tokens of a request. It is found by the page that holds the
last of these tokens, so requests that begin alike go on from it. After an update, its page can't
be found. The least recently used snapshot is discarded first. This module needs no torch.
"""

from collections import OrderedDict

import attrs

from primerl.rollout.engines.transformers.pages import PAGE_TOKENS, Page, Prefix

# Mixers compute a prompt in segments of this many tokens, counted from the prompt's first, so that
# their rounding does not depend on the steps into which the scheduler divides the prompt.
SEGMENT_TOKENS = 512


@attrs.frozen(eq=False)
class StateSnapshot:
    """The state after all tokens of the pages before ``page``, and ``tokens`` of ``page``."""

    row: int
    page: Page
    tokens: int


class StateRows:
    """The rows of a ``StateTable``.

    Args:
        rows: how many there are; more than requests run at a time.
    """

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows - 1, -1, -1))
        self._snapshots: OrderedDict[Page, StateSnapshot] = OrderedDict()
        self.copies: list[tuple[int, int]] = []
        """Rows to be copied before the next forward pass, in order: ``(source, target)``."""

    def take(self) -> int:
        """Return a row for a request; it is that of a snapshot if none is free."""
        if not self._free:
            _, oldest = self._snapshots.popitem(last=False)
            self._free.append(oldest.row)
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Free a request's row."""
        self._free.append(row)

    def resume(self, snapshot: StateSnapshot) -> int:
        """Return a row for a request that begins with the state of a snapshot."""
        self._snapshots.move_to_end(snapshot.page)
        row = self.take()
        if row != snapshot.row:  # else there is no other row, and the snapshot gives up its own
            self.copies.append((snapshot.row, row))
        return row

    def keep_copy(self, row: int, page: Page, tokens: int) -> None:
        """Copy a request's row to a snapshot."""
        known = self._snapshots.get(page)
        if known is None or known.tokens < tokens:
            copied = self.take()
            self.copies.append((row, copied))
            self.keep(copied, page, tokens)

    def keep(self, row: int, page: Page, tokens: int) -> None:
        """Make a row a snapshot; it replaces one of fewer tokens of the same page."""
        known = self._snapshots.get(page)
        if known is not None and known.tokens >= tokens:
            self._free.append(row)
            return
        if known is not None:
            self._free.append(known.row)
        self._snapshots[page] = StateSnapshot(row, page, tokens)
        self._snapshots.move_to_end(page)

    def find(self, prefix: Prefix, prompt_length: int) -> tuple[Prefix, StateSnapshot | None]:
        """Return the part of ``prefix`` up to its last token with a snapshot, and the snapshot.

        The prefix is pending if another request is about to compute the prompt's own snapshot.
        """
        awaited = snapshot_point(prompt_length) // PAGE_TOKENS
        begun = all(page.computed == PAGE_TOKENS for page in prefix.pages)
        if not begun or (prefix.pending and len(prefix.pages) < awaited):
            return Prefix(prefix.pages, pending=True), None
        if prefix.partial is not None:
            found = self._snapshots.get(prefix.partial)
            if found is not None and found.tokens <= prefix.tokens:
                return Prefix(prefix.pages, partial=prefix.partial, tokens=found.tokens), found
        for end in range(len(prefix.pages), 0, -1):
            found = self._snapshots.get(prefix.pages[end - 1])
            if found is not None and found.tokens == PAGE_TOKENS:
                return Prefix(prefix.pages[:end]), found
        return Prefix([]), None


def next_cut(computed: int, tokens: int, prompt_length: int) -> int:
    """Return where the segment ends that begins after ``computed`` of a request's tokens.

    It ends at a multiple of ``SEGMENT_TOKENS``, at the prompt's last page end, where a snapshot is
    kept, or after all tokens.
    """
    cut = snapshot_point(prompt_length)
    end = min(tokens, (computed // SEGMENT_TOKENS + 1) * SEGMENT_TOKENS)
    return cut if computed < cut < end else end


def snapshot_point(prompt_length: int) -> int:
    """Return how many of a prompt's tokens have a snapshot that requests with this prompt share."""
    return (prompt_length - 1) // PAGE_TOKENS * PAGE_TOKENS
