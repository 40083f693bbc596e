"""Parts of an untrusted image, by name: read from a folder or an archive, decompressed, checked."""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from primerl.sandbox import archives
from primerl.sandbox.archives import BadArchive

_MAGIC_BYTES = 8
_MOST_PARTS = 10_000  # of an archive of layers
_LONGEST_PART = 255
_CHUNK = 1 << 20
_BUFFER = 1 << 16
_MOST_XZ_BYTES = 256 << 20  # of memory; `xz -9` needs 65 MiB, and the format allows 4 GiB
# The names that archives of layers have at their top.
_PART = re.compile(r"(manifest\.json|repositories|index\.json|oci-layout|blobs|[0-9a-f]{64})\b")
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")


class LayoutFolder:
    """The files of an OCI image layout in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return os.path.isfile(f"{self._folder}/{name}")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file.

        Raises:
            BadArchive: there is none in the image.
        """
        if not self.has(name):
            raise BadArchive(f"the image has no {name!r:.200}")
        path = os.path.realpath(f"{self._folder}/{name}")
        if os.path.commonpath([path, self._folder]) != self._folder:
            raise BadArchive(f"{name!r:.200} leads out of the folder")
        with open(path, "rb") as file:
            yield file


class ArchiveParts:
    """The files of an archive of layers, which are found by one pass over its headers."""

    def __init__(self, archive: BinaryIO) -> None:
        self._archive = archive
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with reading():
            for count, member in enumerate(archives.members(archive)):
                name = posixpath.normpath(member.name)
                if member.kind == "file":
                    self._places[name] = archive.tell(), member.size
                elif member.kind == "symbolic link" and len(member.target) <= _LONGEST_PART:
                    # To a layer that occurs twice.
                    at = posixpath.join(posixpath.dirname(name), member.target)
                    self._links[name] = posixpath.normpath(at)
                is_part = (name == "." or _PART.match(name)) and len(name) <= _LONGEST_PART
                if count > _MOST_PARTS or not is_part:
                    self._places.clear()  # a root filesystem
                    return

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return name in self._places

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file.

        Raises:
            BadArchive: there is none in the image.
        """
        place = self._places.get(name) or self._places.get(self._links.get(name, ""))
        if place is None:
            raise BadArchive(f"the image has no {name!r:.200}")
        self._archive.seek(place[0])
        yield io.BufferedReader(_Window(self._archive, place[1]), _BUFFER)


class _Window(io.RawIOBase):
    """A part of a file, from its current position."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(min(self._left, len(buffer)))
        buffer[: len(content)] = content
        self._left -= len(content)
        return len(content)


class _Hashed(io.RawIOBase):
    """A file, whose content up to its current position has the digest ``found``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.found = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self.found.update(content)
        return len(content)


class _XzFile(io.RawIOBase):
    """The content of an xz file, which is read within a limit on memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._next_stream()

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            given = b""
            if self._stream.eof:
                given = self._stream.unused_data.lstrip(b"\0") or self._file.read(_BUFFER)
                if not given.strip(b"\0"):
                    return 0
                self._next_stream()
            elif self._stream.needs_input:
                given = self._file.read(_BUFFER)
                if not given:
                    raise EOFError("the compressed data ends early")
            content = self._stream.decompress(given, len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if (offset, whence) != (0, io.SEEK_SET):
            raise io.UnsupportedOperation("an xz file can only be read from its begin")
        self._file.seek(0)
        self._at = 0
        self._next_stream()
        return 0

    def _next_stream(self) -> None:
        self._stream = lzma.LZMADecompressor(memlimit=_MOST_XZ_BYTES)


class _Watched(io.RawIOBase):
    """A decompressed file, which calls ``watch`` with 0 for each chunk.

    A small file may have content that takes days to pass over, so an error of ``watch`` ends it.
    """

    def __init__(self, file: BinaryIO, watch: Callable[[int], None]) -> None:
        self._file = file
        self._watch = watch

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        self._watch(0)
        content = self._file.read(min(len(buffer), _CHUNK))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + self.tell() if whence == io.SEEK_CUR else offset
        if place < self.tell():
            self._file.seek(0)
        while self.tell() < place and self.read(min(place - self.tell(), _CHUNK)):
            pass
        return self.tell()


ImageParts = LayoutFolder | ArchiveParts


@contextlib.contextmanager
def opened(parts: ImageParts, name: str) -> Iterator[BinaryIO]:
    """Open a part of an image; the content of a blob must have the digest in its name.

    Raises:
        BadArchive: the part is missing, or damaged.
    """
    with reading(), parts.open(name) as file:
        expected = _BLOB.fullmatch(name)
        if expected is None:
            yield file
            return
        hashed = _Hashed(file)
        with io.BufferedReader(hashed, _BUFFER) as content:
            yield content
            while content.read(_CHUNK):
                pass
        if hashed.found.hexdigest() != expected[1]:
            raise BadArchive(f"the content of {name} has another digest")


_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\0": _XzFile,
    b"BZh": bz2.open,
}


@contextlib.contextmanager
def decompressed(file: BinaryIO, watch: Callable[[int], None]) -> Iterator[BinaryIO]:
    """Return an archive's content, decompressed if the file is compressed."""
    begin = file.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]  # type: ignore[attr-defined]
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        raise BadArchive("it is compressed by zstd: use gzip, xz or no compression")
    for magic, opener in _OPENERS.items():
        if begin.startswith(magic):
            with opener(file) as content:
                yield io.BufferedReader(_Watched(content, watch), _BUFFER)
            return
    yield file


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Raise the errors of decompression as ``BadArchive``."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise BadArchive(f"it is damaged: {error}") from error
