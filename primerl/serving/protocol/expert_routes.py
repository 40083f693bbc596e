"""Decoding of expert routes, which vLLM sends as a base64-encoded ``.npy`` file in JSON."""

import re
import time
from typing import Any, Literal, TypeAlias

import numpy as np
import pybase64

from primerl.rollout.engines.contract import BadCompletion

ROW_BYTES = 128 * 24 * 2  # bound on one token's routes: 128 layers, 24 experts, 2 bytes
HEADER_BYTES = 1 << 10  # bound on the header; numpy writes 128
PIECE = 1 << 18  # characters decoded at once: 0.03 ms in which no other thread runs
PAUSE_S = 1e-5  # with 0, a thread that waits for the interpreter's lock would mostly not get it

_MAGIC = b"\x93NUMPY\x01\x00"
# The header as numpy writes it. numpy's reader is not used, because it evaluates the header.
_HEADER = re.compile(
    rb"\{'descr': '(\|u1|<u2)', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)


def most_characters(most_rows: int) -> int:
    """Return the maximum number of base64 characters for the routes of ``most_rows`` tokens."""
    return (HEADER_BYTES + ROW_BYTES * most_rows) * 4 // 3 + 4


class RoutesDecoder:
    """Incremental decoder of routes into one array.

    ``feed`` and ``finish`` are called in threads, one call at a time. The header determines the
    size of the array, at most ``most_rows`` rows. The array takes up memory only as it is filled.

    Args:
        most_rows: the maximum number of tokens that the response may have routes of.
    """

    def __init__(self, *, most_rows: int) -> None:
        self._most_rows = most_rows
        self._characters = b""  # up to three that wait for the rest of a group of four
        self._padded = False
        self._start = bytearray()  # the header, until it is complete
        self._rows: np.ndarray | None = None
        self._content = np.empty(0, np.uint8)
        self._filled = 0

    def feed(self, characters: bytes) -> None:
        """Decode the next characters.

        Raises:
            BadCompletion: the characters are not base64, or not a file with routes that fit the
                request.
        """
        characters = self._characters + characters
        whole = len(characters) - len(characters) % 4
        for at in range(0, whole, PIECE):
            self._take(self._decode(characters[at : min(at + PIECE, whole)]))
            time.sleep(PAUSE_S)  # let the event loops' threads run
        self._characters = characters[whole:]

    def finish(self) -> np.ndarray:
        """Return the routes, uint8 or uint16[t, layers, k].

        Raises:
            BadCompletion: the routes are fewer than the header says.
        """
        if self._characters:
            raise BadCompletion(
                "the routed experts are not base64: their last characters are missing"
            )
        if self._rows is None:
            raise BadCompletion(
                f"the routed experts are not a .npy file: their {len(self._start)} bytes end "
                "within the header"
            )
        if self._filled < len(self._content):
            row = max(1, self._rows[:1].nbytes)
            raise BadCompletion(
                f"the routed experts have {self._filled} bytes, which end within row "
                f"{self._filled // row}; their header says {_describe(self._rows)}"
            )
        return self._rows

    def _decode(self, characters: bytes) -> bytes:
        if self._padded:
            raise BadCompletion("the routed experts are not base64: characters follow the padding")
        try:
            content: bytes = pybase64.b64decode(characters, validate=True)
        except ValueError as error:  # binascii.Error is a subclass
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
        # Most of the time is spent on first-touch page faults; numpy releases the interpreter's
        # lock meanwhile.
        np.copyto(self._content[self._filled : end], np.frombuffer(content, np.uint8))
        self._filled = end

    def _read_header(self) -> bytes:
        """Allocate the array once the header is complete; return the content after the header."""
        start = bytes(self._start)
        size = 10 + int.from_bytes(start[8:10], "little")
        if start[:8] != _MAGIC[: len(start)] or size > HEADER_BYTES:
            raise BadCompletion(
                "the routed experts are not a .npy file of version 1.0: its first bytes are "
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
            raise BadCompletion(
                f"{what}; the request allows routes of at most {self._most_rows} tokens"
            )
        if not 1 <= layers * k * dtype.itemsize <= ROW_BYTES:
            raise BadCompletion(f"{what}; expected 1 to {ROW_BYTES} bytes per token")
        return np.empty((count, layers, k), dtype)


def _describe(rows: np.ndarray) -> str:
    return f"{rows.dtype}{list(rows.shape)}"


# ---- extraction from the JSON response while it arrives: the routes are never parsed as JSON ----

KEY = b'"routed_experts"'
_SPACE = re.compile(rb"[ \t\r\n]*")
_BEFORE = b"\n"  # stands for the byte before a searched part, where that byte can't matter

_Part: TypeAlias = Literal["key", "colon", "value", "end", "mark"]
"""The part of the response that comes next; "mark" is the quotation mark after the value."""


class RoutesSplitter:
    """Incremental splitter of a response into the value of ``"routed_experts"`` and the rest.

    In the rest, ``""`` replaces the value. Chunks of the response may end anywhere. Values that are
    not strings, such as ``null``, stay in the rest. The splitter does not check the JSON: invalid
    JSON stays invalid, so the caller detects it when it decodes the rest.

    In JSON, a backslash precedes each quotation mark within a string. Therefore the key with both
    of its quotation marks, and no backslash before it, is a complete string.
    """

    def __init__(self) -> None:
        self.found = False
        """Whether the value's first quotation mark was read."""
        self._expected: _Part = "key"
        # The last bytes of the chunks searched so far. They may be the beginning of a key, with the
        # byte before it.
        self._before = _BEFORE

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Split the next chunk; return its bytes of the rest and its bytes of the value.

        Raises:
            BadCompletion: a second value begins in the chunk.
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
        """Return the index of the value's end, or of the chunk's end if the value is longer."""
        end = chunk.find(b'"', at)
        if end < 0:
            return len(chunk)
        self._expect("mark")
        return end

    def _outside(self, chunk: bytes, at: int) -> int:
        """Advance through the rest of the response from ``at``; return the index reached."""
        if self._expected == "key":
            return self._search(chunk, at)
        if self._expected == "mark":
            self._expect("key")
            return at + 1
        space = _SPACE.match(chunk, at)
        assert space is not None, "the pattern also matches the empty string"
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
        """Search for the key; return the index of its end, or of the chunk's end if not found."""
        # After a chunk's start the search copies nothing: there may be a key every few bytes.
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
