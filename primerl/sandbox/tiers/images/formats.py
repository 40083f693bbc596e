"""Image files: archives of ``docker save`` and ``docker export``, and OCI image layouts."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import platform
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import attrs

from primerl.sandbox import archives
from primerl.sandbox.archives import BadArchive
from primerl.sandbox.tiers.images import folders
from primerl.sandbox.tiers.images.layers import LayeredRoot

_MAGIC_BYTES = 8
_MOST_JSON_BYTES = 4 << 20
_MOST_LAYERS = 1000
_MOST_PARTS = 100_000  # of an archive of layers
# The names that archives of layers have at their top.
_PART = re.compile(r"(manifest\.json|repositories|index\.json|oci-layout|blobs|[0-9a-f]{64})\b")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@attrs.frozen(kw_only=True)
class UnpackedImage:
    """The environment variables that an unpacked image sets for its commands."""

    environment: Mapping[str, str]


def unpack(source: str, target: str, *, owner: int, grow: Callable[[int], None]) -> UnpackedImage:
    """Unpack an image file, an image layout or a root filesystem into the new folder ``target``.

    ``source`` is a folder (a root filesystem or an OCI image layout) or a tar archive (of a root
    filesystem, an OCI image layout, or ``docker save``), perhaps compressed.

    Raises:
        BadArchive: the image is malformed, or is of another kind.
        OSError: a file can't be read or written.
    """
    if os.path.isdir(source):
        if not os.path.exists(f"{source}/oci-layout"):
            folders.merge([source], target, owner=owner, grow=grow)
            return UnpackedImage(environment={})
        return _layered(_LayoutFolder(source), target, owner, grow)
    with open(source, "rb") as file, _decompressed(file) as archive:
        parts = _Parts(archive)
        if parts.has("manifest.json") or parts.has("oci-layout"):
            return _layered(parts, target, owner, grow)
        archive.seek(0)
        return unpack_files(archive, target, owner=owner, grow=grow)


def unpack_files(
    archive: BinaryIO, target: str, *, owner: int, grow: Callable[[int], None]
) -> UnpackedImage:
    """Unpack an archive of a root filesystem, as ``docker export`` writes it."""
    with _reading():
        root = LayeredRoot(target, owner=owner, grow=grow)
        with contextlib.closing(root):
            root.add(archive)
    return UnpackedImage(environment={})


def variables(given: Any) -> dict[str, str]:
    """Return the variables of a list of ``NAME=VALUE``, as configurations of images have it."""
    pairs = [str(entry).partition("=") for entry in given or ()]
    return {name: value for name, _, value in pairs if _VARIABLE.fullmatch(name)}


# ---- parts of an image, by name ----


class _LayoutFolder:
    """The files of an OCI image layout in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return os.path.isfile(f"{self._folder}/{name}")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        if not self.has(name):
            raise BadArchive(f"the image has no {name!r:.200}")
        with open(f"{self._folder}/{name}", "rb") as file:
            yield file


class _Parts:
    """The files of an archive of layers, which are found by one pass over its headers."""

    def __init__(self, archive: BinaryIO) -> None:
        self._archive = archive
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with _reading():
            for count, member in enumerate(archives.members(archive)):
                name = posixpath.normpath(member.name)
                if member.kind == "file":
                    self._places[name] = archive.tell(), member.size
                elif member.kind == "symbolic link":  # to a layer that occurs twice
                    at = posixpath.join(posixpath.dirname(name), member.target)
                    self._links[name] = posixpath.normpath(at)
                if count > _MOST_PARTS or not (name == "." or _PART.match(name)):
                    self._places.clear()  # a root filesystem
                    return

    def has(self, name: str) -> bool:
        return name in self._places

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        place = self._places.get(name) or self._places.get(self._links.get(name, ""))
        if place is None:
            raise BadArchive(f"the image has no {name!r:.200}")
        self._archive.seek(place[0])
        yield io.BufferedReader(_Window(self._archive, place[1]), 1 << 16)


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


_Source = _LayoutFolder | _Parts
_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    b"BZh": bz2.open,
}


def _layered(parts: _Source, target: str, owner: int, grow: Callable[[int], None]) -> UnpackedImage:
    """Unpack an image of layers, which its manifest lists with its configuration."""
    configuration, layers = _from_docker(parts) if parts.has("manifest.json") else _from_oci(parts)
    if len(layers) > _MOST_LAYERS:
        raise BadArchive(f"the image has {len(layers)} layers, expected at most {_MOST_LAYERS}")
    settings = _object(_object(_json(parts, configuration)).get("config") or {})
    environment = variables(settings.get("Env"))
    root = LayeredRoot(target, owner=owner, grow=grow)
    with contextlib.closing(root):
        for name in layers:
            with _reading(), parts.open(name) as file, _decompressed(file) as layer:
                root.add(layer)
    return UnpackedImage(environment=environment)


def _from_docker(parts: _Source) -> tuple[str, list[str]]:
    """Return the names of the configuration and of the layers in an archive of ``docker save``."""
    images = _json(parts, "manifest.json")
    if not isinstance(images, list) or len(images) != 1:
        raise BadArchive("manifest.json does not list one image: save one image per archive")
    image = _object(images[0])
    layers = image.get("Layers")
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise BadArchive("manifest.json has no list of layers")
    return str(image.get("Config")), [posixpath.normpath(name) for name in layers]


def _from_oci(parts: _Source) -> tuple[str, list[str]]:
    """Return the names of the configuration and of the layers in an OCI image layout."""
    manifest = _object(_json(parts, "index.json"))
    for _ in range(3):  # an index may list indexes
        if "manifests" not in manifest:
            break
        manifest = _object(_json(parts, _blob(_chosen(manifest["manifests"]))))
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise BadArchive("the manifest has no list of layers")
    return _blob(manifest.get("config")), [_blob(layer) for layer in layers]


def _chosen(manifests: Any) -> Any:
    """Return the manifest for this machine."""
    ours = _MACHINES.get(platform.machine(), platform.machine())
    platforms = []
    for manifest in manifests if isinstance(manifests, list) else ():
        where = _object(_object(manifest).get("platform") or {})
        if not where or (where.get("os"), where.get("architecture")) == ("linux", ours):
            return manifest
        platforms.append(f"{where.get('os')}/{where.get('architecture')}")
    raise BadArchive(f"the image is for {', '.join(platforms) or 'no platform'}, not linux/{ours}")


def _blob(descriptor: Any) -> str:
    digest = _DIGEST.fullmatch(str(_object(descriptor).get("digest")))
    if digest is None:
        raise BadArchive(f"{descriptor!r:.200} has no sha256 digest")
    return f"blobs/sha256/{digest[1]}"


def _json(parts: _Source, name: str) -> Any:
    with _reading(), parts.open(name) as file:
        content = file.read(_MOST_JSON_BYTES + 1)
        if len(content) > _MOST_JSON_BYTES:
            raise BadArchive(f"{name} has more than {_MOST_JSON_BYTES} bytes")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadArchive(f"{name} is not JSON: {error}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadArchive(f"{value!r:.200} is not a JSON object")
    return value


@contextlib.contextmanager
def _decompressed(file: BinaryIO) -> Iterator[BinaryIO]:
    """Return an archive's content, decompressed if the file is compressed."""
    begin = file.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]  # type: ignore[attr-defined]
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        raise BadArchive("it is compressed by zstd: use gzip, xz or no compression")
    for magic, opener in _OPENERS.items():
        if begin.startswith(magic):
            with opener(file) as opened:
                yield opened
            return
    yield file


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raise the errors of decompression as ``BadArchive``."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise BadArchive(f"it is damaged: {error}") from error
