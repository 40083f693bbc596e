"""Readers of publications, from their files or from a host's copy that deltas are applied to."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import xxhash
from torch import Tensor

from primerl._common.digests import digest_of, raw_bytes
from primerl._common.files import whole_or_nothing
from primerl._common.shared_folder import SharedFolder, acquire
from primerl._common.tensor_files import map_tensors
from primerl.weights.transports import delta
from primerl.weights.transports.publications import (
    DELTA,
    FULL,
    SAME,
    PublicationManifest,
    chain,
    check_file,
    describe,
    read_manifest,
)


class FolderReader:
    """Reader of a folder of publications for one receiver.

    ``fetch`` brings a version to this host and checks it. ``open`` locks the version while its
    tensors are loaded, and ``release`` unlocks it.

    Args:
        folder: the folder of the publications.
        timeout_s: how long to wait for a lock that another process of this host holds.
    """

    def __init__(self, folder: Path, *, timeout_s: float = 300.0) -> None:
        self.folder = folder
        self._timeout_s = timeout_s
        self._copy: HostCopy | None = None
        self._held: BinaryIO | None = None

    def fetch(self, version: int) -> PublicationManifest:
        """Bring a version to this host and check it.

        Raises:
            ValueError: a file is missing, damaged, or does not follow from its parent.
        """
        manifest = read_manifest(self.folder, version)
        if not manifest.deltas_follow:
            check_file(self.folder, manifest)
            return manifest
        if self._copy is None:
            size = chain(self.folder, version)[0].file_size
            self._copy = HostCopy(self.folder, size=size, timeout_s=self._timeout_s)
        self._copy.bring_to(manifest)
        return manifest

    def open(self, version: int) -> tuple[PublicationManifest, dict[str, Tensor]]:
        """Return a fetched version's manifest and its tensors, locked until ``release``.

        Raises:
            ValueError: the version was not fetched, or a later version has replaced it.
        """
        manifest = read_manifest(self.folder, version)
        if not manifest.deltas_follow:
            self.release()
            self._held = _hold(self.folder / manifest.file)
            return manifest, map_tensors(self.folder / manifest.file)
        if self._copy is None:
            raise ValueError(f"version {version} was not fetched")
        return manifest, self._copy.open(manifest)

    def release(self, *, distrust: bool = False) -> None:
        """Unlock the opened version; with ``distrust``, mark the host's copy as dirty."""
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._copy is not None:
            self._copy.release(distrust=distrust)

    def close(self) -> None:
        """Close the host's copy; the last reader to close it removes it."""
        self.release()
        if self._copy is not None:
            self._copy.close()
            self._copy = None


def _hold(path: Path) -> BinaryIO:
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


class HostCopy:
    """One copy of a folder's newest tensors, shared by all receivers on a host.

    The copy is in shared memory, or on disk if shared memory is too small. It is changed in place
    under a lock and is marked dirty meanwhile. A copy that is found dirty is made anew.
    """

    def __init__(self, folder: Path, *, size: int, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        key = xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
        # Room for two: a full version is written beside the version that it replaces.
        self._place = SharedFolder(f"copy-{key}", room=2 * size)
        self._lock = self._place.path / "lock"
        self._tensors = self._place.path / "tensors.safetensors"
        self._reading: BinaryIO | None = None

    def bring_to(self, manifest: PublicationManifest) -> None:
        """Update the copy to a version, by deltas where possible.

        Raises:
            ValueError: a file is damaged, or the result differs from the published tensors.
        """
        with acquire(self._lock, exclusive=True, timeout_s=self._timeout_s):
            have = self._state()
            if have == manifest.digest:
                return
            steps = chain(self._folder, manifest.version, have=have)
            paths = [check_file(self._folder, step) for step in steps]
            self._set_state(None)
            for step, path in zip(steps, paths, strict=True):
                self._take(step, path)
            self._verify(manifest)
            self._set_state(manifest.digest)

    def _take(self, step: PublicationManifest, path: Path) -> None:
        if step.kind == FULL:
            partial = self._tensors.with_suffix(".partial")
            shutil.copyfile(path, partial)
            partial.rename(self._tensors)
            return
        tensors = map_tensors(self._tensors, writable=True)
        sent = map_tensors(path)
        for name, form in step.forms.items():
            if form == SAME:
                continue
            if name not in tensors or name not in sent:
                raise ValueError(f"{describe(path)} does not fit the version before it: {name}")
            target, source = raw_bytes(tensors[name]), raw_bytes(sent[name])
            if form == DELTA:
                try:
                    delta.apply(source, target)
                except ValueError as error:
                    raise ValueError(f"{path.name}: {name}: {error}") from error
            elif len(source) == len(target):
                target[:] = source
            else:
                raise ValueError(f"{describe(path)} does not fit the version before it: {name}")

    def _verify(self, manifest: PublicationManifest) -> None:
        tensors = map_tensors(self._tensors)
        wrong = sorted(tensors.keys() ^ manifest.tensors.keys())
        wrong += [n for n, t in tensors.items() if digest_of(t) != manifest.tensors.get(n)]
        if wrong:
            raise ValueError(
                f"this host's copy of version {manifest.version} is wrong: {', '.join(wrong[:3])} "
                "differ from the published tensors"
            )

    def open(self, manifest: PublicationManifest) -> dict[str, Tensor]:
        """Return the tensors of a version, locked until ``release``."""
        self.release()
        self._reading = acquire(self._lock, exclusive=False, timeout_s=self._timeout_s)
        if self._state() != manifest.digest:
            self.release()
            raise ValueError(
                f"the copy in {self._tensors.parent} no longer holds version {manifest.version}"
            )
        return map_tensors(self._tensors)

    def release(self, *, distrust: bool = False) -> None:
        """Unlock the copy; with ``distrust``, mark it dirty."""
        if self._reading is not None:
            if distrust:
                self._set_state(None)
            self._reading.close()
            self._reading = None

    def close(self) -> None:
        """Close the copy; the last process to close it removes it."""
        self._place.close()

    def _state(self) -> str | None:
        """Return the copy's ``PublicationManifest.digest``; None if it is dirty or missing."""
        try:
            digest = json.loads((self._place.path / "state.json").read_bytes())["digest"]
        except FileNotFoundError:
            return None
        return str(digest) if digest and self._tensors.is_file() else None

    def _set_state(self, digest: str | None) -> None:
        with whole_or_nothing(self._place.path / "state.json") as file:
            file.write(json.dumps({"digest": digest}).encode())
