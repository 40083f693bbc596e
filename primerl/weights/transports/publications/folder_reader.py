"""Readers of publications, from their files or from a host's copy that deltas are applied to."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

import attrs
from torch import Tensor

from primerl._common.digests import HashedTensor, TensorDigest
from primerl._common.tensor_files import MappedFiles
from primerl._common.threads import BoundedThreads, thread_count
from primerl.weights.transports.publications.host_copy import HostCopy
from primerl.weights.transports.publications.manifests import (
    PublicationManifest,
    chain,
    check_file,
    describe,
    hold,
    read_manifest,
    read_parts,
    timeout_of,
)


class FolderReader:
    """Reader of a folder of publications for one receiver.

    ``fetch`` brings a version to this host, checks it and maps it into memory. ``open`` locks the
    version while its tensors are loaded, and ``release`` unlocks it. An engine pauses only from
    ``open`` to ``release``, so ``fetch`` does all that can be done before: also the hashing.

    Args:
        folder: the folder of the publications.
        needs: whether the receiver needs a tensor, by its name; others are not read.
        timeout_s: how long to wait for a lock that another process of this host holds; by default
            ``timeout_of`` the publication's bytes.
        threads: how many threads read, patch and hash; by default ``thread_count()``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        needs: Callable[[str], bool] = lambda _: True,
        timeout_s: float | None = None,
        threads: int | None = None,
    ) -> None:
        self.folder = folder
        self._needs = needs
        self._threads = thread_count() if threads is None else threads
        self._timeout_s = timeout_s
        self._copy: HostCopy | None = None
        self._held: list[BinaryIO] = []
        self._files = MappedFiles()
        self._fetched: tuple[PublicationManifest, dict[Path, PublicationManifest]] | None = None
        self._elsewhere: dict[str, Tensor] = {}
        self.hashed: dict[int, HashedTensor] = {}
        """The fetched tensors that the receiver needs, with their digests, by ``id``."""

    def fetch(self, version: int) -> PublicationManifest:
        """Bring a version to this host, read the tensors that the receiver needs, and check them.

        Raises:
            ValueError: a file is missing, damaged, or does not follow from its parent.
            RuntimeError: this host has no room for the tensors.
            TimeoutError: another process held a lock for too long.
        """
        self._forget()
        manifest, parts = self._read_manifests(version)
        if manifest.copied:
            if self._copy is None:
                self._copy = self._host_copy(parts)
            paths = self._copy.bring_to(parts)
        else:
            paths = [check_file(place, part) for place, part in parts.items()]
        self._fetched = manifest, parts
        try:
            self._lock(parts)  # so that no later version overwrites what is read
            self._read(paths, list(parts.values()))
        except BaseException:
            self._forget()
            raise
        finally:
            self._unlock()
        return manifest

    def has_fetched(self, version: int) -> bool:
        """Return whether a version was fetched and not released."""
        return self._fetched is not None and self._fetched[0].version == version

    def _host_copy(self, parts: Mapping[Path, PublicationManifest]) -> HostCopy:
        size = sum(chain(place, part.version)[0].file_size for place, part in parts.items())
        tensors = [one for part in parts.values() for one in part.tensors.items()]
        needed = sum(digest.nbytes for name, digest in tensors if self._needs(name))
        return HostCopy(
            self.folder,
            needs=self._needs,
            # Room for two: a full version is written beside the version that it replaces.
            room=2 * needed,
            size=size,
            timeout_s=timeout_of(size) if self._timeout_s is None else self._timeout_s,
            threads=self._threads,
        )

    def _read(self, paths: Sequence[Path], parts: Sequence[PublicationManifest]) -> None:
        """Map the files, and read and hash the tensors that are needed.

        Raises:
            ValueError: a tensor differs from the published one, or a later version has replaced
                the file.
        """
        reading: list[tuple[str, Path, TensorDigest | None, Future[HashedTensor]]] = []
        with BoundedThreads(self._threads) as threads:
            for path, part in zip(paths, parts, strict=True):
                for name, tensor in self._files.tensors(path).items():
                    if self._needs(name):
                        task = threads.submit(HashedTensor.of, tensor)
                        reading.append((name, path, part.tensors.get(name), task))
                    elif name in part.tensors:
                        self._elsewhere[name] = tensor.to("meta")
        for name, path, published, task in reading:
            one = task.result()
            if one.digest != published:
                raise ValueError(f"{describe(path)} is altered: {name} has another digest")
            self.hashed[id(one.tensor)] = one

    def _read_manifests(
        self, version: int
    ) -> tuple[PublicationManifest, dict[Path, PublicationManifest]]:
        """Return a version's manifest, and those of its parts by folder."""
        if self._fetched is not None and self.has_fetched(version):
            return self._fetched
        manifest = read_manifest(self.folder, version)
        return manifest, read_parts(self.folder, manifest)

    def open(self, version: int) -> tuple[PublicationManifest, dict[str, Tensor]]:
        """Return a fetched version's manifest and its tensors, locked until ``release``.

        The manifest lists the tensors of all parts. Tensors that the receiver does not need are on
        the ``meta`` device: they have a shape and a dtype, but no elements.

        Raises:
            ValueError: the version was not fetched, or a later version has replaced it.
        """
        manifest, parts = self._read_manifests(version)
        listed = {name: one for part in parts.values() for name, one in part.tensors.items()}
        whole = attrs.evolve(manifest, tensors=listed)
        self._unlock()
        paths = self._lock(parts)
        tensors: dict[str, Tensor] = {}
        for path in paths:
            tensors |= self._files.tensors(path)
        return whole, tensors | self._elsewhere

    def _lock(self, parts: Mapping[Path, PublicationManifest]) -> list[Path]:
        """Lock the files of a version until ``_unlock``; return their paths."""
        if not all(part.copied for part in parts.values()):
            paths = [place / part.file for place, part in parts.items()]
            self._held = [hold(path) for path in paths]
            return paths
        if self._copy is None:
            version = next(iter(parts.values())).version
            raise ValueError(f"version {version} was not fetched")
        return self._copy.lock(parts)

    def release(self, *, distrust: bool = False) -> None:
        """Unlock the opened version; with ``distrust``, mark the host's copy as dirty."""
        self._unlock(distrust=distrust)
        self._forget()

    def _forget(self) -> None:
        self._files.forget()
        self._fetched = None
        self._elsewhere = {}
        self.hashed = {}

    def _unlock(self, *, distrust: bool = False) -> None:
        while self._held:
            self._held.pop().close()
        if self._copy is not None:
            self._copy.release(distrust=distrust)

    def close(self) -> None:
        """Close the host's copy; the last reader to close it removes it."""
        self.release()
        if self._copy is not None:
            self._copy.close()
            self._copy = None
