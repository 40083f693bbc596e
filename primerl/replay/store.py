"""Where expert routes lie between sampler and trainer: files, of which each reference is a name."""

import contextlib
import errno
import operator
import os
import re
import secrets
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import attrs
import numpy as np

from primerl._common.shared_folder import SharedFolder
from primerl.replay.recordings import (
    RecordingHead,
    content_digest,
    read_recording_head,
    recording_parts,
)
from primerl.replay.references import (
    KEY_VARIABLE,
    FilePlace,
    InlineRoutes,
    decode_inline,
    file_reference,
    fits_inline,
    inline_reference,
    is_inline,
    opened,
    parse_inline,
    served_reference,
)
from primerl.replay.server import NAME, content_path
from primerl.replay.shapes import RouteShape
from primerl.replay.span_server import SpanServer
from primerl.types import Sample

_UNKNOWN = -1


class BadRoutes(ValueError):
    """A sample's routes are missing, damaged, of another model or incomplete."""


class Store:
    """Expert routes of samples that wait for their training step.

        with Store(shape) as store:
            references = store.put(rows, start=0, versions=versions, shared=prompt_tokens)

    By default they lie in this host's shared memory, so that its processes can read them. The
    routes of a few tokens of a small model, up to ``INLINE_BYTES``, travel within their references
    instead. What was not discarded is removed when the store is closed or, if its process is
    killed, when this host's next store is opened.

    A copy, as pickling makes it for the rollout worker's process, can put and check while the store
    is open. Copies, and all methods, can be used by several threads.

    Args:
        shape: of the model's routes.
        folder: on a filesystem that hosts share, a folder to lie in instead of shared memory.
        max_bytes: if more lie in it, the oldest are removed; they are of rollouts that were
            dropped. By default half of what is free when the store is opened.
        host: serve the routes to other hosts over HTTP, on this interface: ``"127.0.0.1"``, or
            ``"0.0.0.0"`` for all. The key is ``PRIMERL_API_KEY``, which all readers need; it
            travels unencrypted.
        port: of the server; any free one by default.

    Raises:
        ValueError: there is no such folder, or no key to serve with.
    """

    def __init__(
        self,
        shape: RouteShape,
        *,
        folder: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        host: str | None = None,
        port: int = 0,
    ) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder; expected one that exists")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, expected at least 1")
        self._key = os.environ.get(KEY_VARIABLE, "") if host is not None else ""
        if host is not None and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise ValueError(f"set {KEY_VARIABLE} to the key that readers of routes will send")
        self.shape = shape
        self._within = None if folder is None else Path(folder).resolve()
        self._max_bytes = max_bytes
        self._host = host
        self._port = port
        self._path: Path | None = None
        self._address: str | None = None
        self._own: contextlib.ExitStack | None = None
        self._eviction = Eviction()

    def __enter__(self) -> "Store":
        if self._path is not None:
            return self  # a copy
        with contextlib.ExitStack() as stack:
            name = f"routes-{secrets.token_hex(8)}"
            try:
                shared = SharedFolder(name, within=self._within)
            except OSError as error:
                raise RuntimeError(f"no store of routes can be opened: {error}") from None
            stack.callback(shared.close)
            if self._max_bytes is None:
                self._max_bytes = max(1, shutil.disk_usage(shared.path).free // 2)
            if self._host is not None:
                server = SpanServer(shared.path, host=self._host, port=self._port, key=self._key)
                self._address = stack.enter_context(server).address
            self._path = shared.path
            self._own = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove all routes, and end the server; a copy does nothing."""
        if self._own is not None:
            self._own.close()
            self._own = None
            self._path = None

    def put(
        self, rows: np.ndarray, *, start: SupportsIndex, versions: np.ndarray, shared: int = 0
    ) -> tuple[str, ...]:
        """Store routes of successive tokens; returns references for ``Sample.routes``.

        Args:
            rows: integers ``[t, layers, k]``, or ``[t, decoder_layers, k]``, of which those of
                layers with experts are stored; -1 in all k places where nothing was recorded.
            start: the token of row 0.
            versions: integers ``[t]``: the policy version of each row.
            shared: the first rows that other rollouts may have too, those of a prompt: however
                many put them, they are stored once.

        Raises:
            ValueError: these are no routes of this shape; the message names layer and token.
            RuntimeError: the store is not open, or there is no space for them.
        """
        folder = self._open_path()
        start = operator.index(start)
        rows, versions = self._checked(rows, start=start, versions=versions, shared=shared)
        bounds = [0, shared, len(rows)]
        if fits_inline(len(rows), self.shape):
            bounds = [0, len(rows)]
        return tuple(
            self._put_part(
                folder,
                rows[first:last],
                start=start + first,
                versions=versions[first:last],
                shared=last <= shared,
            )
            for first, last in pairwise(bounds)
            if first < last
        )

    def is_instant(self, tokens: int) -> bool:
        """Whether routes of so many tokens are put and checked without waiting for a file."""
        return fits_inline(tokens, self.shape)

    def check(self, sample: Sample) -> None:
        """Check that a sample has the routes that training needs; only heads of files are read.

        Raises:
            BadRoutes: there are none; some are missing, damaged, of another model or another
                store, or of tokens that the sample lacks; or the row before a token to be trained,
                which led to it, is in none of them, or of another version than the token: those
                of another request mostly are.
        """
        if not sample.routes:
            raise BadRoutes("the sample has no routes; does the engine record them?")
        tokens = len(sample.token_ids)
        versions = np.full(tokens, _UNKNOWN)  # of each token's row, the first that was recorded
        for reference in sample.routes:
            head = self._head(reference)
            if head.end > tokens:
                raise BadRoutes(
                    f"{reference!r:.200} has routes of tokens {head.start} to {head.end - 1}, but "
                    f"the sample has {tokens} tokens"
                )
            part = versions[head.start : head.end]
            np.copyto(part, head.versions, where=part == _UNKNOWN)
        wrong = np.flatnonzero(sample.loss_mask[1:] & (versions[:-1] != sample.versions[1:]))
        if not len(wrong):
            return
        token = int(wrong[0])
        if versions[token] == _UNKNOWN:
            raise BadRoutes(
                f"token {token + 1} is to be trained, but none of the sample's routes has token "
                f"{token}, which led to it ({len(wrong)} tokens have no routes or others')"
            )
        raise BadRoutes(
            f"token {token + 1} was sampled by version {sample.versions[token + 1]}, but the "
            f"routes of token {token}, which led to it, are of version {versions[token]}: they are "
            f"those of another request ({len(wrong)} tokens have no routes or others')"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._path is None:
            raise RuntimeError("the store is not open; copies are made within its `with`")
        return self.__dict__ | {"_own": None, "_eviction": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._eviction = Eviction()

    def __repr__(self) -> str:
        return f"Store({self.shape!r}, {self._address or self._path or 'not open'})"

    def _open_path(self) -> Path:
        if self._path is None:
            raise RuntimeError("the store of routes is not open; use it within its `with`")
        return self._path

    def _reference(self, folder: Path, name: str) -> str:
        if self._address is not None:
            return served_reference(self._address, name, self._key)
        return file_reference(folder, name)

    def _put_part(
        self, folder: Path, rows: np.ndarray, *, start: int, versions: np.ndarray, shared: bool
    ) -> str:
        if fits_inline(len(rows), self.shape):
            return inline_reference(
                rows, start=start, versions=versions, shape=self.shape, store=_digits(folder)
            )
        if shared:
            return self._reference(folder, self._put_shared(folder, rows, start, versions))
        name = secrets.token_hex(16)
        self._write(folder / name, self._recording(rows, start, versions))
        return self._reference(folder, name)

    def _put_shared(self, folder: Path, rows: np.ndarray, start: int, versions: np.ndarray) -> str:
        digest = content_digest(rows, start=start, versions=versions, shape=self.shape)
        content = content_path(folder, digest)
        name = f"{digest}-{secrets.token_hex(16)}"
        if not _link(content, folder / name):
            self._write(folder / name, self._recording(rows, start, versions))
            _share(folder / name, content)
        return name

    def _recording(self, rows: np.ndarray, start: int, versions: np.ndarray) -> list[bytes]:
        return recording_parts(rows, start=start, versions=versions, shape=self.shape)

    def _head(self, reference: str) -> RecordingHead | InlineRoutes:
        """What a reference says of its routes; those that it holds itself are checked too."""
        folder = self._open_path()
        head: RecordingHead | InlineRoutes
        try:
            if is_inline(reference):
                head = self._inline_head(folder, reference)
            else:
                head = self._file_head(folder, reference)
        except ValueError as error:
            raise BadRoutes(f"{reference!r:.200}: {error}") from None
        if head.shape != self.shape:
            raise BadRoutes(
                f"{reference!r:.200}: routes of tokens {head.start} to {head.end - 1} are of "
                f"another model: {_difference(head.shape, self.shape)}"
            )
        return head

    def _inline_head(self, folder: Path, reference: str) -> InlineRoutes:
        found = parse_inline(reference)
        if found.store != _digits(folder):
            raise ValueError("it is none of this store's references")
        decode_inline([found])
        return found

    def _file_head(self, folder: Path, reference: str) -> RecordingHead:
        name = reference.rpartition("/")[2].partition(".")[0]
        if not NAME.fullmatch(name) or self._reference(folder, name) != reference:
            raise ValueError("it is none of this store's references")
        try:
            with opened(FilePlace(folder, name)) as (read, total):
                return read_recording_head(read, total=total)
        except FileNotFoundError:
            raise ValueError("it was discarded, or removed to make room") from None

    def _checked(
        self, rows: np.ndarray, *, start: int, versions: np.ndarray, shared: int
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = self.shape
        tokens = len(rows) if rows.ndim == 3 else -1
        depths = (len(shape.layers), shape.decoder_layers)
        if tokens < 0 or rows.dtype.kind not in "iu" or rows.shape[1] not in depths:
            raise ValueError(
                f"routes have shape {rows.shape} and type {rows.dtype}; expected integers [t, "
                f"{depths[0]} or {depths[1]}, {shape.k}]"
            )
        if rows.shape[2] != shape.k:
            raise ValueError(f"routes have {rows.shape[2]} experts a token, expected {shape.k}")
        if versions.shape != (tokens,) or versions.dtype.kind not in "iu":
            raise ValueError(
                f"versions have shape {versions.shape} and type {versions.dtype}; expected "
                f"integers ({tokens},), one for each row"
            )
        if tokens and not (versions.min() >= 0 and versions.max() < 2**31):
            raise ValueError("a row's version is negative or beyond 32 bits")
        if start < 0 or not 0 <= shared <= tokens:
            raise ValueError(f"start={start} and shared={shared} of {tokens} rows; expected >= 0")
        if rows.shape[1] != len(shape.layers):
            rows = _picked(rows, shape.layers)
        return rows, versions.astype(np.int64)

    def _write(self, path: Path, parts: list[bytes]) -> None:
        assert self._max_bytes is not None
        size = sum(len(part) for part in parts)
        if size > self._max_bytes:
            raise RuntimeError(f"these routes take {size} bytes; max_bytes is {self._max_bytes}")
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
            partial.rename(path)
        except FileNotFoundError:
            raise RuntimeError("the store of routes has ended") from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RuntimeError(
                f"no space for {size} bytes of routes in {path.parent}; lower max_bytes"
            ) from None
        finally:
            partial.unlink(missing_ok=True)
        self._eviction.make_room(path.parent, written=size, max_bytes=self._max_bytes)


def _digits(folder: Path) -> str:
    """What names a store in references that hold their routes."""
    return folder.name.rpartition("-")[2]


def _difference(found: RouteShape, expected: RouteShape) -> str:
    fields = [field.name for field in attrs.fields(RouteShape)]
    name = next(one for one in fields if getattr(found, one) != getattr(expected, one))
    return f"{name} is {getattr(found, name)}, expected {getattr(expected, name)}"


def _picked(rows: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    """The rows of some layers; not copied if they are evenly spaced, as in most models."""
    spacing = layers[1] - layers[0] if len(layers) > 1 else 1
    even = range(layers[0], layers[-1] + 1, spacing)
    if layers == tuple(even):
        return rows[:, even.start : even.stop : even.step]
    return rows.take(layers, axis=1)


def _link(content: Path, path: Path) -> bool:
    """Give stored content another name, and count it as new; False where that can't be."""
    try:
        os.link(content, path)
        os.utime(path)
    except OSError:  # not stored yet, or a filesystem without links, or with few
        return False
    return True


def _share(path: Path, content: Path) -> None:
    """Let others link to what was stored; where somebody else was faster, use theirs."""
    try:
        os.link(path, content)
    except FileExistsError:
        other = path.with_name(f".{path.name}.partial")
        if _link(content, other):
            other.replace(path)
    except OSError:
        pass  # a filesystem without links: each reference has a file of its own


def _write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


# ---- a store's size ----

_ROUTES = re.compile(r"\.?[0-9a-f]{32}")  # also what a killed process was writing
_LOOKS = 16  # at least so many times, while max_bytes are written, a process looks at the folder
_PAGE = 4096  # bytes: a file in shared memory takes whole pages


class Eviction:
    """Keeps a folder within a size, by what this process knows of it: others write into it, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self._written = 0

    def make_room(self, folder: Path, *, written: int, max_bytes: int) -> None:
        """Note what was written; remove the oldest files if there may be more than ``max_bytes``.

        Room is made for a 16th of ``max_bytes``, so that a full store is not looked through for
        each file. This process looks at what others have written once it has written a 16th itself.
        """
        with self._lock:
            self._written += -(-written // _PAGE) * _PAGE
            looks = self._written > max_bytes // _LOOKS
            if looks or self._seen + self._written > max_bytes:
                self._seen = _evict(folder, max_bytes)
                self._written = 0


def _evict(folder: Path, max_bytes: int) -> int:
    """If there are too many, remove the oldest files, each with all its names.

    Returns the size of those that are left.
    """
    names: dict[int, list[Path]] = {}
    files: dict[int, os.stat_result] = {}
    for path in list(folder.iterdir()):
        if _ROUTES.match(path.name) is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # discarded in between
            found = path.lstat()
            names.setdefault(found.st_ino, []).append(path)
            files[found.st_ino] = found
    total = sum(_taken(found) for found in files.values())
    if total <= max_bytes:
        return total
    for number in sorted(files, key=lambda number: files[number].st_mtime_ns):
        if total <= max_bytes - max_bytes // _LOOKS:
            break
        total -= _taken(files[number])
        for path in names[number]:
            path.unlink(missing_ok=True)
    return total


def _taken(found: os.stat_result) -> int:
    """The bytes of a file: at least its content's, where its blocks are not allocated yet."""
    return max(found.st_size, 512 * found.st_blocks)
