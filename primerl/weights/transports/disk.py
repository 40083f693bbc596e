"""``Disk``, a transport through a folder that the trainer and the engines share."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import Quantizer, checkpoint_layout, checkpoint_tensors
from primerl._common.ranks import is_first_rank, on_first_rank_gathering
from primerl._common.shared_folder import shared_memory
from primerl.weights.transports.publications import DELTA, PublicationManifest, manifest_path
from primerl.weights.transports.publisher import Publisher
from primerl.weights.transports.receipts import (
    Fetcher,
    Receipt,
    check_engines,
    check_receipts,
    on_all_ranks,
)


class Disk:
    """A transport that publishes a model's weights through a folder, local or on a network.

        transport = weights.Disk(model, engine, folder="/shared/run/weights", encoding="delta")
        receipt = transport.publish(version=1)

    Each version is a safetensors file and a manifest of digests, visible once it is complete. With
    ``encoding="delta"``, only the 16-bit words that changed are sent, without loss. Each host keeps
    one copy of the tensors in shared memory, which its engines update with the deltas and load
    from. The folder keeps the last full version and all later ones, for engines that missed
    versions or join late.

    All ranks of a sharded trainer create a transport and call ``publish``; only rank 0 has engines.

    Args:
        model: the trainer's model.
        engines: the engines that serve the model, on rank 0.
        folder: a folder that the engines see at the same path; may be None on ranks other than 0.
        encoding: ``"full"`` or ``"delta"``.
        dtype: the dtype in which parameters are sent, usually the engines' own; None keeps the
            trainer's.
        quantize: ``fp8.CheckpointQuantizer``, for engines of a quantized checkpoint. Deltas are
            between quantized versions.
        snapshot_every: with ``"delta"``, every ``snapshot_every``-th version is published in full.
        timeout_s: the timeout of loading a version.

    Raises:
        ValueError: an argument is out of range, or rank 0 has no engine or folder.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: Fetcher,
        folder: str | os.PathLike[str] | None,
        encoding: Literal["full", "delta"] = "full",
        dtype: torch.dtype | None = None,
        quantize: Quantizer | None = None,
        snapshot_every: int = 16,
        timeout_s: float = 600.0,
    ) -> None:
        check_engines(engines)
        self._model = model
        self._engines = engines
        self._dtype = dtype
        self._quantize = quantize
        self._timeout_s = timeout_s
        self._publisher: Publisher | None = None  # ranks other than 0 only take part in gathering
        if is_first_rank():
            if folder is None:
                raise ValueError("folder is None; rank 0 writes the weights, so pass it a path")
            self._publisher = Publisher(
                Path(folder),
                encoding=encoding,
                snapshot_every=snapshot_every,
                in_memory=Path(folder).resolve().is_relative_to(shared_memory().resolve()),
            )

    def publish(self, version: int) -> Receipt:
        """Load the weights of ``version`` into every engine and check that they arrived.

        If a delta does not arrive, the full version is published.

        Raises:
            RuntimeError: the weights did not arrive; the message says which check failed, and
                where.
        """
        tensors = _Timed(
            checkpoint_tensors(self._model, dtype=self._dtype, quantize=self._quantize)
        )
        receipt = on_first_rank_gathering(lambda: self._publish(version, tensors), tensors)
        return on_all_ranks(receipt or Receipt(version=version))

    def _publish(self, version: int, tensors: "_Timed") -> Receipt:
        publisher = self._publisher
        assert publisher is not None, "rank 0 has a publisher"
        started = time.perf_counter()
        layout = checkpoint_layout(self._model, dtype=self._dtype, quantize=self._quantize)
        manifest = publisher.write(version, layout, tensors)
        total = time.perf_counter() - started
        seconds = {"gather": tensors.seconds, "encode": publisher.encode_s}
        seconds["write"] = total - sum(seconds.values())
        receipt = _receipt(publisher.folder, manifest, seconds)
        started, fallback = time.perf_counter(), None
        try:
            servers = self._load(publisher.folder, manifest)
        except RuntimeError as error:
            if manifest.kind != DELTA:
                raise
            fallback = str(error)
            manifest = publisher.rewrite_whole()
            written = _receipt(publisher.folder, manifest, seconds)
            receipt = attrs.evolve(written, bytes=receipt.bytes + written.bytes)
            servers = self._load(publisher.folder, manifest)
        seconds["load"] = time.perf_counter() - started
        publisher.retain(manifest, keep=publisher.snapshot)
        return attrs.evolve(receipt, servers=servers, fallback=fallback)

    def _load(self, folder: Path, manifest: PublicationManifest) -> dict[str, list[dict[str, Any]]]:
        """Have every engine load a publication; check and return the workers' receipts."""
        version = manifest.version
        update = {"folder": str(folder.resolve()), "version": version}
        servers: dict[str, list[dict[str, Any]]] = {}
        for engine in self._engines:
            servers |= engine.load_weights(update, version=version, timeout_s=self._timeout_s)
        check_receipts(
            servers, version=version, digest=manifest.digest, tensors=len(manifest.tensors)
        )
        return servers


def _receipt(folder: Path, manifest: PublicationManifest, seconds: dict[str, float]) -> Receipt:
    return Receipt(
        version=manifest.version,
        kind=manifest.kind,
        digest=manifest.digest,
        tensors=len(manifest.tensors),
        bytes=manifest.file_size + manifest_path(folder, manifest.version).stat().st_size,
        seconds=seconds,
    )


@attrs.define(eq=False)
class _Timed:
    """Iterator that moves tensors to the CPU and measures the seconds that gathering takes."""

    _items: Iterator[tuple[str, Tensor]]
    seconds: float = 0.0

    def __iter__(self) -> "_Timed":
        return self

    def __next__(self) -> tuple[str, Tensor]:
        started = time.perf_counter()
        try:
            name, tensor = next(self._items)
            return name, tensor.cpu()  # copied once, then hashed, compared and written on the CPU
        finally:
            self.seconds += time.perf_counter() - started
