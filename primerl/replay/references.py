"""References to recorded routes: their formats, checks of what they may open, and reading.

    shm:FOLDER/NAME              a store in this host's shared memory
    file:/path/FOLDER/NAME       a store on a filesystem that hosts share
    http://HOST:PORT/NAME.CODE   a store that another host serves
    inline:STORE/BASE64          a few routes, stored in the reference itself

A reference comes from another process, so it must not open anything but a store's files. NAME and
FOLDER must have the form of a store's names, FOLDER must belong to this user, and neither may be a
link. CODE proves that the reference was made with the server's key. The key is sent to no other
server.

An inline reference holds data and opens nothing, so it needs no key. STORE are the digits of its
store's folder. The content is little-endian, and the checksum is xxh3_64 of the bytes after it:

    checksum u64  start u64  tokens, decoder_layers, experts, k u16
    layers bits[decoder_layers]  versions i32[t]  ids[t, layers, k] i8 or i16

The content is not compressed, so that the references of a batch can be decoded together.
"""

import binascii
import concurrent.futures
import functools
import hashlib
import hmac
import http.client
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import msgspec
import numpy as np
import xxhash

from primerl._common.shared_folder import shared_memory
from primerl.replay.codec import Span
from primerl.replay.file_server import NAME, open_member, remove
from primerl.replay.recordings import READ_AT_ONCE, Reader, RecordedRoutes, read_recording
from primerl.replay.shapes import RouteShape, ordered_sets
from primerl.types import Sample

KEY_VARIABLE = "PRIMERL_API_KEY"

_FOLDER = re.compile(r"primerl-\d+-(?:[A-Za-z0-9._-]+@)?routes-[0-9a-f]{16}")
_CODE_DIGITS = 32
_SERVED = re.compile(
    r"http://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})/(?P<name>[0-9a-f-]+)"
    rf"\.(?P<code>[0-9a-f]{{{_CODE_DIGITS}}})"
)


@attrs.frozen
class FilePlace:
    """The location of a store's file on a filesystem of this host."""

    folder: Path
    name: str


@attrs.frozen
class ServedPlace:
    """The location of a store's file that a server serves, and the server's key."""

    host: str
    port: int
    name: str
    key: str = attrs.field(repr=False)


def parse_reference(reference: str) -> FilePlace | ServedPlace:
    """Parse and check a reference to a file, local or served.

    Raises:
        ValueError: it is not a reference of a store, leads out of the store's folder, or was not
            made with the key in ``PRIMERL_API_KEY``.
    """
    kind, _, rest = reference.partition(":")
    if kind == "shm":
        folder, _, name = rest.partition("/")
        return _file_place(shared_memory(), folder, name)
    if kind == "file" and rest.startswith("/"):
        path, _, name = rest.rpartition("/")
        parent, _, folder = path.rpartition("/")
        return _file_place(Path(parent or "/"), folder, name)
    if kind == "http":
        return _served_place(reference)
    raise ValueError(f"{reference!r:.200} is not a reference: expected shm:, file:/ or http://")


def file_reference(folder: Path, name: str) -> str:
    """Make the reference to a store's file, in shared memory or on a shared filesystem."""
    if folder.parent == shared_memory():
        return f"shm:{folder.name}/{name}"
    return f"file:{folder}/{name}"


def served_reference(address: str, name: str, key: str) -> str:
    """Make the reference to a file that the server at ``http://host:port`` serves."""
    return f"{address}/{name}.{_code(f'{address}/{name}', key)}"


def _code(address: str, key: str) -> str:
    return hmac.digest(key.encode(), f"routes {address}".encode(), hashlib.sha256).hex()[
        :_CODE_DIGITS
    ]


def _file_place(parent: Path, folder: str, name: str) -> FilePlace:
    if not _FOLDER.fullmatch(folder) or not NAME.fullmatch(name):
        raise ValueError(f"{f'{folder}/{name}'!r:.200} is not a file of a store of routes")
    path = parent / folder
    try:
        found = path.lstat()
    except FileNotFoundError:
        return FilePlace(path, name)  # opening it reports that it is missing
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{path} is not a private folder of this user")
    return FilePlace(path, name)


def _served_place(reference: str) -> ServedPlace:
    found = _SERVED.fullmatch(reference)
    if found is None or not NAME.fullmatch(found["name"]) or int(found["port"]) > 65535:
        raise ValueError(f"{reference!r:.200} is not an address of recorded routes")
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ValueError(
            f"the routes are on a server that requires a key; set {KEY_VARIABLE} to its key"
        )
    address = reference.rpartition(".")[0]
    if not hmac.compare_digest(_code(address, key), found["code"]):
        raise ValueError(
            f"{address} was not made by a store with the key in {KEY_VARIABLE}, so the key is not "
            "sent there; set the same key in all processes"
        )
    return ServedPlace(found["host"].strip("[]"), int(found["port"]), found["name"], key)


# ---- inline references ----

INLINE_BYTES = 1024
"""The largest content of an inline reference; larger routes get a file.

Writing, reading and removing a file takes 0.5 ms, whatever its size. A reference with this many
bytes takes 10 us, and is about as large as a sample's tokens and logprobs.
"""

_KIND = "inline:"
_STORE = re.compile(r"[0-9a-f]{16}")
_CHECKSUM = struct.Struct("<Q")
_NUMBERS = struct.Struct("<QHHHH")
_HEAD = struct.Struct("<QQHHHH")
"""The checksum, then the fields of ``_NUMBERS``."""
_VERSION = np.dtype("<i4")


class InlineRoutes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The parsed content of an inline reference."""

    store: str
    start: int
    end: int
    """The index after the last token."""
    layout: "_RouteFormat"
    versions: np.ndarray
    """The policy version of each token, int32."""
    ids: bytes

    @property
    def shape(self) -> RouteShape:
        """The shape of the model's expert routes."""
        return self.layout.shape


@attrs.frozen(kw_only=True)
class _RouteFormat:
    """The binary layout of inline routes of one shape."""

    shape: RouteShape
    layer_bits: bytes
    id_dtype: np.dtype
    token_bytes: int


def is_inline(reference: str) -> bool:
    """Check whether a reference is inline."""
    return reference.startswith(_KIND)


def fits_inline(tokens: int, shape: RouteShape) -> bool:
    """Check whether the routes of so many tokens fit into an inline reference."""
    layout = _layout(shape)
    head_bytes = _HEAD.size + len(layout.layer_bits)
    return head_bytes + tokens * layout.token_bytes <= INLINE_BYTES


def inline_reference(
    rows: np.ndarray, *, start: int, versions: np.ndarray, shape: RouteShape, store: str
) -> str:
    """Make the reference that holds ``rows[t, layers, k]`` and ``versions[t]``.

    Raises:
        ValueError: rows are invalid; the message names layer and token.
    """
    ids = ordered_sets(rows, experts=shape.experts, first_token=start, layers=shape.layers)
    layout = _layout(shape)
    content = b"".join(
        [
            _NUMBERS.pack(start, len(rows), shape.decoder_layers, shape.experts, shape.k),
            layout.layer_bits,
            versions.astype(_VERSION).tobytes(),
            ids.astype(layout.id_dtype).tobytes(),
        ]
    )
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))
    return f"{_KIND}{store}/{binascii.b2a_base64(checksum + content, newline=False).decode()}"


def parse_inline(reference: str) -> InlineRoutes:
    """Parse an inline reference.

    Raises:
        ValueError: it is not an inline reference, or is cut off or damaged.
    """
    store, _, encoded = reference.removeprefix(_KIND).partition("/")
    if not _STORE.fullmatch(store):
        raise ValueError(f"{reference!r:.200} is not a reference to routes: it names no store")
    try:
        content = binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError as error:  # binascii.Error is one
        raise ValueError(f"routes are cut off or damaged: {error}") from None
    if len(content) < _HEAD.size:
        raise ValueError(f"routes are cut off: {len(content)} bytes, less than {_HEAD.size}")
    checksum, start, tokens, decoder_layers, experts, k = _HEAD.unpack_from(content)
    if xxhash.xxh3_64_intdigest(content[_CHECKSUM.size :]) != checksum:
        raise ValueError("routes are cut off or damaged: their checksum is wrong")
    versions_at = _HEAD.size + -(-decoder_layers // 8)
    layout = _read_layout(decoder_layers, experts, k, content[_HEAD.size : versions_at])
    ids_at = versions_at + tokens * _VERSION.itemsize
    total = versions_at + tokens * layout.token_bytes
    if len(content) != total:
        raise ValueError(
            f"routes are damaged: {len(content)} bytes, expected {total} for {tokens} tokens from "
            f"token {start} on"
        )
    return InlineRoutes(
        store=store,
        start=start,
        end=start + tokens,
        layout=layout,
        versions=np.frombuffer(content, _VERSION, tokens, versions_at),
        ids=content[ids_at:],
    )


def decode_inline(parts: Sequence[InlineRoutes]) -> tuple[np.ndarray, np.ndarray]:
    """Decode the concatenated rows and versions of inline routes of one model.

    Returns:
        Rows, int16 ``[t, layers, k]``, each set in increasing order, and versions, int32 ``[t]``.

    Raises:
        ValueError: they are of different models, or have an invalid set of experts. The message
            names its layer and token, which is right only if ``parts`` has one entry.
    """
    layout = parts[0].layout
    if any(one.layout is not layout for one in parts):
        raise ValueError("routes are of different models; expected those of one model")
    shape = layout.shape
    ids = np.frombuffer(b"".join([one.ids for one in parts]), layout.id_dtype)
    rows = ordered_sets(
        ids.reshape(-1, len(shape.layers), shape.k),
        experts=shape.experts,
        first_token=parts[0].start,
        layers=shape.layers,
    )
    versions = np.concatenate([one.versions for one in parts]).astype(np.int32)
    if versions.min(initial=0) < 0:
        raise ValueError(f"routes from token {parts[0].start} on have a negative version")
    return rows, versions


@functools.lru_cache(maxsize=64)
def _layout(shape: RouteShape) -> _RouteFormat:
    id_dtype = np.dtype(np.int8) if shape.experts <= 128 else np.dtype("<i2")
    bits = np.zeros(shape.decoder_layers, np.uint8)
    bits[list(shape.layers)] = 1
    return _RouteFormat(
        shape=shape,
        layer_bits=np.packbits(bits).tobytes(),
        id_dtype=id_dtype,
        token_bytes=_VERSION.itemsize + len(shape.layers) * shape.k * id_dtype.itemsize,
    )


@functools.lru_cache(maxsize=64)
def _read_layout(decoder_layers: int, experts: int, k: int, layer_bits: bytes) -> _RouteFormat:
    bits = np.unpackbits(np.frombuffer(layer_bits, np.uint8))[:decoder_layers]
    try:
        shape = RouteShape(
            layers=np.flatnonzero(bits).tolist(),
            decoder_layers=decoder_layers,
            experts=experts,
            k=k,
        )
    except ValueError as error:
        raise ValueError(f"routes are damaged: {error}") from None
    return _layout(shape)


# ---- reading and discarding routes by their references ----

_PIECE = 1 << 20
_AT_ONCE = 8  # concurrent requests
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def read(reference: str, *, span: Span | None = None, timeout_s: float = 60.0) -> RecordedRoutes:
    """Read the routes that a reference has of the tokens ``span=(first, last + 1)``; None for all.

    Only the bytes of these tokens are read, from a file or, with the key in ``PRIMERL_API_KEY``,
    from the server that the reference names.

    Raises:
        FileNotFoundError: the routes were discarded, or their store was closed.
        TimeoutError: the server took longer than ``timeout_s``.
        ValueError: the routes are damaged, or the reference is not a store's.
        ConnectionError: the server can't be reached, or refuses the request.
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
    with _RouteConnection(place, timeout_s=timeout_s) as connection:
        known, total = connection.start()
        return read_recording(connection.read, total=total, span=span, known=known)


def discard(samples: Iterable[Sample], *, timeout_s: float = 30.0) -> int:
    """Remove the routes that samples refer to, and return how many were removed.

    Missing routes are ignored, and so are inline ones, which exist only in their references.

    Raises:
        TimeoutError: a server took longer than ``timeout_s``.
        ValueError: a reference is not a store's.
        ConnectionError: a server can't be reached, or refuses the request.
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
    """Open a store's file; yield a function that reads a byte range, and the file's length.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        descriptor = open_member(place.folder, place.name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{place.folder / place.name}: these routes were discarded, or their store was closed"
        ) from None
    try:
        yield lambda begin, end: _read_file(descriptor, begin, end), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _read_file(descriptor: int, begin: int, end: int) -> bytes:
    found = os.pread(descriptor, end - begin, begin)
    if len(found) < end - begin:
        raise ValueError(f"routes are cut off: the file ends after {begin + len(found)} bytes")
    return found


def _delete(place: ServedPlace, deadline: float) -> bool:
    with _RouteConnection(place, timeout_s=deadline - time.monotonic()) as connection:
        return connection.delete()


class _RouteConnection:
    """A connection to a server of routes; ``timeout_s`` is for all of its requests together."""

    def __init__(self, place: ServedPlace, *, timeout_s: float) -> None:
        self._place = place
        self._deadline = time.monotonic() + timeout_s
        # http.client uses no proxies and follows no redirects, so only this server gets the key.
        self._http = http.client.HTTPConnection(place.host, place.port)
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> "_RouteConnection":
        return self

    def __exit__(self, *error: object) -> None:
        self._close_response()
        self._http.close()

    def start(self) -> tuple[bytes, int]:
        """Read the file's first bytes; return them and the file's length."""
        return self._get(0, READ_AT_ONCE)

    def read(self, begin: int, end: int) -> bytes:
        """Read the bytes from ``begin`` to before ``end``."""
        found, _ = self._get(begin, end) if begin < end else (b"", 0)
        if len(found) != end - begin:
            raise ValueError(f"routes are cut off: the file ends after {begin + len(found)} bytes")
        return found

    def delete(self) -> bool:
        """Remove the file; return whether it existed."""
        return self._request("DELETE", {}).status == http.client.NO_CONTENT

    def _get(self, begin: int, end: int) -> tuple[bytes, int]:
        response = self._request("GET", {"Range": f"bytes={begin}-{end - 1}"})
        if response.status == http.client.NOT_FOUND:
            raise FileNotFoundError(
                f"{self} no longer has these routes: they were discarded or removed"
            )
        found = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
        if response.status != http.client.PARTIAL_CONTENT or found is None:
            raise ValueError(f"{self} sent no bytes from {begin} on: the routes are cut off")
        first, last, total = (int(number) for number in found.groups())
        if first != begin or not begin <= last < min(end, total):
            raise ValueError(f"{self} sent other bytes than requested: {first}-{last} of {total}")
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
            raise TimeoutError(f"{self} did not answer in time")
        self._http.timeout = remaining
        if self._http.sock is not None:
            self._http.sock.settimeout(remaining)
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"{self} did not answer in time") from None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"the server of routes at {self._place.host}:{self._place.port}"
