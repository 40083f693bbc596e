"""vLLM's weight transfer engines: load published tensors, and report what was loaded.

Runs inside vLLM's processes and depends on vLLM's internals; written against vLLM 0.32.
"""

import contextlib
import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from primerl._common.digests import HashedTensor, TensorDigest
from primerl._common.threads import in_thread, thread_count
from primerl.serving.names import FOLDER_BACKEND, NCCL_BACKEND
from primerl.serving.worker.checked_loading import LoadedTensors, load_checked
from primerl.serving.worker.preparation import Preparation
from primerl.serving.worker.shared_keys import label_shared_keys
from primerl.serving.worker.tensors_in_use import needed_here, served_names, tied_parameters
from primerl.weights.transports.broadcasts.groups import Communicator, connect_nccl, connected
from primerl.weights.transports.broadcasts.layers import receive
from primerl.weights.transports.broadcasts.rendezvous import Membership, join_group
from primerl.weights.transports.publications.folder_reader import FolderReader

_JOIN_S = 300.0


@dataclass
class NothingAgreed(WeightTransferInitInfo):
    """Empty initialization data: vLLM requires the type, but each update has all that is needed."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """Message that names the publication to load from a folder."""

    folder: str
    version: int


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """Message that lists the tensors to be broadcast, in order, and the groups to join."""

    version: int
    key: str
    """Identifies the groups, which are all formed anew together."""
    stores: list[tuple[str, int]]
    """Address and port of the rendezvous of each sender's group."""
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    groups: list[int]
    """For each tensor, the index in ``stores`` of the group in which it is broadcast."""
    timeout_s: float
    """How long the broadcasts may take."""


class LayerwiseTransfer(WeightTransferEngine[NothingAgreed, Any]):
    """Loader of checkpoint tensors into vLLM's model, layer by layer, which makes a receipt."""

    init_info_cls = NothingAgreed

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Computed before any reload, because a reload separates tied tensors: here a tied tensor
        # counts once.
        self._needed = {name for name, _ in self.model.named_parameters()}
        self._tied = tied_parameters(self.model)
        self._needs = needed_here(self.model)
        workers = self.parallel_config.local_world_size * max(
            1, self.parallel_config.data_parallel_size_local
        )
        self._threads = thread_count(processes=workers)
        self._half_loaded = False
        self._prepare_s = 0.0
        self.preparation = Preparation()
        self.receipt: dict[str, Any] = {"version": None, "seconds": {}}

    def init_transfer_engine(self, init_info: NothingAgreed) -> None:
        """Do nothing, because each update has all that is needed."""

    def prepare(self, update: Any) -> dict[str, Any]:
        """Prepare an update while the engine continues to generate."""
        started = time.perf_counter()
        self._fetch(update)
        self._prepare_s = time.perf_counter() - started
        return {"version": update.version, "seconds": self._prepare_s}

    def start_weight_update(self) -> None:
        """Replace packed parameters by parameters in the checkpoint's layout."""
        label_shared_keys(None, "")
        self._discard_half_loaded()
        self._half_loaded = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Load the prepared update; raise if tensors differ from the published ones."""
        started = time.perf_counter()
        self.receipt = {"version": None, "seconds": {}}
        receipt = self._receive(update_info)
        seconds = {"prepare": self._prepare_s, "load": time.perf_counter() - started}
        self.receipt = {**receipt, "version": update_info.version, "seconds": seconds}

    def _load(
        self, tensors: Iterable[tuple[str, Tensor]], expected: dict[str, TensorDigest] | None
    ) -> dict[str, Any]:
        """Load tensors into the model; return a receipt of the tensors and their effect.

        The receipt's digest is that of the needed tensors' own bytes and of the other tensors'
        ``expected`` digests. If ``expected`` is None, it is that of all tensors' bytes, and the
        trainer compares it with the tensors it sent.
        """
        loaded = load_checked(
            self._load_into_model,
            tensors,
            expected=expected,
            threads=self._threads,
            needs=self._needs,
            hashed=self._hashed(),
            pin=self.device.type == "cuda",
        )
        receipt = {
            **loaded.compare(expected),
            "unreached": self._unreached(loaded.returned),
        }
        faults = {k: v for k, v in receipt.items() if isinstance(v, list) and v}
        if faults:
            raise RuntimeError(f"the loaded weights differ from the published ones: {faults}")
        # Ignored tensors are not a fault here, because other ranks may use them.
        return {**receipt, "ignored": self._ignored(loaded)}

    def _hashed(self) -> dict[int, HashedTensor]:
        """Return the prepared tensors whose digests are known, by ``id``."""
        return {}

    def _load_into_model(self, tensors: Iterable[tuple[str, Tensor]]) -> Any:
        return self.model.load_weights(tensors)

    def _ignored(self, loaded: LoadedTensors) -> list[str]:
        """Return the tensors that this worker did not use, or that a tied tensor overrides.

        Experts of other workers are not among them. An expert that no worker uses is found all the
        same, because each worker checks that all experts that it holds were loaded.
        """
        unused = set(loaded.ignored)
        served = served_names(self.model, loaded.digests) if self._tied else {}
        for names in self._tied:
            several = [served[name] for name in names if name in served]
            unused.update(several[1:])
        return sorted(unused)

    def _unreached(self, loaded: set[str] | None) -> list[str]:
        """Return the model's parameters that no tensor was loaded into, as far as vLLM knows."""
        unreached = set()
        if loaded is not None and self.model_config.quantization is None:
            unreached = self._needed - loaded
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            # A vocabulary's padding is never loaded.
            # Nothing is loaded into a tied head, for example; but all experts are published.
            begun = info.load_numel > 0 or isinstance(module, RoutedExperts)
            incomplete = (
                info.can_load() and begun and info.load_numel < (info.load_numel_total or 0)
            )
            if incomplete and not isinstance(module, VocabParallelEmbedding):
                unreached.add(f"{name} ({info.load_numel} of {info.load_numel_total})")
        return sorted(unreached)

    def finish_weight_update(self) -> None:
        """Pack the loaded parameters for inference."""
        if self.receipt["version"] is None:
            self._discard_half_loaded()  # started but never sent
            return
        started = time.perf_counter()
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()
        self._repack_experts()
        self._half_loaded = False
        self._release()
        self.receipt["seconds"]["finish"] = time.perf_counter() - started

    def _discard_half_loaded(self) -> None:
        """Discard an update that was interrupted between start and finish.

        Otherwise the next update would count this update's buffered tensors as loaded and use them
        instead of its own. Layers that are already complete keep this update's weights until the
        next update.
        """
        if not self._half_loaded:
            return
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._half_loaded = False
        self._release()

    def _repack_tied_head(self) -> None:
        """Repack a CPU's tied head, which otherwise keeps its old packed copy (vLLM 0.32)."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _repack_experts(self) -> None:
        """Repack reloaded experts on a CPU; vLLM 0.32 does not, although it reads packed ones."""
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if isinstance(module, RoutedExperts) and kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def _release(self) -> None:
        """Release an update's resources, after success or failure."""


class FolderTransfer(LayerwiseTransfer):
    """Loader of publications from a folder (backend ``"primerl"``)."""

    update_info_cls = FolderUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader: FolderReader | None = None

    def _fetch(self, update: FolderUpdate) -> None:
        """Fetch a publication and check it."""
        folder = Path(update.folder)
        if self._reader is None or self._reader.folder != folder:
            self.shutdown()
            self._reader = FolderReader(folder, needs=self._needs, threads=self._threads)
        self._reader.fetch(update.version)

    def _receive(self, update: FolderUpdate) -> dict[str, Any]:
        if self._reader is None or not self._reader.has_fetched(update.version):
            self._fetch(update)  # this server was restarted after it had prepared the update
        assert self._reader is not None, "fetching creates it"
        manifest, tensors = self._reader.open(update.version)
        try:
            return self._load(tensors.items(), manifest.tensors)
        except BaseException:  # unlock the publication, whatever ended the load
            self._reader.release(distrust=True)
            raise

    def _hashed(self) -> dict[int, HashedTensor]:
        return {} if self._reader is None else self._reader.hashed

    def _release(self) -> None:
        if self._reader is not None:
            self._reader.release()

    def shutdown(self) -> None:
        """Close the host's copy of the tensors; the last process that closes it removes it."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class BroadcastTransfer(LayerwiseTransfer):
    """Receiver of tensors that the trainer broadcasts by NCCL (backend ``"primerl_nccl"``)."""

    update_info_cls = BroadcastUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._key: str | None = None
        self._communicators: list[Communicator] = []

    def _connect(self, place: Membership) -> Communicator:
        return connect_nccl(place, self.device)

    def _fetch(self, update: BroadcastUpdate) -> None:
        """Join the senders' NCCL groups, unless this worker is already a member.

        All workers join the groups in the same order, so that none waits in one group for a worker
        that waits in another.
        """
        if self._key == update.key:
            return
        self.shutdown()
        for address, port in update.stores:
            place = join_group(address, port, timeout_s=_JOIN_S)
            joining = in_thread(functools.partial(self._connect, place))
            self._communicators.append(connected(joining, to="the trainer", timeout_s=_JOIN_S))
        self._key = update.key

    def _receive(self, update: BroadcastUpdate) -> dict[str, Any]:
        if self._key != update.key:
            raise RuntimeError("prepare_weights was not called before update_weights")

        announced = zip(update.names, update.dtypes, update.shapes, update.groups, strict=True)
        arriving = receive(
            announced,
            tuple(self._communicators),
            device=self.device,
            timeout_s=update.timeout_s,
        )
        try:
            with contextlib.closing(arriving) as tensors:
                return self._load(tensors, None)
        except BaseException:  # the senders may have reached another tensor
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the senders' NCCL groups."""
        self._key = None
        while self._communicators:
            self._communicators.pop().destroy()


for _name, _engine in ((FOLDER_BACKEND, FolderTransfer), (NCCL_BACKEND, BroadcastTransfer)):
    with contextlib.suppress(ValueError):  # registered before: a subclass's module has imported it
        WeightTransferEngineFactory.register_engine(_name, _engine)
