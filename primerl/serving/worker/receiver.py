"""Runs inside vLLM's process: loads published weights and reports what it loaded.

This file alone depends on vLLM's internals; it was written against vLLM 0.32. ``serve_vllm``
loads it by ``--worker-extension-cls primerl.serving.worker.receiver.WeightReceiver`` and
``--weight-transfer-config '{"backend": "primerl"}'``.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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

from primerl._common.digests import TensorDigest, digest_of, digest_of_all
from primerl.serving.names import FOLDER_BACKEND, NCCL_BACKEND
from primerl.serving.worker.held_adapters import HeldAdapters
from primerl.serving.worker.preparation import GRACE_S, Preparation
from primerl.serving.worker.reload_refusals import reload_refusal
from primerl.serving.worker.tensors_in_use import ServedTensors, served_names, tied_parameters
from primerl.serving.worker.tracked_tensors import TrackedTensors
from primerl.weights.transports.broadcast_group import (
    Communicator,
    Membership,
    connect_nccl,
    connected,
    in_thread,
    join_group,
)
from primerl.weights.transports.folder_reader import FolderReader
from primerl.weights.verification.served_tensors import as_builtins

_JOIN_S = 300.0


@dataclass
class NothingAgreed(WeightTransferInitInfo):
    """vLLM wants a type here; there is nothing to agree on in advance."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """Which publication to load."""

    folder: str
    version: int


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """Which tensors the trainer will broadcast, in order, and where its group meets."""

    version: int
    address: str
    port: int
    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class LayerwiseTransfer(WeightTransferEngine[NothingAgreed, Any]):
    """Loads tensors of a checkpoint into vLLM's model, layer by layer, and makes a receipt."""

    init_info_cls = NothingAgreed

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Taken before any reload, which parts tied tensors: a shared one counts once.
        self._needed = {name for name, _ in self.model.named_parameters()}
        self._tied = tied_parameters(self.model)
        self._half_loaded = False
        self._prepare_s = 0.0
        self.preparation = Preparation()
        self.receipt: dict[str, Any] = {"version": None, "seconds": {}}

    def init_transfer_engine(self, init_info: NothingAgreed) -> None:
        """Nothing to do: all that is needed comes with each update."""

    def prepare(self, update: Any) -> dict[str, Any]:
        """Do what can be done while the engine continues to generate."""
        started = time.perf_counter()
        self._fetch(update)
        self._prepare_s = time.perf_counter() - started
        return {"version": update.version, "seconds": self._prepare_s}

    def start_weight_update(self) -> None:
        """Replace packed parameters by those of the checkpoint's layout."""
        self._discard_half_loaded()
        self._half_loaded = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Load the prepared update; refuse one that does not arrive as it was published."""
        started = time.perf_counter()
        self.receipt = {"version": None, "seconds": {}}
        receipt = self._receive(update_info)
        seconds = {"prepare": self._prepare_s, "load": time.perf_counter() - started}
        self.receipt = {**receipt, "version": update_info.version, "seconds": seconds}

    def _load(
        self, tensors: Iterable[tuple[str, Tensor]], expected: dict[str, TensorDigest] | None
    ) -> dict[str, Any]:
        """Hand tensors to the model; the receipt of what was handed over and what it reached.

        Where nothing says what to expect, the trainer compares the receipt with what it sent.
        """
        taken: dict[str, TensorDigest] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                taken[name] = digest_of(tensor)
                yield name, tensor

        tracked = TrackedTensors(noted())
        loaded = self.model.load_weights(tracked)
        expected = taken if expected is None else expected
        receipt = {
            "digest": digest_of_all(taken),
            "tensors": len(taken),
            "missing": sorted(expected.keys() - taken.keys()),
            "unexpected": sorted(taken.keys() - expected.keys()),
            "differing": sorted(n for n in taken.keys() & expected if taken[n] != expected[n]),
            "unreached": self._unreached(loaded),
        }
        faults = {k: v for k, v in receipt.items() if isinstance(v, list) and v}
        if faults:
            raise RuntimeError(f"the weights did not arrive as they were published: {faults}")
        # No fault yet: another rank may use what this one does not.
        return {**receipt, "ignored": self._ignored(tracked.ignored, taken)}

    def _ignored(self, unused: list[str], taken: Iterable[str]) -> list[str]:
        """Tensors that this worker did not use, or that a tied tensor overrides."""
        if self.parallel_config.enable_expert_parallel:  # other workers may have those experts
            unused = [name for name in unused if ".experts." not in name]
        served = served_names(self.model, taken)
        for names in self._tied:
            several = [served[name] for name in names if name in served]
            unused = unused + several[1:]
        return sorted(set(unused))

    def _unreached(self, loaded: set[str] | None) -> list[str]:
        """Parameters of the model that no tensor reached, as far as the model tells."""
        unreached = set()
        if loaded is not None and self.model_config.quantization is None:
            unreached = self._needed - loaded
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            # A vocabulary is padded, so a part of it is never loaded.
            incomplete = info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
            if incomplete and not isinstance(module, VocabParallelEmbedding):
                unreached.add(f"{name} ({info.load_numel} of {info.load_numel_total})")
        return sorted(unreached)

    def finish_weight_update(self) -> None:
        """Pack the loaded parameters for inference."""
        if self.receipt["version"] is None:
            self._discard_half_loaded()  # started, and never sent: see WeightReceiver
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

        Its buffered tensors would count as loaded in the next update and replace that one's.
        Layers that it completed keep its weights until the next update.
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
        """On the CPU a head that is tied to the embedding keeps its old packed copy (vLLM 0.32)."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _repack_experts(self) -> None:
        """On the CPU reloaded experts are read as if they were packed (vLLM 0.32)."""
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if isinstance(module, RoutedExperts) and kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def _release(self) -> None:
        """An update has ended, successfully or not."""


class FolderTransfer(LayerwiseTransfer):
    """Takes publications from a folder (backend ``"primerl"``)."""

    update_info_cls = FolderUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader: FolderReader | None = None

    def _fetch(self, update: FolderUpdate) -> None:
        """Fetch and check a publication."""
        folder = Path(update.folder)
        if self._reader is None or self._reader.folder != folder:
            self.shutdown()
            self._reader = FolderReader(folder)
        self._reader.fetch(update.version)

    def _receive(self, update: FolderUpdate) -> dict[str, Any]:
        if self._reader is None:
            raise RuntimeError("prepare_weights was not called before update_weights")
        manifest, tensors = self._reader.open(update.version)
        try:
            return self._load(tensors.items(), manifest.tensors)
        except BaseException:  # locked no longer than the load, however it ends
            self._reader.release(distrust=True)
            raise

    def _release(self) -> None:
        if self._reader is not None:
            self._reader.release()

    def shutdown(self) -> None:
        """Close the host's copy; the last process to close it removes it."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class BroadcastTransfer(LayerwiseTransfer):
    """Takes tensors that the trainer broadcasts by NCCL (backend ``"primerl_nccl"``)."""

    update_info_cls = BroadcastUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: str | None = None
        self._communicator: Communicator | None = None

    def _connect(self, place: Membership) -> Communicator:
        return connect_nccl(place, self.device)

    def _fetch(self, update: BroadcastUpdate) -> None:
        """Join the trainer's group, if it is a new one."""
        if self._group != update.group:
            self.shutdown()
            place = join_group(update.address, update.port, timeout_s=_JOIN_S)
            joining = in_thread(lambda: self._connect(place))
            self._communicator = connected(joining, to="the trainer", timeout_s=_JOIN_S)
            self._group = update.group

    def _receive(self, update: BroadcastUpdate) -> dict[str, Any]:
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("prepare_weights was not called before update_weights")

        def received() -> Iterator[tuple[str, Tensor]]:
            for name, dtype, shape in zip(update.names, update.dtypes, update.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                communicator.broadcast(tensor, src=0)
                yield name, tensor

        return self._load(received(), None)

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = self._group = None


def _padded_experts(model: torch.nn.Module, device: torch.device) -> int:
    """The intermediate size of experts that the CPU's kernel has padded, 0 for none."""
    if device.type != "cpu":
        return 0
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            size: int = module.moe_config.intermediate_size_per_partition
            experts, hidden = module.local_num_experts, module.hidden_size
            if module.w2_weight.numel() != experts * hidden * size:
                return size
    return 0


class WeightReceiver:
    """Methods that vLLM's workers get, called by the names of ``primerl.serving.names``."""

    device: torch.device
    model_runner: Any
    parallel_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def prepare_weights(
        self, update: dict[str, Any], ticket: str, timeout_s: float = GRACE_S
    ) -> dict[str, Any]:
        """Fetch and check an update while the engine continues; repair an interrupted one.

        It runs in a thread: after ``{"prepared": False}``, call again with the same ``ticket``. A
        new ticket starts again.

        Raises:
            ValueError: the publication is missing, damaged or does not follow from its parent.
            RuntimeError: it was not prepared within a ``timeout_s`` above the default, or vLLM
                can't reload the weights of a server that takes adapters, or moves or pads experts.
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
        """Why the server can't be sent weights (adapters, moved or padded experts), or ""."""
        refused = reload_refusal(
            parallel_config=self.parallel_config,
            most_rank=HeldAdapters(self.model_runner).most_rank,
            padded_experts=_padded_experts(self.model_runner.model, self.device),
        )
        return {"refused": refused}

    def served_dtype(self) -> str:
        """The dtype that the model computes in, such as ``"bfloat16"``."""
        return str(self.model_runner.model_config.dtype).removeprefix("torch.")

    def served_vocab_size(self) -> dict[str, int]:
        """The model's number of token ids, in a mapping: vLLM sends a bare number as text."""
        return {"vocab_size": int(self.model_runner.model_config.get_vocab_size())}

    def served_routes(self) -> dict[str, bool]:
        """Whether a connector loads keys and values.

        What is ``loaded`` was computed elsewhere, so the routes of those tokens are not known here:
        a request that asks for them ends vLLM 0.32. Those of the last token of a prompt always are.
        """
        connector = self.vllm_config.kv_transfer_config
        return {"loaded": connector is not None and connector.kv_connector is not None}

    def read_weights(self, names: list[str], turn: int = 0) -> list[dict[str, Any]]:
        """Digests of what this worker computes with, for the published tensors ``names``."""
        return as_builtins(ServedTensors(self.model_runner.model, names, turn=turn).readings())

    def prepare_adapter(self) -> dict[str, Any]:
        """The largest rank of an adapter (0 without LoRA), and the numbers of those it holds."""
        held = HeldAdapters(self.model_runner)
        if self.device.type == "cpu":
            held.unwrap_head()
        return {"most_rank": held.most_rank, "numbers": held.numbers()}

    def read_adapter(
        self, layers: list[str], digest: str, known: list[int], version: int
    ) -> dict[str, Any]:
        """The receipt of an adapter that came after those of the ``known`` numbers."""
        receipt = HeldAdapters(self.model_runner).arrived(layers, digest, known=known)
        return {**receipt, "version": version}

    def weight_receipt(self) -> dict[str, Any]:
        """The receipt of this worker's last update: version, digest, seconds."""
        receipt: dict[str, Any] = self.weight_transfer_engine.receipt
        return receipt


for _name, _engine in ((FOLDER_BACKEND, FolderTransfer), (NCCL_BACKEND, BroadcastTransfer)):
    with contextlib.suppress(ValueError):  # loaded twice, by way of a subclass's module
        WeightTransferEngineFactory.register_engine(_name, _engine)
