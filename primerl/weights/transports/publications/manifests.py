"""The format of a folder of publications: manifests, files, and chains of deltas."""

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from attrs.validators import ge, instance_of, le

from primerl._common.digests import TensorDigest, digest_of_all, digest_of_file
from primerl._common.files import member

FULL = "full"
DELTA = "delta"
SAME = "same"
"""Forms of a tensor in a delta: ``SAME`` (left out), ``DELTA`` (of its bytes) or ``FULL``."""

LEAST_BYTES_PER_S = 100e6
"""The lowest rate at which a publication is expected to travel; time limits follow from it."""

LEAST_TIMEOUT_S = 300.0

_TENSOR_FILE = re.compile(rf"[0-9]{{8,}}\.({FULL}|{DELTA})\.safetensors", re.ASCII)


def timeout_of(size: int) -> float:
    """Return the time limit for work on ``size`` bytes, in seconds.

    max(300 s, bytes / 100 MB/s)
    """
    return max(LEAST_TIMEOUT_S, size / LEAST_BYTES_PER_S)


def is_tensor_file(name: str) -> bool:
    """Return whether a file of this name has the tensors of a publication."""
    return _TENSOR_FILE.fullmatch(name) is not None


@attrs.frozen
class FileSource:
    """The process from which other hosts read a publication's file: its address and its secret."""

    host: str = attrs.field()
    """An IP address, never a name."""
    port: int = attrs.field(validator=[instance_of(int), ge(1), le(65535)])
    token: str = attrs.field(repr=False)
    """64 hexadecimal digits, without which nothing is sent."""

    @host.validator
    def _check_host(self, _: object, host: object) -> None:
        if not isinstance(host, str):
            raise ValueError(f"the host of its source is {host!r}, expected an IP address")
        ipaddress.ip_address(host)

    @token.validator
    def _check_token(self, _: object, token: object) -> None:
        if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{64}", token):
            raise ValueError("the token of its source has not 64 hexadecimal digits")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@attrs.frozen(kw_only=True)
class PublicationManifest:
    """The description of one publication. Its JSON file is written last: that commits it."""

    version: int
    kind: str
    """``"full"`` or ``"delta"``."""
    parent: int | None
    """The version to which a delta applies; None for a full publication."""
    parent_digest: str | None
    """The parent's ``digest``, because two runs may have different versions of the same number."""
    digest: str
    """The digest of all tensors of this version, by ``digests.digest_of_all``."""
    file: str
    file_size: int
    file_digest: str | None
    """The digest of a delta's file; None for a full one, whose tensors all have digests."""
    deltas_follow: bool
    """Whether later versions may be deltas, so that each host must keep a copy of the tensors."""
    tensors: dict[str, TensorDigest]
    """The digests of this version's tensors, by their names in the checkpoint."""
    forms: dict[str, str]
    """The form of each tensor in a delta; empty for a full publication."""
    parts: dict[str, str] = attrs.field(factory=dict)
    """The subfolders with the tensors that other ranks published, and the digests of these parts.
    A part is a publication of the same version; its ``tensors`` are not among this manifest's."""
    source: FileSource | None = None
    """The process that sends the file; None if the file is in this folder."""

    @property
    def copied(self) -> bool:
        """Whether hosts keep a copy of the tensors, for deltas or because the file is elsewhere."""
        return self.deltas_follow or self.source is not None

    def as_json(self) -> bytes:
        """Return the content of the manifest's file."""
        fields = attrs.asdict(self, recurse=False)
        fields["tensors"] = {
            n: [one.dtype, one.shape, one.digest] for n, one in self.tensors.items()
        }
        fields["source"] = self.source and attrs.asdict(self.source)
        return json.dumps(fields).encode()


def manifest_path(folder: Path, version: int) -> Path:
    """Return the path of a version's manifest."""
    return folder / f"{version:08d}.json"


def describe(path: Path) -> str:
    """Describe a file for an error: the name separately, because vLLM removes paths from errors."""
    return f"{path.name} in {path.parent}"


def read_manifest(folder: Path, version: int) -> PublicationManifest:
    """Read the manifest of a version.

    Raises:
        ValueError: the manifest is missing, damaged or another account's; the message names it.
    """
    path = manifest_path(folder, version)
    where = describe(path)
    if path.is_symlink():
        raise ValueError(f"{where} is a symbolic link, expected a file")
    try:
        read: dict[str, Any] = json.loads(path.read_bytes())
        tensors = {n: TensorDigest(d, tuple(s), x) for n, (d, s, x) in read["tensors"].items()}
        source = FileSource(**read["source"]) if read.get("source") else None
        manifest = PublicationManifest(**{**read, "tensors": tensors, "source": source})
    except FileNotFoundError:
        raise ValueError(
            f"there is no publication of version {version}: {where} is missing"
        ) from None
    except PermissionError:
        raise ValueError(
            f"{where} may not be read by this process's account, {os.geteuid()}; run the server "
            "under the trainer's account"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is not a valid manifest: {error}") from error
    if manifest.version != version:
        raise ValueError(f"{where} describes version {manifest.version}, not {version}")
    try:
        member(folder, manifest.file)
    except ValueError as error:
        raise ValueError(f"{where} names a file outside its folder: {error}") from None
    if manifest.digest != digest_of_all(manifest.tensors):
        raise ValueError(f"{where} is damaged: its digest is not that of the tensors that it lists")
    return manifest


def read_parts(folder: Path, manifest: PublicationManifest) -> dict[Path, PublicationManifest]:
    """Return the manifests of a publication and of its parts, by their folders.

    Raises:
        ValueError: a part's manifest is missing, damaged, or of another publication.
    """
    found = {folder: manifest}
    for name, digest in manifest.parts.items():
        place = member(folder, name)
        found[place] = read_manifest(place, manifest.version)
        if found[place].digest != digest:
            raise ValueError(
                f"{describe(manifest_path(place, manifest.version))} is of another publication: "
                f"its digest is {found[place].digest}, not {digest}"
            )
    return found


def check_file(folder: Path, manifest: PublicationManifest) -> Path:
    """Check the tensor file of a publication against its manifest; return the file's path.

    The file's size and a delta's digest are checked. Whole tensors are checked where they are used.

    Raises:
        ValueError: the file is missing or has the wrong size, or a delta is altered; the message
            names the file.
    """
    path = folder / manifest.file
    where = describe(path)
    if not path.is_file():
        raise ValueError(f"{where} is missing (version {manifest.version})")
    size = path.stat().st_size
    if size != manifest.file_size:
        raise ValueError(f"{where} is truncated: {size} bytes of {manifest.file_size}")
    if manifest.file_digest is not None and digest_of_file(path) != manifest.file_digest:
        raise ValueError(f"{where} is altered: its digest differs from that in the manifest")
    return path


def hold(path: Path) -> BinaryIO:
    """Lock a tensor file against being overwritten, until the returned file is closed.

    Raises:
        ValueError: the file is missing, or was replaced.
    """
    file = None
    with contextlib.suppress(FileNotFoundError):
        file = path.open("rb")
        with contextlib.suppress(OSError):  # without locks, the publisher overwrites no file
            fcntl.flock(file, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    if file is not None:
        file.close()
    raise ValueError(f"{describe(path)} is missing: a later version has replaced it")


def chain(folder: Path, version: int, *, have: str | None = None) -> list[PublicationManifest]:
    """Return the publications that a receiver needs to reach a version, first to last.

    The first one is a full publication, or a delta to the tensors that the receiver has.

    Args:
        folder: the folder of the publications.
        version: the version to reach.
        have: ``PublicationManifest.digest`` of the tensors that the receiver has; None if it has
            none.

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


def part_name(rank: int) -> str:
    """Return the name of the subfolder of a rank's part."""
    return f"part-{rank:04d}"


def remove_parts(folder: Path, *, kept: Sequence[int]) -> None:
    """Remove the parts of ranks that write no longer, after a run was resumed on fewer."""
    names = {part_name(rank) for rank in kept}
    for path in folder.glob("part-[0-9][0-9][0-9][0-9]"):
        if path.name not in names and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
