"""A host's copy of published tensors, which deltas are applied to."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from primerl._common.digests import digest_of, raw_bytes
from primerl._common.files import whole_or_nothing
from primerl._common.shared_folder import SharedFolder, acquire
from primerl._common.tensor_files import copy_tensors, copy_without_tensors, map_tensors
from primerl._common.threads import BoundedThreads
from primerl.weights.transports.publications import delta
from primerl.weights.transports.publications.manifests import (
    DELTA,
    FULL,
    SAME,
    PublicationManifest,
    chain,
    check_file,
    describe,
)
from primerl.weights.transports.publications.remote_file import RemoteFile


class HostCopy:
    """One copy of a folder's newest tensors, shared by all receivers on a host.

    It holds the tensors that at least one of them needs. The copy is in shared memory, or on disk
    if shared memory is too small. It has a file for each part of a publication. Receivers that
    bring it to a version at the same time share the work: each takes the parts that no other is at.

    Args:
        folder: the folder of the publications.
        needs: whether the receiver needs a tensor, by its name.
        room: bytes that must be free in shared memory.
        size: bytes of a full version.
        timeout_s: how long to wait for a lock.
        threads: how many threads copy, patch and hash.
    """

    def __init__(
        self,
        folder: Path,
        *,
        needs: Callable[[str], bool],
        room: int,
        size: int,
        timeout_s: float,
        threads: int,
    ) -> None:
        self._needs = needs
        self._threads = threads
        self._timeout_s = timeout_s
        self._allowance = f"{size / 1e9:.1f} GB have {self._timeout_s:.0f} s"
        self._folder = folder
        key = xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
        self._place = SharedFolder(f"copy-{key}", room=room)
        self._parts: dict[Path, CopiedPart] = {}

    def bring_to(self, parts: Mapping[Path, PublicationManifest]) -> list[Path]:
        """Update the copy to a version, by deltas where possible; return its files.

        Raises:
            ValueError: a file is damaged, or the result differs from the published tensors.
            RuntimeError: there is no room for the tensors.
            TimeoutError: another process held a part for too long.
        """
        for place in parts:
            if place not in self._parts:
                self._parts[place] = CopiedPart(
                    place,
                    copies=self._place.path / place.relative_to(self._folder),
                    needs=self._needs,
                    threads=self._threads,
                )
        # At random, so that not all hosts read from the same trainer's host at the same time.
        order = random.SystemRandom().sample(list(parts), len(parts))
        left = [place for place in order if not self._parts[place].try_to_bring_to(parts[place])]
        for place in left:
            try:
                self._parts[place].bring_to(parts[place], timeout_s=self._timeout_s)
            except TimeoutError as error:
                raise TimeoutError(f"{error}: {self._allowance}") from None
        return [self._parts[place].path for place in parts]

    def lock(self, parts: Mapping[Path, PublicationManifest]) -> list[Path]:
        """Lock the copy of a version until ``release``; return its files."""
        for place, manifest in parts.items():
            if place not in self._parts:
                raise ValueError(f"version {manifest.version} was not fetched")
            self._parts[place].lock(manifest, timeout_s=self._timeout_s)
        return [self._parts[place].path for place in parts]

    def release(self, *, distrust: bool = False) -> None:
        """Unlock the copy; with ``distrust``, mark it dirty."""
        for part in self._parts.values():
            part.release(distrust=distrust)

    def close(self) -> None:
        """Close the copy; the last process to close it removes it."""
        self._place.close()


class CopiedPart:
    """A host's copy of one part of the publications, changed in place under a lock.

    It is marked dirty meanwhile. A copy that is found dirty is made anew. Tensors that no receiver
    has needed are holes in its file.

    Args:
        folder: the folder of the part's publications.
        copies: the folder of the host's copies.
        needs: whether the receiver needs a tensor, by its name.
        threads: how many threads copy, patch and hash.
    """

    def __init__(
        self, folder: Path, *, copies: Path, needs: Callable[[str], bool], threads: int
    ) -> None:
        self._needs = needs
        self._threads = threads
        self._folder = folder
        copies.mkdir(mode=0o700, exist_ok=True)
        self._lock = copies / "lock"
        self._adding = copies / "adding"
        """Locked by the receiver that adds tensors, which also has a share of ``_lock``."""
        self.path = copies / "tensors.safetensors"
        self._state_file = copies / "state.json"
        # Not in the state file: a reader may mark the copy dirty while another adds tensors.
        self._names_file = copies / "names.json"
        self._fetched = copies / "fetched"
        """Files from another host, while the copy is updated."""
        self._reading: BinaryIO | None = None

    def try_to_bring_to(self, manifest: PublicationManifest) -> bool:
        """Update the copy unless another process does; return whether the copy has the version."""
        try:
            self.bring_to(manifest, timeout_s=0.0)
        except TimeoutError:
            return False
        return True

    def bring_to(self, manifest: PublicationManifest, *, timeout_s: float) -> None:
        """Update the copy to a version, by deltas where possible, and add what it lacks.

        Raises:
            ValueError: a file is damaged, or the result differs from the published tensors.
            RuntimeError: there is no room for the tensors.
            TimeoutError: another process held the copy for too long.
        """
        needed = self._needed(manifest)
        with acquire(self._lock, exclusive=False, timeout_s=timeout_s):
            if self._digest() == manifest.digest:  # others may read it at the same time
                if not needed <= self._names():
                    with acquire(self._adding, exclusive=True, timeout_s=timeout_s):
                        self._add(manifest, needed)
                return
        with acquire(self._lock, exclusive=True, timeout_s=timeout_s):
            if self._digest() != manifest.digest:
                self._update(manifest, needed)
            self._add(manifest, needed)

    def _update(self, manifest: PublicationManifest, needed: Set[str]) -> None:
        """Bring the tensors that the copy holds to a version; if it is made anew, also others."""
        names = self._names() & manifest.tensors.keys()
        with self._steps(manifest.version, have=self._digest()) as steps:
            first, path = steps[0]
            if first.kind == FULL:
                names |= needed
            self._note(None)
            self._note_names(names)
            if first.kind == FULL:
                copy_without_tensors(path, self.path)
            self._take(steps, names)
            self._verify(manifest, names)
            self._note(manifest.digest)

    def _add(self, manifest: PublicationManifest, needed: Set[str]) -> None:
        """Add the tensors that are needed and missing, in the version of the copy.

        The tensors that the copy holds stay as they are, also if this fails.
        """
        names = self._names()
        missing = needed - names
        if missing:
            with self._steps(manifest.version, have=None) as steps:
                self._take(steps, missing)
            self._verify(manifest, missing)
            self._note_names(names | missing)

    @contextlib.contextmanager
    def _steps(
        self, version: int, *, have: str | None
    ) -> Iterator[list[tuple[PublicationManifest, Path]]]:
        """Yield the publications that lead to a version, with their files, which are checked.

        Files in another host's memory are fetched until the context ends; of a full version, only
        the header.
        """
        steps = chain(self._folder, version, have=have)
        try:
            yield [(step, self._file_of(step)) for step in steps]
        finally:
            shutil.rmtree(self._fetched, ignore_errors=True)

    def _file_of(self, step: PublicationManifest) -> Path:
        if step.source is None:
            return check_file(self._folder, step)
        self._fetched.mkdir(exist_ok=True)  # a killed process may have left it
        path = self._fetched / step.file
        try:
            if step.kind == FULL:
                self._remote(step).copy_without_tensors(path)
            else:
                self._remote(step).copy(path)
        except OSError as error:
            raise self._no_room(describe(self._folder / step.file), error) from error
        return check_file(self._fetched, step)

    def _remote(self, step: PublicationManifest) -> RemoteFile:
        return RemoteFile(self._folder, step, threads=self._threads)

    def _take(self, steps: Sequence[tuple[PublicationManifest, Path]], names: Set[str]) -> None:
        for step, path in steps:
            if step.kind == FULL:
                self._copy(step, path, names)
            else:
                self._patch(step, path, names)

    def _copy(self, step: PublicationManifest, path: Path, names: Set[str]) -> None:
        where = describe(self._folder / step.file)
        try:
            if step.source is None:
                copy_tensors(path, self.path, sorted(names), threads=self._threads)
            else:
                self._remote(step).copy_tensors(path, self.path, sorted(names))
        except OSError as error:
            raise self._no_room(f"{len(names)} tensors of {where}", error) from error

    def _no_room(self, what: str, error: OSError) -> RuntimeError:
        return RuntimeError(f"{what} could not be copied into {self.path.parent}: {error}")

    def _patch(self, step: PublicationManifest, path: Path, names: Set[str]) -> None:
        tensors = map_tensors(self.path, writable=True)
        sent = map_tensors(path)
        changed = [name for name in names if step.forms.get(name) != SAME]
        if unknown := [name for name in changed if name not in tensors or name not in sent]:
            where = describe(self._folder / step.file)
            raise ValueError(f"{where} does not fit the version before it: {unknown[0]}")
        with BoundedThreads(self._threads) as threads:
            patches = {
                name: threads.submit(
                    _patch, raw_bytes(sent[name]), raw_bytes(tensors[name]), step.forms[name]
                )
                for name in changed
            }
        for name, patch in patches.items():
            try:
                patch.result()
            except ValueError as error:
                raise ValueError(f"{path.name}: {name}: {error}") from error

    def _verify(self, manifest: PublicationManifest, names: Set[str]) -> None:
        tensors = map_tensors(self.path)
        with BoundedThreads(self._threads) as threads:
            found = {
                name: threads.submit(digest_of, tensors[name]) for name in names & tensors.keys()
            }
        wrong = sorted(tensors.keys() ^ manifest.tensors.keys())
        wrong += [n for n, digest in found.items() if digest.result() != manifest.tensors.get(n)]
        if wrong:
            raise ValueError(
                f"this host's copy of version {manifest.version} is wrong: {', '.join(wrong[:3])} "
                "differ from the published tensors"
            )

    def lock(self, manifest: PublicationManifest, *, timeout_s: float) -> None:
        """Lock the copy until ``release``.

        Raises:
            ValueError: the copy no longer holds the version.
        """
        self.release()
        self._reading = acquire(self._lock, exclusive=False, timeout_s=timeout_s)
        if self._digest() != manifest.digest or not self._needed(manifest) <= self._names():
            self.release()
            raise ValueError(
                f"the copy in {self.path.parent} no longer holds version {manifest.version}"
            )

    def release(self, *, distrust: bool = False) -> None:
        """Unlock the copy; with ``distrust``, mark it dirty."""
        if self._reading is not None:
            if distrust:
                self._note(None)
            self._reading.close()
            self._reading = None

    def _needed(self, manifest: PublicationManifest) -> set[str]:
        return {name for name in manifest.tensors if self._needs(name)}

    def _digest(self) -> str | None:
        """Return the copy's ``PublicationManifest.digest``; None if it is dirty or missing."""
        try:
            digest = json.loads(self._state_file.read_bytes())["digest"]
        except FileNotFoundError:
            return None
        return str(digest) if digest and self.path.is_file() else None

    def _note(self, digest: str | None) -> None:
        with whole_or_nothing(self._state_file) as file:
            file.write(json.dumps({"digest": digest}).encode())

    def _names(self) -> set[str]:
        """Return the tensors that the copy holds or, if it is dirty, has to hold once made anew."""
        try:
            return set(json.loads(self._names_file.read_bytes()))
        except FileNotFoundError:
            return set()

    def _note_names(self, names: Set[str]) -> None:
        with whole_or_nothing(self._names_file) as file:
            file.write(json.dumps(sorted(names)).encode())


def _patch(source: np.ndarray, target: np.ndarray, form: str) -> None:
    """Turn a tensor's old bytes into the new ones, in place.

    Raises:
        ValueError: ``source`` is damaged, or is for another tensor.
    """
    if form == DELTA:
        delta.apply(source, target)
    elif len(source) == len(target):
        target[:] = source
    else:
        raise ValueError(f"{len(source)} bytes were sent, the tensor has {len(target)}")
