"""Image files: archives of ``docker save`` and ``docker export``, and OCI image layouts."""

import contextlib
import json
import os
import platform
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import attrs

from primerl.sandbox.archives import BadArchive
from primerl.sandbox.tiers.images import folders
from primerl.sandbox.tiers.images.layers import LayeredRoot
from primerl.sandbox.tiers.images.parts import (
    ArchiveParts,
    ImageParts,
    LayoutFolder,
    decompressed,
    opened,
    reading,
)

_MOST_JSON_BYTES = 4 << 20
_MOST_LAYERS = 1000
_MOST_VARIABLE_BYTES = (1 << 17) - 1  # Linux accepts no longer variable
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_VALUES = re.compile("[\0\ud800-\udfff]")


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
        return _layered(LayoutFolder(source), target, owner, grow)
    with open(source, "rb") as file, decompressed(file, grow) as archive:
        parts = ArchiveParts(archive)
        if parts.has("manifest.json") or parts.has("oci-layout"):
            return _layered(parts, target, owner, grow)
        archive.seek(0)
        return unpack_files(archive, target, owner=owner, grow=grow)


def unpack_files(
    archive: BinaryIO, target: str, *, owner: int, grow: Callable[[int], None]
) -> UnpackedImage:
    """Unpack an archive of a root filesystem, as ``docker export`` writes it."""
    with reading():
        root = LayeredRoot(target, owner=owner, grow=grow)
        with contextlib.closing(root):
            root.add(archive)
    return UnpackedImage(environment={})


def variables(given: Any) -> dict[str, str]:
    """Return the variables of a list of ``NAME=VALUE``, as configurations of images have it.

    Raises:
        BadArchive: no command could be started with them.
    """
    if not isinstance(given, list | None):
        raise BadArchive(f"{given!r:.200} is not a list of variables")
    pairs = [str(entry).partition("=") for entry in given or ()]
    found = {name: value for name, _, value in pairs if _VARIABLE.fullmatch(name)}
    for name, value in found.items():
        if _NOT_IN_VALUES.search(value):
            raise BadArchive(f"the variable {name:.200} has a character that no variable can have")
    size = sum(len(f"{name}={value}".encode()) for name, value in found.items())
    if size > _MOST_VARIABLE_BYTES:
        raise BadArchive(
            f"its variables have {size} bytes, expected at most {_MOST_VARIABLE_BYTES}"
        )
    return found


def _layered(
    parts: ImageParts, target: str, owner: int, grow: Callable[[int], None]
) -> UnpackedImage:
    """Unpack an image of layers, which its manifest lists with its configuration."""
    name, layers = _from_docker(parts) if parts.has("manifest.json") else _from_oci(parts)
    if len(layers) > _MOST_LAYERS:
        raise BadArchive(f"the image has {len(layers)} layers, expected at most {_MOST_LAYERS}")
    configuration = _object(_json(parts, name))
    architecture = configuration.get("architecture") or _ours()
    if architecture != _ours():  # no command could be started
        raise BadArchive(f"the image is for linux/{architecture!s:.200}, not linux/{_ours()}")
    settings = _object(configuration.get("config") or {})
    environment = variables(settings.get("Env"))
    root = LayeredRoot(target, owner=owner, grow=grow)
    with contextlib.closing(root):
        for name in layers:
            with opened(parts, name) as file, decompressed(file, grow) as layer:
                root.add(layer)
    return UnpackedImage(environment=environment)


def _from_docker(parts: ImageParts) -> tuple[str, list[str]]:
    """Return the names of the configuration and of the layers in an archive of ``docker save``."""
    images = _json(parts, "manifest.json")
    if not isinstance(images, list) or len(images) != 1:
        raise BadArchive("manifest.json does not list one image: save one image per archive")
    image = _object(images[0])
    layers = image.get("Layers")
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise BadArchive("manifest.json has no list of layers")
    return str(image.get("Config")), [posixpath.normpath(name) for name in layers]


def _from_oci(parts: ImageParts) -> tuple[str, list[str]]:
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
    platforms = []
    for manifest in manifests if isinstance(manifests, list) else ():
        where = _object(_object(manifest).get("platform") or {})
        if not where or (where.get("os"), where.get("architecture")) == ("linux", _ours()):
            return manifest
        platforms.append(f"{where.get('os')}/{where.get('architecture')}")
    named = ", ".join(platforms) or "no platform"
    raise BadArchive(f"the image is for {named:.200}, not linux/{_ours()}")


def _ours() -> str:
    """Return the architecture of this machine, as images name it."""
    return _MACHINES.get(platform.machine(), platform.machine())


def _blob(descriptor: Any) -> str:
    digest = _DIGEST.fullmatch(str(_object(descriptor).get("digest")))
    if digest is None:
        raise BadArchive(f"{descriptor!r:.200} has no sha256 digest")
    return f"blobs/sha256/{digest[1]}"


def _json(parts: ImageParts, name: str) -> Any:
    with opened(parts, name) as file:
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
