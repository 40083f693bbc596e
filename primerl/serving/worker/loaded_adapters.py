"""Inspection of the adapters that a vLLM worker has loaded.

Runs inside vLLM's process; written against vLLM 0.32.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import LogitsProcessorWithLoRA

from primerl._common.digests import TensorDigest, digest_of, digest_of_all
from primerl.serving.worker.tensors_in_use import served_names


class HeldAdapters:
    """The adapters that a worker has loaded. vLLM numbers them in the order of loading.

    Args:
        model_runner: the worker's. If its server was started without LoRA, there are no adapters.
    """

    def __init__(self, model_runner: Any) -> None:
        worker_manager = getattr(model_runner, "lora_manager", None)
        self._manager: Any = getattr(worker_manager, "_adapter_manager", None)

    @property
    def most_rank(self) -> int:
        """The largest rank of adapters that can be loaded; 0 without LoRA."""
        return 0 if self._manager is None else int(self._manager.lora_config.max_lora_rank)

    def numbers(self) -> list[int]:
        """Return the numbers of all loaded adapters, oldest first."""
        return [] if self._manager is None else sorted(self._manager.list_adapters())

    def unwrap_head(self) -> None:
        """Remove the LoRA wrapper of the LM head, so that adapters don't apply to the head.

        Without this, on a CPU, a step that scores two prompts under an adapter makes vLLM 0.32
        exit: vLLM looks up the adapter of each prompt where it needs the adapter of each token.
        """
        if self._manager is None:
            return
        model: nn.Module = self._manager.model
        wrapped = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, LogitsProcessorWithLoRA)
        ]
        for name, module in wrapped:
            model.set_submodule(name, module.base_layer)

    def arrived(
        self, layers: Sequence[str], digest: str, *, known: Collection[int]
    ) -> dict[str, Any]:
        """Describe the new adapter that has this ``digest``, or else the newest new adapter.

        Args:
            layers: the published layers of the adapter.
            digest: the expected digest of each layer's A, and B times its scale, as vLLM keeps
                them.
            known: the numbers of adapters that were loaded before.

        Returns:
            ``digest``; ``tensors``, their number; and ``ignored``, the layers of the adapter that
            the model does not use.
        """
        # Several adapters may be new, because other engines may have loaded some meanwhile.
        found = [self._read(one, layers) for one in self.numbers() if one not in known]
        nothing: dict[str, Any] = {"digest": None, "tensors": 0, "ignored": []}
        same = [one for one in found if one["digest"] == digest]
        return (same or found or [nothing])[-1]

    def _read(self, number: int, layers: Sequence[str]) -> dict[str, Any]:
        published = {
            served.removesuffix(".weight"): name.removesuffix(".weight")
            for served, name in served_names(
                self._manager.model, [f"{layer}.weight" for layer in layers]
            ).items()
        }
        digests: dict[str, TensorDigest] = {}
        ignored: set[str] = set()
        for served, used, a, b in self._factors(number):
            layer = published.get(served, served)
            digests |= {f"{layer}.A": digest_of(a), f"{layer}.B": digest_of(b)}
            ignored |= set() if used else {layer}
        return {
            "digest": digest_of_all(digests),
            "tensors": len(digests),
            "ignored": sorted(ignored),
        }

    def _factors(self, number: int) -> Iterator[tuple[str, bool, Tensor, Tensor]]:
        """Yield each layer's name in vLLM before merging, whether it is used, A, and B x scale."""
        manager = self._manager
        in_use = set(manager.model.modules())
        for name, held in manager.get_adapter(number).loras.items():
            used = manager.modules.get(name) in in_use
            if not held.is_packed:
                yield name, used, held.lora_a, held.lora_b * held.scaling
                continue
            parts = zip(manager.packed_modules[name], held.lora_a, held.lora_b, strict=True)
            for (part, a, b), scale in zip(parts, held.scaling, strict=True):
                if a is not None:
                    yield part, used, a, b * (1.0 if scale is None else scale)
