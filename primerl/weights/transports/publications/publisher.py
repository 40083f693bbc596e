"""``Publisher``, which writes full versions and deltas into a folder of publications."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.digests import (
    TensorDigest,
    digest_of,
    digest_of_all,
    digest_of_file,
    raw_bytes,
)
from primerl._common.files import whole_or_nothing
from primerl._common.tensor_files import as_tensor, write_tensors
from primerl._common.threads import BoundedThreads
from primerl.weights.transports.publications import delta
from primerl.weights.transports.publications.manifests import (
    DELTA,
    FULL,
    SAME,
    FileSource,
    PublicationManifest,
    manifest_path,
)

_NAME = re.compile(rf"([0-9]{{8,}})\.(json|({FULL}|{DELTA})\.safetensors)")
_PARTIAL = re.compile(rf"\.({_NAME.pattern})\.[0-9]+\.partial")

SPARE = ".spare"


@attrs.define
class _Sent:
    """The content of the last publication, the base of the next delta."""

    manifest: PublicationManifest
    layout: dict[str, TensorLayout]
    tensors: dict[str, np.ndarray]


class Publisher:
    """Writer of versions into a folder, in full or as deltas.

    With deltas, it keeps a copy of the last version in memory, as it was sent.

    Args:
        folder: the folder for the publications, created if it does not exist.
        files: the folder for their tensors, if that is another one.
        source: from where other hosts read these tensors.
        encoding: ``"full"``, or ``"delta"`` for lossless deltas.
        snapshot_every: with deltas, every ``snapshot_every``-th version is full.
        in_memory: whether the tensors are in memory. If so, each full version is written over the
            file of the version before the last, because allocating memory costs more than writing
            to it.
        threads: how many threads encode deltas.

    Raises:
        ValueError: an unknown encoding, or a ``snapshot_every`` below 1.
    """

    def __init__(
        self,
        folder: Path,
        *,
        files: Path | None = None,
        source: FileSource | None = None,
        encoding: str = FULL,
        snapshot_every: int = 16,
        in_memory: bool = False,
        threads: int = 1,
    ) -> None:
        if encoding not in (FULL, DELTA):
            raise ValueError(f'encoding must be "full" or "delta", got {encoding!r}')
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every must be at least 1, got {snapshot_every}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files = folder if files is None else files
        self._source = source
        self._deltas = encoding == DELTA
        self._spare = self.files / SPARE if in_memory and not self._deltas else None
        self._snapshot_every = snapshot_every
        self._since_snapshot = 0
        self._sent: _Sent | None = None
        self._prepared: PublicationManifest | None = None
        self.snapshot: int | None = None
        """The last full version. Receivers need no version before it."""
        self._threads = threads
        self.seconds: dict[str, float] = {}
        """Seconds of the last version: ``gather`` waited for the tensors, ``encode`` for
        differences, digests included, and ``write`` did everything else."""

    def prepare(
        self,
        version: int,
        layout: Mapping[str, TensorLayout],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> PublicationManifest:
        """Write the tensors of a version, which ``commit`` publishes.

        Raises:
            ValueError: ``tensors`` does not match ``layout``; then nothing can be committed.
        """
        self._prepared = None
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        sent, self._sent = self._sent, None  # after an error, the copy is not a valid base
        self.seconds = {"gather": 0.0, "encode": 0.0}
        started = time.perf_counter()
        tensors = self._arriving(tensors)
        if sent and self._follows(sent, version, layout):
            manifest, kept = self._write_delta(version, layout, tensors, sent), sent.tensors
            self._since_snapshot += 1
        else:
            kept = {}
            manifest = self._write_full(
                version, layout, self._keeping(tensors, kept) if self._deltas else tensors
            )
        if self._deltas:
            self._sent = _Sent(manifest, dict(layout), kept)
        self._prepared = manifest
        self.seconds["write"] = time.perf_counter() - started - sum(self.seconds.values())
        return manifest

    def _arriving(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        iterator = iter(tensors)
        while True:
            started = time.perf_counter()
            one = next(iterator, None)
            self.seconds["gather"] += time.perf_counter() - started
            if one is None:
                return
            yield one

    def commit(self, *, parts: Mapping[str, str] | None = None) -> int:
        """Publish the version that was prepared, together with the ``parts`` of other ranks.

        Returns the size of the manifest in bytes.
        """
        assert self._prepared is not None, "prepare comes before commit"
        manifest = attrs.evolve(self._prepared, parts=dict(parts or {}))
        text = manifest.as_json()
        mode = 0o666 if manifest.source is None else 0o600  # the source's token is a secret
        path = manifest_path(self.folder, manifest.version)
        with whole_or_nothing(path, mode=mode) as file:
            file.write(text)
        self.retain(manifest)
        return len(text)

    def forget_before_snapshot(self) -> None:
        """Remove the files before the last full version, which receivers no longer need."""
        assert self._prepared is not None, "prepare comes before this"
        self.retain(self._prepared, keep=self.snapshot)

    def retain(self, manifest: PublicationManifest, *, keep: int | None = None) -> None:
        """Remove files that are no longer needed after the publication ``manifest``.

        These are partial files of an interrupted writer, versions later than ``manifest`` (of a run
        that was resumed from an earlier version), and versions before ``keep``, if it is given. In
        memory, the last of their tensor files is set aside, and the next publication overwrites it.
        """
        for folder in {self.folder, self.files}:
            self._retain_in(folder, manifest, keep)

    def _retain_in(self, folder: Path, manifest: PublicationManifest, keep: int | None) -> None:
        spare = self._spare if folder == self.files else None
        if spare is None:  # an earlier publisher may have left one
            (folder / SPARE).unlink(missing_ok=True)
        for partial in folder.glob(".*.partial"):
            if _PARTIAL.fullmatch(partial.name):
                partial.unlink(missing_ok=True)
        for path in folder.glob("[0-9]*"):
            match = _NAME.fullmatch(path.name)
            if match is None or path.is_dir():
                continue  # not a file of a publication
            version = int(match[1])
            superseded = version > manifest.version
            too_old = keep is not None and version < keep
            replaced = version == manifest.version and path.suffix != ".json"
            if superseded or too_old or (replaced and path.name != manifest.file):
                if spare is not None and path.suffix != ".json":
                    path.replace(spare)
                else:
                    path.unlink(missing_ok=True)

    def prepare_whole(self) -> PublicationManifest:
        """Write the last version again, in full, for ``commit``.

        Raises:
            ValueError: there is no such copy, because nothing was published with deltas on.
        """
        if self._sent is None:
            raise ValueError(
                "the last version can't be published again: a copy of it is kept only with "
                'encoding="delta"'
            )
        sent = self._sent
        tensors = ((n, as_tensor(sent.tensors[n], entry)) for n, entry in sent.layout.items())
        sent.manifest = self._write_full(sent.manifest.version, sent.layout, tensors)
        self._prepared = sent.manifest
        return sent.manifest

    def _follows(self, sent: _Sent, version: int, layout: Mapping[str, TensorLayout]) -> bool:
        return (
            version > sent.manifest.version
            and self._since_snapshot + 1 < self._snapshot_every
            and sent.layout == dict(layout)
            and manifest_path(self.folder, sent.manifest.version).is_file()
        )

    def _keeping(
        self, tensors: Iterable[tuple[str, Tensor]], kept: dict[str, np.ndarray]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            kept[name] = raw_bytes(tensor).copy()  # the trainer will change its tensor
            yield name, tensor

    def _write_full(
        self,
        version: int,
        layout: Mapping[str, TensorLayout],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> PublicationManifest:
        digests: dict[str, TensorDigest] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                digests[name] = digest_of(tensor)
                yield name, tensor

        path = self.files / f"{version:08d}.{FULL}.safetensors"
        write_tensors(path, layout, noted(), spare=self._spare)
        manifest = self._described(path, version, digests)
        self.snapshot = version
        self._since_snapshot = 0
        return manifest

    def _write_delta(
        self,
        version: int,
        layout: Mapping[str, TensorLayout],
        tensors: Iterable[tuple[str, Tensor]],
        sent: _Sent,
    ) -> PublicationManifest:
        encoding: dict[str, Future[_EncodedTensor]] = {}
        with BoundedThreads(self._threads) as threads:
            for name, tensor in tensors:
                if name not in layout or name in encoding:
                    raise ValueError(
                        f"version {version}: tensor {name} was given twice or is not in the layout"
                    )
                started = time.perf_counter()
                encoding[name] = threads.submit(
                    _encoded, tensor, sent.tensors[name], sent.manifest.tensors[name]
                )
                self.seconds["encode"] += time.perf_counter() - started
            started = time.perf_counter()
        self.seconds["encode"] += time.perf_counter() - started
        if missing := sorted(layout.keys() - encoding.keys()):
            raise ValueError(f"version {version}: missing tensors: {', '.join(missing[:5])}")
        encoded = {name: task.result() for name, task in encoding.items()}
        digests = {name: one.digest for name, one in encoded.items()}
        forms = {name: one.form for name, one in encoded.items()}
        wire = {name: one.wire for name, one in encoded.items() if one.wire is not None}
        path = self.files / f"{version:08d}.{DELTA}.safetensors"
        sizes = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in wire.items()}
        write_tensors(path, sizes, wire.items())
        return self._described(path, version, digests, parent=sent.manifest, forms=forms)

    def _described(
        self,
        path: Path,
        version: int,
        digests: dict[str, TensorDigest],
        *,
        parent: PublicationManifest | None = None,
        forms: dict[str, str] | None = None,
    ) -> PublicationManifest:
        """Return the manifest of a tensor file."""
        return PublicationManifest(
            version=version,
            kind=DELTA if parent else FULL,
            parent=parent.version if parent else None,
            parent_digest=parent.digest if parent else None,
            digest=digest_of_all(digests),
            file=path.name,
            file_size=path.stat().st_size,
            file_digest=digest_of_file(path) if parent else None,
            deltas_follow=self._deltas,
            tensors=digests,
            forms=forms or {},
            source=self._source,
        )


@attrs.frozen(eq=False)
class _EncodedTensor:
    """A tensor as a delta sends it."""

    digest: TensorDigest
    form: str
    wire: Tensor | None = None
    """The bytes that are sent; None if the tensor is the same as before."""


def _encoded(tensor: Tensor, old: np.ndarray, was: TensorDigest) -> _EncodedTensor:
    """Encode a tensor; overwrite its ``old`` bytes, of digest ``was``, with the new ones."""
    digest = digest_of(tensor)
    if digest == was:
        return _EncodedTensor(digest, SAME)
    new = raw_bytes(tensor)
    difference = delta.encode(old, new)
    old[:] = new
    if difference is None:
        return _EncodedTensor(digest, FULL, torch.from_numpy(new.copy()))
    return _EncodedTensor(digest, DELTA, torch.from_numpy(difference))
