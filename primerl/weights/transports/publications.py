"""The format of published weights: versions in a folder, and how a receiver reads them."""

import json
from pathlib import Path
from typing import Any

import attrs

from primerl._common.digests import TensorDigest, digest_of_all, digest_of_file
from primerl._common.files import member

FULL = "full"
DELTA = "delta"
SAME = "same"
"""Forms of a tensor in a delta: left out, a ``DELTA`` of its bytes, or ``FULL``."""


@attrs.frozen(kw_only=True)
class PublicationManifest:
    """Describes one publication; its JSON file is written last, which commits the publication."""

    version: int
    kind: str
    """``"full"`` or ``"delta"``."""
    parent: int | None
    """The version that a delta changes."""
    parent_digest: str | None
    """``digest`` of that version: two runs may have a version of the same number."""
    digest: str
    """Of all tensors of this version, ``digests.digest_of_all``."""
    file: str
    file_size: int
    file_digest: str | None
    """Of a delta; None where ``tensors`` has the digest of all that is in the file."""
    deltas_follow: bool
    """Whether later versions may be deltas, so that a host keeps a base copy."""
    tensors: dict[str, TensorDigest]
    """Of this version, by the name that the checkpoint gives them."""
    forms: dict[str, str]
    """Of a delta: the form of each tensor."""


def manifest_path(folder: Path, version: int) -> Path:
    """The path of a version's manifest."""
    return folder / f"{version:08d}.json"


def describe(path: Path) -> str:
    """A file in an error: its name on its own, because vLLM removes paths from errors."""
    return f"{path.name} in {path.parent}"


def read_manifest(folder: Path, version: int) -> PublicationManifest:
    """The manifest of a version.

    Raises:
        ValueError: it is missing or broken; the message names the file.
    """
    path = manifest_path(folder, version)
    where = describe(path)
    if path.is_symlink():
        raise ValueError(f"{where} is a symbolic link, expected a file")
    try:
        read: dict[str, Any] = json.loads(path.read_bytes())
        tensors = {n: TensorDigest(d, tuple(s), x) for n, (d, s, x) in read["tensors"].items()}
        manifest = PublicationManifest(**{**read, "tensors": tensors})
    except FileNotFoundError:
        raise ValueError(
            f"there is no publication of version {version}: {where} is missing"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is broken: {error}") from error
    if manifest.version != version:
        raise ValueError(f"{where} describes version {manifest.version}, not {version}")
    try:
        member(folder, manifest.file)
    except ValueError as error:
        raise ValueError(f"{where} names a file outside its folder: {error}") from None
    if manifest.digest != digest_of_all(manifest.tensors):
        raise ValueError(f"{where} is broken: its tensors do not have the digest that it states")
    return manifest


def check_file(folder: Path, manifest: PublicationManifest) -> Path:
    """The path of a publication's tensors, after comparing the file with the manifest.

    Tensors that come whole are not digested here, but where they are used.

    Raises:
        ValueError: the file is missing or truncated, or a delta is altered; the message names it.
    """
    path = folder / manifest.file
    where = describe(path)
    if not path.is_file():
        raise ValueError(f"{where} is missing (version {manifest.version})")
    size = path.stat().st_size
    if size != manifest.file_size:
        raise ValueError(f"{where} is truncated: {size} bytes of {manifest.file_size}")
    if manifest.file_digest is not None and digest_of_file(path) != manifest.file_digest:
        raise ValueError(f"{where} is altered: its digest is not that of the manifest")
    return path


def chain(folder: Path, version: int, *, have: str | None = None) -> list[PublicationManifest]:
    """The publications that lead to a version, first to last.

    They begin after the tensors that the receiver has, or with a full publication.

    Args:
        folder: of the publications.
        version: to reach.
        have: ``PublicationManifest.digest`` of the tensors that the receiver has; None for nothing.

    Raises:
        ValueError: a publication is missing or does not follow from its parent.
    """
    manifest = read_manifest(folder, version)
    steps: list[PublicationManifest] = []
    while manifest.digest != have:
        steps.insert(0, manifest)
        if manifest.kind == FULL or manifest.parent_digest == have:
            break
        parent = read_manifest(folder, manifest.parent or 0)
        if parent.digest != manifest.parent_digest or parent.version >= manifest.version:
            raise ValueError(
                f"{describe(manifest_path(folder, manifest.version))} has the wrong parent: "
                f"version {parent.version} has digest {parent.digest}, not {manifest.parent_digest}"
            )
        manifest = parent
    return steps
