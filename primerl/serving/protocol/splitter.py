"""Takes a long string out of JSON as it arrives, so that it is never decoded as JSON."""

import re
from typing import Literal, TypeAlias

from primerl.rollout.engines.contract import BadCompletion

KEY = b'"routed_experts"'
_SPACE = re.compile(rb"[ \t\r\n]*")
_BEFORE = b"\n"  # what precedes a part that is searched, where it can't matter

_Part: TypeAlias = Literal["key", "colon", "value", "end", "mark"]
"""What comes next; the mark is the quotation mark at the end of the value."""


class RoutesSplitter:
    """Splits a response into the value of ``"routed_experts"``, and the JSON around it.

    The value is replaced by ``""``, wherever the chunks of the response end. Other values than
    strings, such as ``null``, stay. What is not JSON stays as invalid as it was: the rest has to be
    decoded.

    In JSON a quotation mark within a string follows a backslash, so the key with both of its
    marks, and no backslash before it, is a string of its own.
    """

    def __init__(self) -> None:
        self.found = False
        """Whether the value has begun."""
        self._expected: _Part = "key"
        # The end of what was searched: the byte before a key, and the part of it that is there.
        self._before = _BEFORE

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """What a chunk has of the rest, and of the value.

        Raises:
            BadCompletion: it begins another value.
        """
        rest: list[bytes] = []
        value: list[bytes] = []
        at = 0
        while at < len(chunk):
            if self._expected == "end":
                end = self._end(chunk, at)
                value.append(chunk[at:end])
            else:
                end = self._outside(chunk, at)
                rest.append(chunk[at:end])
            at = end
        return b"".join(rest), b"".join(value)

    def _end(self, chunk: bytes, at: int) -> int:
        """The end of the value, or of the chunk."""
        end = chunk.find(b'"', at)
        if end < 0:
            return len(chunk)
        self._expect("mark")
        return end

    def _outside(self, chunk: bytes, at: int) -> int:
        """Go on from ``at``, where no value is; returns up to where."""
        if self._expected == "key":
            return self._search(chunk, at)
        if self._expected == "mark":
            self._expect("key")
            return at + 1
        space = _SPACE.match(chunk, at)
        assert space is not None, "it matches nothing, too"
        at = space.end()
        if at == len(chunk):
            return at
        if self._expected == "colon" and chunk[at : at + 1] == b":":
            self._expect("value")
            return at + 1
        if self._expected == "value" and chunk[at : at + 1] == b'"':
            if self.found:
                raise BadCompletion("the response has routed_experts more than once")
            self.found = True
            self._expect("end")
            return at + 1
        self._expect("key")
        return at

    def _search(self, chunk: bytes, at: int) -> int:
        """Search the key; returns its end, or that of the chunk."""
        # Within a chunk without a copy: there may be a key every few bytes.
        searched, begin = (chunk, at) if at > 0 else (self._before + chunk, 1)
        found = searched.find(KEY, begin)
        while found > 0 and searched[found - 1 : found] == b"\\":
            found = searched.find(KEY, found + 1)
        if found < 0:
            self._before = searched[max(begin - 1, len(searched) - len(KEY)) :]
            return len(chunk)
        self._expect("colon")
        return found + len(KEY) - (len(searched) - len(chunk))

    def _expect(self, what: _Part) -> None:
        self._expected = what
        self._before = _BEFORE
