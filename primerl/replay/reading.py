"""Reading and discarding recorded routes by their references, from files and from servers."""

import concurrent.futures
import http.client
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from primerl.replay.codec import Span
from primerl.replay.recordings import READ_AT_ONCE, Reader, RecordedRoutes, read_recording
from primerl.replay.references import (
    KEY_VARIABLE,
    FilePlace,
    ServedPlace,
    decode_inline,
    is_inline,
    parse_inline,
    parse_reference,
)
from primerl.replay.server import open_member, remove
from primerl.types import Sample

_PIECE = 1 << 20
_AT_ONCE = 8  # requests
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def read(reference: str, *, span: Span | None = None, timeout_s: float = 60.0) -> RecordedRoutes:
    """Read the routes of the tokens ``span=(first, last + 1)``, clipped to those that it refers to.

    Only the bytes of these tokens are read, from a file or, with the key in ``PRIMERL_API_KEY``,
    from the server that the reference names.

    Raises:
        FileNotFoundError: they were discarded, or their store has ended.
        TimeoutError: the server took longer than ``timeout_s``.
        ValueError: they are damaged, or the reference is none of a store's.
        ConnectionError: the server can't be reached, or refuses.
    """
    if is_inline(reference):
        part = parse_inline(reference)
        rows, versions = decode_inline([part])
        found = RecordedRoutes(start=part.start, rows=rows, versions=versions)
        return found if span is None else found.within(span)
    place = parse_reference(reference)
    if isinstance(place, FilePlace):
        with opened(place) as (read_bytes, total):
            return read_recording(read_bytes, total=total, span=span)
    with _Connection(place, timeout_s=timeout_s) as connection:
        known, total = connection.start()
        return read_recording(connection.read, total=total, span=span, known=known)


def discard(samples: Iterable[Sample], *, timeout_s: float = 30.0) -> int:
    """Remove the routes that samples refer to, and return how many there were.

    Those that are missing already are no fault; inline ones are not anywhere else.

    Raises:
        TimeoutError: a server took longer than ``timeout_s``.
        ValueError: a reference is none of a store's.
        ConnectionError: a server can't be reached, or refuses.
    """
    references = {ref for sample in samples for ref in sample.routes if not is_inline(ref)}
    places = [parse_reference(reference) for reference in references]
    served = [place for place in places if isinstance(place, ServedPlace)]
    removed = sum(remove(p.folder, p.name) for p in places if isinstance(p, FilePlace))
    if not served:
        return removed
    deadline = time.monotonic() + timeout_s
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(served))) as pool:
        found = pool.map(lambda place: _delete(place, deadline), served)
        return removed + sum(found)


@contextmanager
def opened(place: FilePlace) -> Iterator[tuple[Reader, int]]:
    """A function that reads a range of a file's bytes, and the file's length.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        descriptor = open_member(place.folder, place.name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{place.folder / place.name}: these routes were discarded, or their store has ended"
        ) from None
    try:
        yield lambda begin, end: _read_file(descriptor, begin, end), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _read_file(descriptor: int, begin: int, end: int) -> bytes:
    found = os.pread(descriptor, end - begin, begin)
    if len(found) < end - begin:
        raise ValueError(f"routes are cut off: no more than {begin + len(found)} bytes")
    return found


def _delete(place: ServedPlace, deadline: float) -> bool:
    with _Connection(place, timeout_s=deadline - time.monotonic()) as connection:
        return connection.delete()


class _Connection:
    """A connection to a server of routes; all that it does ends within ``timeout_s``."""

    def __init__(self, place: ServedPlace, *, timeout_s: float) -> None:
        self._place = place
        self._deadline = time.monotonic() + timeout_s
        # Not by way of proxies, and no redirections: the key is for this server alone.
        self._http = http.client.HTTPConnection(place.host, place.port)
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *error: object) -> None:
        self._close_response()
        self._http.close()

    def start(self) -> tuple[bytes, int]:
        """The file's first bytes, and its length."""
        return self._get(0, READ_AT_ONCE)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to before ``end``."""
        found, _ = self._get(begin, end) if begin < end else (b"", 0)
        if len(found) != end - begin:
            raise ValueError(f"routes are cut off: no more than {begin + len(found)} bytes")
        return found

    def delete(self) -> bool:
        """Remove the file; returns whether it was there."""
        return self._request("DELETE", {}).status == http.client.NO_CONTENT

    def _get(self, begin: int, end: int) -> tuple[bytes, int]:
        response = self._request("GET", {"Range": f"bytes={begin}-{end - 1}"})
        if response.status == http.client.NOT_FOUND:
            raise FileNotFoundError(f"{self} has no such routes any more")
        found = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
        if response.status != http.client.PARTIAL_CONTENT or found is None:
            raise ValueError(f"{self} has no bytes from {begin} on: the routes are cut off")
        first, last, total = (int(number) for number in found.groups())
        if first != begin or not begin <= last < min(end, total):
            raise ValueError(f"{self} answered with bytes {first}-{last} of {total}")
        return self._body(response, last + 1 - first), total

    def _request(self, method: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        authorization = {"Authorization": f"Bearer {self._place.key}"}
        self._close_response()
        with self._one_wait():
            self._http.request(method, f"/{self._place.name}", headers=authorization | headers)
            response = self._response = self._http.getresponse()
        if response.status == http.client.UNAUTHORIZED:
            raise ConnectionRefusedError(f"{self} does not accept the key in {KEY_VARIABLE}")
        return response

    def _close_response(self) -> None:
        if self._response is not None:
            self._response.close()

    def _body(self, response: http.client.HTTPResponse, length: int) -> bytes:
        pieces = []
        while length:
            with self._one_wait():
                piece = response.read1(min(_PIECE, length))
            if not piece:
                raise ConnectionError(f"{self} closed the connection")
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    @contextmanager
    def _one_wait(self) -> Iterator[None]:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{self} took too long")
        self._http.timeout = remaining
        if self._http.sock is not None:
            self._http.sock.settimeout(remaining)
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"{self} took too long") from None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"the server of routes at {self._place.host}:{self._place.port}"
