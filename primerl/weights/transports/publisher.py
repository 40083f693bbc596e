"""The trainer's side of a folder of publications: full versions and deltas."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.digests import TensorDigest, digest_of, raw_bytes
from primerl._common.tensor_files import as_tensor, write_tensors
from primerl.weights.transports import delta
from primerl.weights.transports.publications import (
    DELTA,
    FULL,
    SAME,
    Manifest,
    commit,
    manifest_path,
    retain,
    write_full,
)


@attrs.define
class _Sent:
    """What the last publication held: the base of the next delta."""

    manifest: Manifest
    layout: dict[str, TensorLayout]
    tensors: dict[str, np.ndarray]


class Publisher:
    """Writes versions into a folder, in full or as deltas.

    For deltas it keeps a copy of the last version in memory, as it was sent.

    Args:
        folder: created if it does not exist.
        encoding: ``"full"``, or ``"delta"``: lossless, with a full one every ``snapshot_every``.
        in_memory: the folder is in memory. Each full version is written over the file of the one
            before the last, because allocating memory costs more than writing to it.

    Raises:
        ValueError: an unknown encoding, or a ``snapshot_every`` below 1.
    """

    def __init__(
        self,
        folder: Path,
        *,
        encoding: str = FULL,
        snapshot_every: int = 16,
        in_memory: bool = False,
    ) -> None:
        if encoding not in (FULL, DELTA):
            raise ValueError(f'encoding must be "full" or "delta", got {encoding!r}')
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every must be at least 1, got {snapshot_every}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._deltas = encoding == DELTA
        self._spare = folder / ".spare" if in_memory and not self._deltas else None
        self._snapshot_every = snapshot_every
        self._since_snapshot = 0
        self._sent: _Sent | None = None
        self.encode_s = 0.0
        """Of the last publication: seconds spent on finding what changed, digests included."""

    def write(
        self,
        version: int,
        layout: Mapping[str, TensorLayout],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Manifest:
        """Publish a version.

        Raises:
            ValueError: the stream is not what ``layout`` says; nothing is published.
        """
        sent, self._sent = self._sent, None  # after an error there is no base
        self.encode_s = 0.0
        if sent and self._follows(sent, version, layout):
            manifest, kept = self._write_delta(version, layout, tensors, sent), sent.tensors
            self._since_snapshot += 1
        else:
            kept = {}
            manifest = write_full(
                self.folder,
                version,
                layout,
                self._keeping(tensors, kept) if self._deltas else tensors,
                deltas_follow=self._deltas,
                spare=self._spare,
            )
            self._since_snapshot = 0
        if self._deltas:
            self._sent = _Sent(manifest, dict(layout), kept)
        self.retain(manifest)
        return manifest

    def retain(self, manifest: Manifest, *, keep: int | None = None) -> None:
        """Remove what is useless after a publication; see ``publications.retain``."""
        retain(self.folder, manifest, keep=keep, spare=self._spare)

    def rewrite_whole(self) -> Manifest:
        """Publish the last version again, in full, from the copy that was kept for deltas.

        Raises:
            ValueError: no delta was published last.
        """
        if self._sent is None:
            raise ValueError("there is no copy of the last version, which was not a delta")
        sent = self._sent
        tensors = ((n, as_tensor(sent.tensors[n], entry)) for n, entry in sent.layout.items())
        version = sent.manifest.version
        sent.manifest = write_full(self.folder, version, sent.layout, tensors, deltas_follow=True)
        self._since_snapshot = 0
        self.retain(sent.manifest)
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
            kept[name] = raw_bytes(tensor).copy()  # the trainer changes its own
            yield name, tensor

    def _write_delta(
        self,
        version: int,
        layout: Mapping[str, TensorLayout],
        tensors: Iterable[tuple[str, Tensor]],
        sent: _Sent,
    ) -> Manifest:
        digests: dict[str, TensorDigest] = {}
        forms: dict[str, str] = {}
        wire: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in layout or name in digests:
                raise ValueError(f"version {version}: {name} came twice or is not in the layout")
            started = time.perf_counter()
            digests[name] = digest_of(tensor)
            if digests[name] == sent.manifest.tensors[name]:
                forms[name] = SAME
            else:
                forms[name], wire[name] = _difference(sent.tensors[name], raw_bytes(tensor))
            self.encode_s += time.perf_counter() - started
        if missing := sorted(layout.keys() - digests.keys()):
            raise ValueError(f"version {version}: not sent: {', '.join(missing[:5])}")
        path = self.folder / f"{version:08d}.{DELTA}.safetensors"
        sizes = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in wire.items()}
        write_tensors(path, sizes, wire.items())
        return commit(
            self.folder,
            path,
            version,
            digests,
            deltas_follow=True,
            parent=sent.manifest,
            forms=forms,
        )


def _difference(old: np.ndarray, new: np.ndarray) -> tuple[str, Tensor]:
    """The form in which ``new`` is sent, and its bytes; ``old`` becomes ``new``."""
    encoded = delta.encode(old, new)
    old[:] = new
    if encoded is None:
        return FULL, torch.from_numpy(new.copy())
    return DELTA, torch.from_numpy(encoded)
