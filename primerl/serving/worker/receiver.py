"""vLLM's worker extension: what a server is asked about weights, and told.

Runs inside vLLM's processes and depends on vLLM's internals; written against vLLM 0.32.
``serve_vllm`` loads it by
``--worker-extension-cls primerl.serving.worker.receiver.WeightReceiver`` and
``--weight-transfer-config '{"backend": "primerl"}'``.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from primerl.serving.worker.loaded_adapters import HeldAdapters
from primerl.serving.worker.preparation import GRACE_S
from primerl.serving.worker.reload_refusals import reload_refusal
from primerl.serving.worker.shared_keys import label_shared_keys, shared_keys
from primerl.serving.worker.tensors_in_use import ServedTensors
from primerl.serving.worker.transfer_engines import LayerwiseTransfer  # registers the engines
from primerl.weights.verification.served_tensors import as_builtins


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


class WeightReceiver:
    """Worker extension: methods added to vLLM's workers, named in ``primerl.serving.names``."""

    device: torch.device
    model_runner: Any
    parallel_config: Any
    vllm_config: Any
    weight_transfer_engine: LayerwiseTransfer
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
        found = transfer.preparation.ask(
            ticket, lambda: transfer.prepare(info), timeout_s=timeout_s
        )
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

    def served_cache_block(self) -> dict[str, int]:
        """Return ``tokens``: prompts are cached in multiples of this many tokens.

        If a model has several kinds of blocks, such as those of attention and of Mamba layers, vLLM
        computes a number that is valid for all kinds.
        """
        config = self.vllm_config.cache_config
        tokens = getattr(config, "cache_hit_alignment_tokens", None) or config.block_size
        return {"tokens": int(tokens)}

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
        label_shared_keys(label, place)
        return {"shared": shared_keys() is not None}

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
        return self.weight_transfer_engine.receipt
