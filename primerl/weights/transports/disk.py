"""``Disk``, a transport through a folder that the trainer and the engines share."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import (
    Quantizer,
    gathered_layers,
    layer_for_checkpoint,
    sized_layers,
)
from primerl._common.digests import digest_of_all
from primerl._common.folder_owner import FolderOwner
from primerl._common.host_memory import HostMemory
from primerl._common.progress import report
from primerl._common.ranks import (
    gloo_group,
    is_first_rank,
    on_every_rank,
    on_every_rank_gathering,
    on_first_rank,
)
from primerl._common.shared_folder import shared_memory
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl._common.threads import in_thread, thread_count
from primerl.weights.transports.publications.manifests import (
    DELTA,
    FULL,
    FileSource,
    PublicationManifest,
    part_name,
    remove_parts,
    timeout_of,
)
from primerl.weights.transports.publications.parts import PartWriter, WrittenPart
from primerl.weights.transports.publications.publisher import Publisher
from primerl.weights.transports.receipts import (
    Fetcher,
    Receipt,
    check_engines,
    check_receipts,
    on_all_ranks,
)
from primerl.weights.transports.shares import Shares, ranks_that_see, shares_of
from primerl.weights.transports.transport import Transport

_LEAST_LOAD_S = 600.0

_Layer = list[tuple[str, Tensor]]
"""The tensors of a layer, by name."""


class Disk(Transport):
    """A transport that publishes a model's weights through a folder, local or on a network.

        transport = weights.Disk(model, engine, folder="/shared/run/weights", encoding="delta")
        receipt = transport.publish(version=1)

    ``start`` publishes beside training: it gathers the weights into host memory, as much as this
    rank's part of a full version, and a thread of each rank encodes, writes and loads them. If a
    delta does not arrive, the full version is published.

    Each version is a safetensors file and a manifest of digests, visible once it is complete. With
    ``encoding="delta"``, only the 16-bit words that changed are sent, without loss. Each host keeps
    one copy of the tensors in shared memory, which its engines update with the deltas and load
    from. The folder keeps the last full version and all later ones, for engines that missed
    versions or join late.

    All ranks of a sharded trainer create a transport and call ``publish``; only rank 0 has engines.
    Each rank that sees the folder owns some of the layers: only it receives them whole, and it
    writes them into a subfolder, as a part of the version. Rank 0 has only the names and digests of
    the other ranks' tensors.

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
        timeout_s: the timeout of loading a version; by default 600 s, or more if a full version
            needs more at 100 MB/s, because a server that has missed versions loads one.

    Raises:
        ValueError: an argument is out of range, rank 0 has no engine or folder, or the model has
            adapters other than plain LoRA.
        RuntimeError: another run, or another transport, publishes into the folder.
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
        timeout_s: float | None = None,
    ) -> None:
        check_engines(engines)
        refuse_unsupported_adapters(model)
        if is_first_rank() and folder is None:
            raise ValueError("folder is None; rank 0 writes the weights, so pass it a path")
        self._model = model
        self._engines = engines
        self._dtype = dtype
        self._quantize = quantize
        self._timeout_s = timeout_s
        self._encoding = encoding
        self._snapshot_every = snapshot_every
        self._folder = Path(str(folder))
        self._owner: FolderOwner | None = None
        publisher: Publisher | None = None
        if is_first_rank():
            self._owner = FolderOwner(self._folder.absolute())
            self._owner.hold()
            try:
                publisher = self._new_publisher(self._folder)
            except BaseException:
                self._close()  # the error may keep this object alive, and so the folder in use
                raise
        self._parts = PartWriter(publisher=publisher)
        # Found with the first publication:
        self._writers: list[int] = []
        self._shares: Shares | None = None
        self._load_s = 0.0  # timeout of loading a version into one engine
        self._allowance = ""  # the same, as text
        self._limit_s = 0.0  # timeout of a publication
        self._host_memory = HostMemory()

    def _new_publisher(self, folder: Path) -> Publisher:
        files, source = self._place()
        return Publisher(
            folder,
            files=files,
            source=source,
            encoding=self._encoding,
            snapshot_every=self._snapshot_every,
            in_memory=(files or folder).resolve().is_relative_to(shared_memory().resolve()),
            threads=thread_count(processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        )

    def _place(self) -> tuple[Path | None, FileSource | None]:
        """Return where this rank writes tensors, and who sends them; None: into the folder."""
        return None, None

    def _prepare(self) -> None:
        if self._owner is not None:
            self._owner.hold()  # another run may own it now, if this process was stopped

    def _close(self) -> None:
        if self._owner is not None:
            self._owner.release()

    def _publish(self, version: int) -> Receipt:
        # Copied once, then hashed, compared and written on the CPU.
        gathered, layers = self._gathered(lambda layer: [(name, one.cpu()) for name, one in layer])
        return self._send(version, layers, gathered=gathered)

    def _start(self, version: int) -> "tuple[Callable[[], Receipt], Future[Receipt]]":
        """Copy this rank's part to host memory, which takes as much as a full version of it."""
        gathered, layers = self._gathered(lambda layer: self._host_memory.copied(layer))
        copies: list[_Layer] = []

        def copy() -> float:
            began = time.perf_counter()
            copies.extend(layers)
            return time.perf_counter() - began

        what = f"the copies of version {version} in the host memory of all ranks"
        copied_s = max(on_every_rank_gathering(copy, gathered, self._parts.group, what=what))
        sending = in_thread(
            lambda: self._send(version, copies, copied_s=copied_s),
            finishing=f"the publication of version {version}",
        )
        return lambda: self._awaited(sending, version), sending

    def _awaited(self, sending: "Future[Receipt]", version: int) -> Receipt:
        """Wait for a publication that a thread of each rank sends, and return its receipt.

        Raises:
            RuntimeError: it did not end in time, or it failed, on any rank.
        """
        report("publishing", f"version {version}")

        def ended() -> None:
            if not wait([sending], self._limit_s).done:
                raise RuntimeError(
                    f"version {version} was not published within {self._limit_s:.0f} s "
                    f"({self._allowance} to be loaded)"
                )
            sending.result()

        what = f"the publication of version {version} on all ranks"
        on_every_rank_gathering(ended, iter(()), self._agreeing(), what=what)
        return sending.result()

    def _gathered(
        self, to_host: Callable[[_Layer], _Layer]
    ) -> tuple[Iterator[object], Iterator[_Layer]]:
        """Return the collectives that gather layers, and the layers that this rank owns.

        All ranks iterate the collectives to the end, also after a failed conversion.
        """
        owned = self._divided().owned
        gathered = gathered_layers(self._model, owned, dtype=self._dtype, quantize=self._quantize)

        def converted(layer: dict[str, Tensor]) -> _Layer:
            return to_host(
                layer_for_checkpoint(self._model, layer, dtype=self._dtype, quantize=self._quantize)
            )

        return gathered, map(converted, gathered)

    def _send(
        self,
        version: int,
        layers: Iterable[_Layer],
        *,
        gathered: Iterable[object] = (),
        copied_s: float = 0.0,
    ) -> Receipt:
        """Write the layers, and have the engines load them.

        May run in a thread beside training, so it uses neither the model nor the default group.
        """
        assert self._shares is not None, "layers are gathered before"
        layout = self._shares.mine
        size = sum(one.nbytes for one in layout.values())

        def prepare(publisher: Publisher) -> tuple[PublicationManifest, dict[str, float]]:
            tensors = (one for layer in layers for one in layer)
            manifest = publisher.prepare(version, layout, tensors)
            return manifest, publisher.seconds | {"gather": copied_s + publisher.seconds["gather"]}

        written = self._parts.write(version, prepare, size=size, gathered=gathered)
        receipt = self._committed(version, written)
        started = time.perf_counter()
        servers, error = self._load(receipt)
        if error is not None:
            whole = self._parts.write(version, lambda one: (one.prepare_whole(), {}), size=size)
            again = self._committed(version, whole)
            receipt = attrs.evolve(again, bytes=receipt.bytes + again.bytes, fallback=error)
            servers, _ = self._load(receipt)
        seconds = {
            phase: max(part.seconds[phase] for part in written if part)
            for phase in ("gather", "encode", "write")
        }
        seconds["load"] = time.perf_counter() - started
        if self._parts.publisher is not None:
            self._parts.publisher.forget_before_snapshot()
        if is_first_rank():
            remove_parts(self._folder, kept=self._writers)
        receipt = attrs.evolve(receipt, servers=servers, seconds=seconds)
        return on_all_ranks(receipt, self._parts.group)

    def _committed(self, version: int, written: Sequence[WrittenPart | None]) -> Receipt:
        """Publish what all ranks have written."""
        found = [one for one in written if one is not None]
        digests = {name: digest for one in found for name, digest in one.tensors.items()}
        return Receipt(
            version=version,
            kind=DELTA if any(one.kind == DELTA for one in found) else FULL,
            digest=digest_of_all(digests),
            tensors=len(digests),
            bytes=self._parts.commit(written),
        )

    def _load(self, receipt: Receipt) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
        """Have every engine load a publication, and check the receipts of their workers.

        Returns the receipts, on rank 0, and the error if a delta did not arrive, on all ranks.
        """
        servers: dict[str, list[dict[str, Any]]] = {}
        version = receipt.version
        update = {"folder": str(self._folder.resolve()), "version": version}

        def load() -> None:
            for engine in self._engines:
                began = time.monotonic()
                try:
                    taken = engine.load_weights(update, version=version, timeout_s=self._load_s)
                except RuntimeError as error:
                    if time.monotonic() - began < self._load_s:
                        raise
                    raise RuntimeError(f"{error} ({self._allowance})") from error
                servers.update(taken)
            check_receipts(servers, version=version, digest=receipt.digest, tensors=receipt.tensors)

        def work() -> str | None:
            try:
                load()
            except RuntimeError as error:
                if receipt.kind != DELTA or receipt.fallback is not None:
                    raise
                servers.clear()
                return str(error)
            return None

        what = f"the loading of version {version}"
        return servers, on_first_rank(work, self._parts.group, what=what)

    def _divided(self) -> Shares:
        """Return the layers that each rank writes, found again when the model's tensors change."""
        if self._shares is not None and self._shares.still_fit(self._model, self._agreeing()):
            return self._shares
        size = sum(sized_layers(self._model, self._dtype, self._quantize)[1])
        self._load_s = self._timeout_s or max(_LEAST_LOAD_S, timeout_of(size))
        self._allowance = f"{size / 1e9:.1f} GB have {self._load_s:.0f} s"
        # Each engine may load a version twice, and the ranks write it before.
        loads = on_first_rank(lambda: 2 * len(self._engines) + 1)
        self._limit_s = loads * self._load_s + timeout_of(0)
        if self._shares is None:
            self._meet()
        self._shares = shares_of(
            self._model,
            self._writers,
            dtype=self._dtype,
            quantize=self._quantize,
            ranks=self._parts.group,
        )
        self._host_memory = HostMemory()
        return self._shares

    def _meet(self) -> None:
        """Find the ranks that see the folder, each of which writes a part of each version."""
        group = gloo_group(timeout_s=self._limit_s)
        self._folder = Path(on_first_rank(lambda: str(self._folder.absolute())))
        self._writers = ranks_that_see(self._folder, group)
        self._parts = attrs.evolve(self._parts, group=group)

        def prepare() -> None:
            rank = self._parts.rank
            if rank in self._writers[1:]:
                publisher = self._new_publisher(self._folder / part_name(rank))
                self._parts = attrs.evolve(self._parts, publisher=publisher)

        on_every_rank(prepare, group)
