"""A store of expert routes between sampler and trainer: files, each named by a reference."""

import contextlib
import errno
import operator
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import attrs
import numpy as np

from primerl._common.shared_folder import SharedFolder
from primerl.replay.file_server import NAME, content_path, remove
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
from primerl.replay.server_process import SpanServer
from primerl.replay.shapes import RouteShape
from primerl.types import Sample

_UNKNOWN = -1


class BadRoutes(ValueError):
    """Raised when a sample's routes are missing, damaged, of another model or incomplete."""


class Store:
    """A store for the expert routes of samples that wait for their training step.

        with Store(shape) as store:
            references = store.put(rows, start=0, versions=versions, shared=prompt_tokens)

    By default, routes are files in this host's shared memory, which its processes can read. Routes
    of at most ``INLINE_BYTES``, such as of a few tokens of a small model, are stored in their
    references instead. Routes that were not discarded are removed when the store is closed. If its
    process is killed, they are removed when this host's next store is opened.

    A copy, such as the pickled one in the rollout worker's process, can put and check routes while
    the store is open. The store and its copies are thread-safe.

    Args:
        shape: the shape of the model's routes.
        folder: a folder on a filesystem that hosts share, to use instead of shared memory.
        max_bytes: the maximum size of all files. Beyond it, the oldest are removed, which are of
            rollouts that were dropped. By default, half of the space that is free when the store
            is opened.
        host: serve the routes to other hosts over HTTP on this interface: ``"127.0.0.1"``, or
            ``"0.0.0.0"`` for all. The key is ``PRIMERL_API_KEY``, which all readers need; it
            is sent unencrypted.
        port: the server's port; any free one by default.

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
            raise ValueError(f"{folder} is not a folder; expected an existing folder")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, expected at least 1")
        self._key = os.environ.get(KEY_VARIABLE, "") if host is not None else ""
        if host is not None and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise ValueError(
                f"serving routes on host= needs a key: set {KEY_VARIABLE} to printable ASCII "
                "characters, here and for all readers"
            )
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
                raise RuntimeError(f"cannot open a store of routes: {error}") from None
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
        """Remove all routes and stop the server; does nothing on a copy."""
        if self._own is not None:
            self._own.close()
            self._own = None
            self._path = None

    def put(
        self, rows: np.ndarray, *, start: SupportsIndex, versions: np.ndarray, shared: int = 0
    ) -> tuple[str, ...]:
        """Store the routes of successive tokens; return references for ``Sample.routes``.

        Args:
            rows: integers ``[t, layers, k]``, or ``[t, decoder_layers, k]``, of which only layers
                with experts are stored; -1 in all k entries if nothing was recorded.
            start: the index of row 0's token.
            versions: integers ``[t]``: the policy version of each row.
            shared: the number of first rows that other rollouts may have too, such as those of a
                prompt. They are stored once, however many rollouts put them.

        Raises:
            ValueError: the routes don't have this shape; the message names layer and token.
            RuntimeError: the store is not open, or there is no space left.
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
        """Check whether routes of so many tokens are inline, so that no file is read or written."""
        return fits_inline(tokens, self.shape)

    def check(self, sample: Sample) -> None:
        """Check that a sample has the routes that training needs; only heads of files are read.

        The token before a trained token must have routes, of the version that sampled the trained
        token. Routes of another request mostly fail this check.

        Raises:
            BadRoutes: there are no routes; some are missing, damaged, of another model or another
                store, or of tokens that the sample doesn't have; or the token before a trained
                token has no routes, or routes of another version.
        """
        if not sample.routes:
            raise BadRoutes("the sample has no routes; check that the engine records them")
        tokens = len(sample.token_ids)
        versions = np.full(tokens, _UNKNOWN)  # of the first routes recorded for each token
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
                f"token {token + 1} is to be trained, but the token {token} before it has no "
                f"routes ({len(wrong)} trained tokens have missing or wrong routes)"
            )
        raise BadRoutes(
            f"token {token + 1} was sampled by version {sample.versions[token + 1]}, but the "
            f"routes of the token {token} before it are of version {versions[token]}: they are "
            f"of another request ({len(wrong)} trained tokens have missing or wrong routes)"
        )

    def discard(self, references: Iterable[str]) -> int:
        """Remove the routes of references that will not be trained; return how many were removed.

        Inline routes, missing ones and those of other stores are ignored.
        """
        folder = self._path
        if folder is None:
            return 0
        names = {name for ref in references if (name := self._name(folder, ref)) is not None}
        return sum(remove(folder, name) for name in names)

    def __getstate__(self) -> dict[str, Any]:
        if self._path is None:
            raise RuntimeError("the store is not open; copy or pickle it within its `with`")
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
        """Read the head of a reference's routes; inline routes are checked completely."""
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
            raise ValueError("the reference is not from this store")
        decode_inline([found])
        return found

    def _file_head(self, folder: Path, reference: str) -> RecordingHead:
        name = self._name(folder, reference)
        if name is None:
            raise ValueError("the reference is not from this store")
        try:
            with opened(FilePlace(folder, name)) as (read, total):
                return read_recording_head(read, total=total)
        except FileNotFoundError:
            raise ValueError("its file was discarded, or removed to make room") from None

    def _name(self, folder: Path, reference: str) -> str | None:
        """Return the name of a reference's file; None if it is not of this store, or inline."""
        name = reference.rpartition("/")[2].partition(".")[0]
        known = NAME.fullmatch(name) and self._reference(folder, name) == reference
        return name if known else None

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
            raise ValueError(f"routes have {rows.shape[2]} experts per token, expected {shape.k}")
        if versions.shape != (tokens,) or versions.dtype.kind not in "iu":
            raise ValueError(
                f"versions have shape {versions.shape} and type {versions.dtype}; expected "
                f"integers ({tokens},), one per row"
            )
        if tokens and not (versions.min() >= 0 and versions.max() < 2**31):
            raise ValueError("a row's version is negative or has more than 32 bits")
        if start < 0 or not 0 <= shared <= tokens:
            raise ValueError(
                f"start={start} and shared={shared} of {tokens} rows; expected start >= 0, and "
                "shared from 0 to the number of rows"
            )
        if rows.shape[1] != len(shape.layers):
            rows = _picked(rows, shape.layers)
        return rows, versions.astype(np.int64)

    def _write(self, path: Path, parts: list[bytes]) -> None:
        assert self._max_bytes is not None
        size = sum(len(part) for part in parts)
        if size > self._max_bytes:
            raise RuntimeError(f"routes take {size} bytes, more than max_bytes={self._max_bytes}")
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
            partial.rename(path)
        except FileNotFoundError:
            raise RuntimeError("the store of routes was closed by its owner") from None
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
    """Return the hexadecimal digits that identify a store in its inline references."""
    return folder.name.rpartition("-")[2]


def _difference(found: RouteShape, expected: RouteShape) -> str:
    fields = [field.name for field in attrs.fields(RouteShape)]
    name = next(one for one in fields if getattr(found, one) != getattr(expected, one))
    return f"{name} is {getattr(found, name)}, expected {getattr(expected, name)}"


def _picked(rows: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    """Select the rows of some layers, as a view if they are evenly spaced, as in most models."""
    spacing = layers[1] - layers[0] if len(layers) > 1 else 1
    even = range(layers[0], layers[-1] + 1, spacing)
    if layers == tuple(even):
        return rows[:, even.start : even.stop : even.step]
    return rows.take(layers, axis=1)


def _link(content: Path, path: Path) -> bool:
    """Link a new name to stored content, and renew its time; return whether that worked."""
    try:
        os.link(content, path)
        os.utime(path)
    except OSError:  # not stored yet, no links on this filesystem, or too many of this file
        return False
    return True


def _share(path: Path, content: Path) -> None:
    """Make stored content available for links; if another process was faster, use its copy."""
    try:
        os.link(path, content)
    except FileExistsError:
        other = path.with_name(f".{path.name}.partial")
        if _link(content, other):
            other.replace(path)
    except OSError:
        pass  # a filesystem without links: each reference keeps its own file


def _write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


# ---- a store's size ----

_ROUTES = re.compile(r"\.?[0-9a-f]{32}")  # also the partial files of killed processes
_LOOKS = 16  # a process scans the folder at least so often while it writes max_bytes
_PAGE = 4096  # bytes: a file in shared memory takes whole pages


class Eviction:
    """Keeps a folder below a size, by an estimate, because other processes write into it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self._written = 0

    def make_room(self, folder: Path, *, written: int, max_bytes: int) -> None:
        """Count written bytes; remove the oldest files if all may take more than ``max_bytes``.

        A sixteenth of ``max_bytes`` is freed at a time, so that a full store is not scanned for
        each new file. Because other processes write files too, the folder is also scanned each
        time this process has written a sixteenth of ``max_bytes``.
        """
        with self._lock:
            self._written += -(-written // _PAGE) * _PAGE
            looks = self._written > max_bytes // _LOOKS
            if looks or self._seen + self._written > max_bytes:
                self._seen = _evict(folder, max_bytes)
                self._written = 0


def _evict(folder: Path, max_bytes: int) -> int:
    """Remove the oldest files, each with all its names, if all take more than ``max_bytes``.

    Returns the size of the remaining files.
    """
    names: dict[int, list[Path]] = {}
    files: dict[int, os.stat_result] = {}
    for path in list(folder.iterdir()):
        if _ROUTES.match(path.name) is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # discarded meanwhile
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
    """Return a file's size on disk, at least its length, as blocks may be allocated later."""
    return max(found.st_size, 512 * found.st_blocks)
