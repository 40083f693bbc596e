"""Expert routes as vLLM sends them, base64 of a ``.npy`` file within a response of JSON."""

import re
import time
from typing import Any, Literal, TypeAlias

import numpy as np
import pybase64

from primerl.rollout.engines.contract import BadCompletion

ROW_BYTES = 128 * 24 * 2  # the most of one token: 128 layers of 24 experts
HEADER_BYTES = 1 << 10  # numpy writes 128
PIECE = 1 << 18  # characters decoded at once: 0.03 ms in which no other thread runs
PAUSE_S = 1e-5  # with 0, a thread that waits for the interpreter would mostly wake too late

_MAGIC = b"\x93NUMPY\x01\x00"
# As numpy writes it. Its own reader evaluates what it reads.
_HEADER = re.compile(
    rb"\{'descr': '(\|u1|<u2)', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)


def most_characters(most_rows: int) -> int:
    """The most characters of the routes of ``most_rows`` tokens."""
    return (HEADER_BYTES + ROW_BYTES * most_rows) * 4 // 3 + 4


class RoutesDecoder:
    """Decodes routes in parts, into one array.

    ``feed`` and ``finish`` are called in threads, one at a time. The array has the size that the
    header says, at most that of ``most_rows`` rows, and takes memory as it is filled.

    Args:
        most_rows: tokens that the request may have routes of.
    """

    def __init__(self, *, most_rows: int) -> None:
        self._most_rows = most_rows
        self._characters = b""  # less than four, which are three bytes
        self._padded = False
        self._start = bytearray()  # the header, until it is complete
        self._rows: np.ndarray | None = None
        self._content = np.empty(0, np.uint8)
        self._filled = 0

    def feed(self, characters: bytes) -> None:
        """Decode the next characters.

        Raises:
            BadCompletion: they are not base64, or not of a file with routes of this request.
        """
        characters = self._characters + characters
        whole = len(characters) - len(characters) % 4
        for at in range(0, whole, PIECE):
            self._take(self._decode(characters[at : min(at + PIECE, whole)]))
            time.sleep(PAUSE_S)  # lets the event loops run
        self._characters = characters[whole:]

    def finish(self) -> np.ndarray:
        """The routes, uint8 or uint16[t, layers, k].

        Raises:
            BadCompletion: there are fewer than the header says.
        """
        if self._characters:
            raise BadCompletion(
                "the routed experts are not base64: their last characters are missing"
            )
        if self._rows is None:
            raise BadCompletion(
                f"the routed experts are not a .npy file: its {len(self._start)} bytes end within "
                "the header"
            )
        if self._filled < len(self._content):
            row = max(1, self._rows[:1].nbytes)
            raise BadCompletion(
                f"the routed experts have {self._filled} bytes, which end within row "
                f"{self._filled // row}, and their header says {_describe(self._rows)}"
            )
        return self._rows

    def _decode(self, characters: bytes) -> bytes:
        if self._padded:
            raise BadCompletion("the routed experts are not base64: characters follow the padding")
        try:
            content: bytes = pybase64.b64decode(characters, validate=True)
        except ValueError as error:  # binascii.Error is one
            raise BadCompletion(f"the routed experts are not base64: {error}") from error
        self._padded = characters.endswith(b"=")
        return content

    def _take(self, content: bytes) -> None:
        if self._rows is None:
            self._start += content
            content = self._read_header()
        if self._rows is None or not content:
            return
        end = self._filled + len(content)
        if end > len(self._content):
            raise BadCompletion(
                f"the routed experts have more bytes than {_describe(self._rows)}, which their "
                "header says"
            )
        # Most of the time goes to memory that is touched first, and numpy lets other threads run.
        np.copyto(self._content[self._filled : end], np.frombuffer(content, np.uint8))
        self._filled = end

    def _read_header(self) -> bytes:
        """Make the array, once the header is complete; returns the content after it."""
        start = bytes(self._start)
        size = 10 + int.from_bytes(start[8:10], "little")
        if start[:8] != _MAGIC[: len(start)] or size > HEADER_BYTES:
            raise BadCompletion(
                "the routed experts are not a .npy file of version 1.0: they begin with "
                f"{start[:10]!r}"
            )
        if len(start) < max(size, 10):
            return b""
        header = _HEADER.fullmatch(start[10:size])
        if header is None:
            raise BadCompletion(
                f"the routed experts have the header {start[10:size].strip()!r:.200}; expected "
                "uint8 or uint16[tokens, layers, experts of a token]"
            )
        shape = [int(number) for number in header.groups()[1:]]
        self._rows = self._allocate(np.dtype(header[1].decode()), *shape)
        self._content = self._rows.reshape(-1).view(np.uint8)
        self._start.clear()
        return start[size:]

    def _allocate(self, dtype: np.dtype[Any], count: int, layers: int, k: int) -> np.ndarray:
        what = f"the routed experts are {dtype}[{count}, {layers}, {k}]"
        if count > self._most_rows:
            raise BadCompletion(f"{what}; the request allows routes of {self._most_rows} tokens")
        if not 1 <= layers * k * dtype.itemsize <= ROW_BYTES:
            raise BadCompletion(f"{what}; expected 1 to {ROW_BYTES} bytes of a token")
        return np.empty((count, layers, k), dtype)


def _describe(rows: np.ndarray) -> str:
    return f"{rows.dtype}{list(rows.shape)}"


# ---- out of JSON, as it arrives, so that it is never decoded as JSON ----

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
