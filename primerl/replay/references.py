"""References to recorded routes: where routes lie, and which files a reference may open.

    shm:FOLDER/NAME          a store in this host's shared memory
    file:/path/FOLDER/NAME   a store on a filesystem that hosts share
    http://HOST:PORT/NAME.CODE   a store that a server of another host serves
    inline:STORE/BASE64      routes so few that they travel within their reference

A reference comes from another process, so it opens nothing but what a store has written: NAME and
FOLDER are those of stores and of this user, neither is a link, and CODE shows that whoever made the
reference has the key, which is sent to nobody else.

An inline reference holds data and opens nothing, so it needs no key. STORE are the digits of its
store's folder; the content is little-endian, and the checksum is xxh3_64 of what follows it:

    checksum u64  start u64  tokens, decoder_layers, experts, k u16
    layers bits[decoder_layers]  versions i32[t]  ids[t, layers, k] i8 or i16

Nothing in it is compressed, so that the references of a batch are decoded together.
"""

import binascii
import functools
import hashlib
import hmac
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec
import numpy as np
import xxhash

from primerl._common.shared_folder import shared_memory
from primerl.replay.server import NAME
from primerl.replay.shapes import RouteShape, ordered_sets

KEY_VARIABLE = "PRIMERL_API_KEY"

_FOLDER = re.compile(r"primerl-\d+-(?:[A-Za-z0-9._-]+@)?routes-[0-9a-f]{16}")
_CODE_DIGITS = 32
_SERVED = re.compile(
    r"http://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})/(?P<name>[0-9a-f-]+)"
    rf"\.(?P<code>[0-9a-f]{{{_CODE_DIGITS}}})"
)


@attrs.frozen
class FilePlace:
    """A file of a store, on this host or a filesystem that it shares."""

    folder: Path
    name: str


@attrs.frozen
class ServedPlace:
    """A file that a server serves."""

    host: str
    port: int
    name: str
    key: str = attrs.field(repr=False)


def parse_reference(reference: str) -> FilePlace | ServedPlace:
    """What a reference refers to.

    Raises:
        ValueError: it is none of a store's, leads elsewhere, or no key is set that made it.
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
    raise ValueError(f"{reference!r:.200} is no reference to routes: shm:, file:/ or http://")


def file_reference(folder: Path, name: str) -> str:
    """The reference to a file of a store that hosts share, or, in shared memory, processes."""
    if folder.parent == shared_memory():
        return f"shm:{folder.name}/{name}"
    return f"file:{folder}/{name}"


def served_reference(address: str, name: str, key: str) -> str:
    """The reference to a file that the server at ``http://host:port`` serves."""
    return f"{address}/{name}.{_code(f'{address}/{name}', key)}"


def _code(address: str, key: str) -> str:
    return hmac.digest(key.encode(), f"routes {address}".encode(), hashlib.sha256).hex()[
        :_CODE_DIGITS
    ]


def _file_place(parent: Path, folder: str, name: str) -> FilePlace:
    if not _FOLDER.fullmatch(folder) or not NAME.fullmatch(name):
        raise ValueError(f"{f'{folder}/{name}'!r:.200} is no file of a store of routes")
    path = parent / folder
    try:
        found = path.lstat()
    except FileNotFoundError:
        return FilePlace(path, name)  # whoever opens it finds that it's gone
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{path} is no private folder of this user")
    return FilePlace(path, name)


def _served_place(reference: str) -> ServedPlace:
    found = _SERVED.fullmatch(reference)
    if found is None or not NAME.fullmatch(found["name"]) or int(found["port"]) > 65535:
        raise ValueError(f"{reference!r:.200} is no address of recorded routes")
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ValueError(f"set {KEY_VARIABLE} to the key of the server of routes")
    address = reference.rpartition(".")[0]
    if not hmac.compare_digest(_code(address, key), found["code"]):
        raise ValueError(
            f"{address} was not given out by a store with the key in {KEY_VARIABLE}; the key is "
            "not sent there"
        )
    return ServedPlace(found["host"].strip("[]"), int(found["port"]), found["name"], key)


# ---- routes within their reference ----

INLINE_BYTES = 1024
"""More routes get a file. Whatever its size, to write, read and remove one takes 0.5 ms; this many
bytes in a reference take 10 us, and are as many as those of a sample's tokens and logprobs."""

_KIND = "inline:"
_STORE = re.compile(r"[0-9a-f]{16}")
_CHECKSUM = struct.Struct("<Q")
_NUMBERS = struct.Struct("<QHHHH")
_HEAD = struct.Struct("<QQHHHH")
"""The checksum and the numbers."""
_VERSION = np.dtype("<i4")


class InlineRoutes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The parts of a reference."""

    store: str
    start: int
    end: int
    """The token after the last one."""
    layout: "_Layout"
    versions: np.ndarray
    """int32, of each token."""
    ids: bytes

    @property
    def shape(self) -> RouteShape:
        """The shape of the model's routes."""
        return self.layout.shape


@attrs.frozen(kw_only=True)
class _Layout:
    """How routes of a shape are written."""

    shape: RouteShape
    layer_bits: bytes
    id_dtype: np.dtype
    token_bytes: int


def is_inline(reference: str) -> bool:
    """Whether a reference is of this kind."""
    return reference.startswith(_KIND)


def fits_inline(tokens: int, shape: RouteShape) -> bool:
    """Whether the routes of so many tokens are few enough."""
    layout = _layout(shape)
    head_bytes = _HEAD.size + len(layout.layer_bits)
    return head_bytes + tokens * layout.token_bytes <= INLINE_BYTES


def inline_reference(
    rows: np.ndarray, *, start: int, versions: np.ndarray, shape: RouteShape, store: str
) -> str:
    """The reference that holds ``rows[t, layers, k]`` and ``versions[t]``.

    Raises:
        ValueError: rows are at fault; it names layer and token.
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
    """The parts of a reference.

    Raises:
        ValueError: it isn't one, or is cut off or damaged.
    """
    store, _, encoded = reference.removeprefix(_KIND).partition("/")
    if not _STORE.fullmatch(store):
        raise ValueError(f"{reference!r:.200} is no reference to routes: it names no store")
    try:
        content = binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError as error:  # binascii.Error is one
        raise ValueError(f"routes are cut off or damaged: {error}") from None
    if len(content) < _HEAD.size:
        raise ValueError(f"routes are cut off: {len(content)} bytes, fewer than {_HEAD.size}")
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
    """Rows and versions of references to routes of one model, those of all in a sequence.

    Returns:
        int16 ``[t, layers, k]``, each set in increasing order, and int32 ``[t]``.

    Raises:
        ValueError: they are of different models, or one has what is no set of experts. The message
            names layer and token, if there is but one.
    """
    layout = parts[0].layout
    if any(one.layout is not layout for one in parts):
        raise ValueError("routes are of different models")
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
def _layout(shape: RouteShape) -> _Layout:
    id_dtype = np.dtype(np.int8) if shape.experts <= 128 else np.dtype("<i2")
    bits = np.zeros(shape.decoder_layers, np.uint8)
    bits[list(shape.layers)] = 1
    return _Layout(
        shape=shape,
        layer_bits=np.packbits(bits).tobytes(),
        id_dtype=id_dtype,
        token_bytes=_VERSION.itemsize + len(shape.layers) * shape.k * id_dtype.itemsize,
    )


@functools.lru_cache(maxsize=64)
def _read_layout(decoder_layers: int, experts: int, k: int, layer_bits: bytes) -> _Layout:
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
