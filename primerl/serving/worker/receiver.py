"""vLLM's worker extension: loads published weights and reports what was loaded.

Runs inside vLLM's processes and depends on vLLM's internals; written against vLLM 0.32.
``serve_vllm`` loads it by
``--worker-extension-cls primerl.serving.worker.receiver.WeightReceiver`` and
``--weight-transfer-config '{"backend": "primerl"}'``.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
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

from primerl._common.digests import TensorDigest
from primerl._common.threads import in_thread, thread_count
from primerl.serving.names import FOLDER_BACKEND, NCCL_BACKEND
from primerl.serving.worker.checked_loading import LoadedTensors, load_checked
from primerl.serving.worker.folder_connector import FolderConnector
from primerl.serving.worker.loaded_adapters import HeldAdapters
from primerl.serving.worker.preparation import GRACE_S, Preparation
from primerl.serving.worker.reload_refusals import reload_refusal
from primerl.serving.worker.tensors_in_use import (
    ServedTensors,
    needed_here,
    served_names,
    tied_parameters,
)
from primerl.weights.transports.broadcast_group import (
    Communicator,
    Membership,
    as_bytes,
    connect_nccl,
    connected,
    join_group,
)
from primerl.weights.transports.folder_reader import FolderReader
from primerl.weights.verification.served_tensors import as_builtins

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
        _label_shared_keys(None, "")
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
            self._discard_half_loaded()  # started but never sent: see WeightReceiver
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
            self._reader = FolderReader(folder, threads=self._threads)
        self._reader.fetch(update.version, needs=self._needs)

    def _receive(self, update: FolderUpdate) -> dict[str, Any]:
        if self._reader is None:
            raise RuntimeError("prepare_weights was not called before update_weights")
        manifest, tensors = self._reader.open(update.version)
        try:
            return self._load(tensors.items(), manifest.tensors)
        except BaseException:  # unlock the publication, whatever ended the load
            self._reader.release(distrust=True)
            raise

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

        def received() -> Iterator[tuple[str, Tensor]]:
            for name, dtype, shape, group in zip(
                update.names, update.dtypes, update.shapes, update.groups, strict=True
            ):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self._communicators[group].broadcast(as_bytes(tensor), src=0)
                yield name, tensor

        return self._load(received(), None)

    def shutdown(self) -> None:
        """Leave the senders' NCCL groups."""
        self._key = None
        while self._communicators:
            self._communicators.pop().destroy()


def _padded_experts(model: torch.nn.Module, device: torch.device) -> int:
    """Return the intermediate size of experts that the CPU kernel has padded, 0 for none."""
    if device.type != "cpu":
        return 0
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            size: int = module.moe_config.intermediate_size_per_partition
            experts, hidden = module.local_num_experts, module.hidden_size
            if module.w2_weight.numel() != experts * hidden * size:
                return size
    return 0


def _connectors(config: Any) -> list[str]:
    """Return the names of a server's KV connectors, those within a MultiConnector included."""
    if config is None or config.kv_connector is None:
        return []
    children = config.get_from_extra_config("connectors", [])
    return [config.kv_connector, *(str(one.get("kv_connector")) for one in children)]


def _shared_keys() -> FolderConnector | None:
    """Return the connector by which this worker shares keys and values, if it is primerl's."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector if isinstance(connector, FolderConnector) else None


def _label_shared_keys(label: str | None, place: str) -> None:
    if (connector := _shared_keys()) is not None:
        connector.weights_are(label, place)


class WeightReceiver:
    """Worker extension: methods added to vLLM's workers, named in ``primerl.serving.names``."""

    device: torch.device
    model_runner: Any
    parallel_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def prepare_weights(
        self, update: dict[str, Any], ticket: str, timeout_s: float = GRACE_S
    ) -> dict[str, Any]:
        """Fetch and check an update while the engine continues; discard an interrupted one first.

        The work runs in a thread. While it runs, the result is ``{"prepared": False}``: call again
        with the same ``ticket``. A new ticket starts the work anew.

        Raises:
            ValueError: the publication is missing, damaged or does not follow from its parent.
            RuntimeError: a ``timeout_s`` above the default was exceeded; or the server accepts
                adapters, moves experts or has padded experts, so that vLLM can't reload its
                weights.
        """
        if refused := self.reload_refusal()["refused"]:
            raise RuntimeError(refused)
        transfer = self.weight_transfer_engine
        if self._weight_update_active:  # its trainer was lost between start and finish
            transfer.receipt = {"version": None, "seconds": {}}
            self.finish_weight_update()  # type: ignore[attr-defined]
        info = transfer.parse_update_info(update)
        preparation: Preparation = transfer.preparation
        found = preparation.ask(ticket, lambda: transfer.prepare(info), timeout_s=timeout_s)
        if found is None and timeout_s > GRACE_S:
            raise RuntimeError(f"the update was not prepared within {timeout_s:g} s")
        return {"prepared": found is not None, **(found or {})}

    def reload_refusal(self) -> dict[str, str]:
        """Return why the server can't be sent weights, such as adapters or moved experts."""
        refused = reload_refusal(
            parallel_config=self.parallel_config,
            most_rank=HeldAdapters(self.model_runner).most_rank,
            padded_experts=_padded_experts(self.model_runner.model, self.device),
            connectors=_connectors(self.vllm_config.kv_transfer_config),
        )
        return {"refused": refused}

    def served_dtype(self) -> str:
        """Return the dtype that the model computes in, such as ``"bfloat16"``."""
        return str(self.model_runner.model_config.dtype).removeprefix("torch.")

    def served_vocab_size(self) -> dict[str, int]:
        """Return the vocabulary size, in a mapping because vLLM sends a bare number as text."""
        return {"vocab_size": int(self.model_runner.model_config.get_vocab_size())}

    def served_routes(self) -> dict[str, Any]:
        """Return ``loaded connector role folder``, of the KV connector.

        ``loaded`` says whether the server loads keys and values from elsewhere. It does not know
        the expert routes of loaded tokens, and vLLM 0.32 exits if a request asks for them. It
        always knows the routes of a prompt's last token.
        """
        config = self.vllm_config.kv_transfer_config
        if config is None or config.kv_connector is None:
            return {"loaded": False, "connector": "", "role": "", "folder": ""}
        # ExampleConnector loads whatever its role is.
        loaded = config.is_kv_consumer or config.kv_connector == "ExampleConnector"
        return {
            "loaded": loaded,
            "connector": config.kv_connector,
            "role": config.kv_role,
            "folder": str(config.get_from_extra_config("folder", "")),
        }

    def label_shared_keys(self, label: str, place: str) -> dict[str, bool]:
        """Share keys and values of requests with the salt ``label``, in the folder ``place``.

        Returns ``{"shared": ...}``: whether this worker has primerl's connector.
        """
        _label_shared_keys(label, place)
        return {"shared": _shared_keys() is not None}

    def read_weights(self, names: list[str], turn: int = 0) -> list[dict[str, Any]]:
        """Return digests of this worker's tensors that correspond to the published ``names``."""
        return as_builtins(ServedTensors(self.model_runner.model, names, turn=turn).readings())

    def prepare_adapter(self) -> dict[str, Any]:
        """Return the largest rank of adapters (0 without LoRA), and the loaded ones' numbers."""
        held = HeldAdapters(self.model_runner)
        if self.device.type == "cpu":
            held.unwrap_head()
        return {"most_rank": held.most_rank, "numbers": held.numbers()}

    def read_adapter(
        self, layers: list[str], digest: str, known: list[int], version: int
    ) -> dict[str, Any]:
        """Return the receipt of the new adapter: the one whose number is not among ``known``."""
        receipt = HeldAdapters(self.model_runner).arrived(layers, digest, known=known)
        return {**receipt, "version": version}

    def weight_receipt(self) -> dict[str, Any]:
        """Return the receipt of this worker's last update: version, digest, seconds and so on."""
        receipt: dict[str, Any] = self.weight_transfer_engine.receipt
        return receipt


for _name, _engine in ((FOLDER_BACKEND, FolderTransfer), (NCCL_BACKEND, BroadcastTransfer)):
    with contextlib.suppress(ValueError):  # registered before: a subclass's module imports this one
        WeightTransferEngineFactory.register_engine(_name, _engine)
