"""A transport whose publications are checked by a canary."""

import logging
import os
import time
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from primerl._common.checkpoint_tensors import Quantizer
from primerl._common.progress import report
from primerl._common.ranks import is_first_rank, on_first_rank
from primerl.weights.transports.adapter import Adapter
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.receipts import Receipt, Transport, check_engines, on_all_ranks
from primerl.weights.transports.shared_memory import SharedMemory
from primerl.weights.verification import wiring
from primerl.weights.verification.canary import Canary

log = logging.getLogger(__name__)


@runtime_checkable
class HoldsRollouts(Protocol):
    """The rollout worker, which holds what a version sampled until the version is verified."""

    def mark_version(self, version: int, *, verified: bool) -> None:
        """Release what ``version`` sampled, or drop it."""
        ...


class VerifiedTransport:
    """A transport whose versions are provisional until the canary has passed.

        transport = weights.VerifiedTransport(
            transport, weights.Canary(model, engine), worker=rollouts
        )
        receipt = transport.publish(version)

    The worker holds what was sampled meanwhile, and drops it if the canary fails. The same version
    is then published again, at most ``retries`` times, before ``publish`` raises. All ranks of a
    sharded trainer publish; rank 0 has the worker.

    Args:
        transport: that publishes.
        canary: of the same model and engine.
        worker: that is told whether a version passed; None on other ranks.
        wiring_test: whether the first publication tests that each group of tensors reaches the
            engines (``weights.wiring_test``): one publication for each group, and one more, once.
        retries: how often a version that fails is published again.
    """

    def __init__(
        self,
        transport: Transport,
        canary: Canary,
        *,
        worker: HoldsRollouts | None,
        wiring_test: bool = False,
        retries: int = 1,
    ) -> None:
        self.transport = transport
        self.canary = canary
        self._worker = worker
        self._test_wiring_first = wiring_test
        self._retries = retries

    def publish(self, version: int) -> Receipt:
        """Put the weights of ``version`` into every engine; returns when a canary has passed.

        Raises:
            RuntimeError: they did not arrive, or the canary failed after each retry too.
        """
        report("publishing", f"version {version}")
        if self._test_wiring_first:
            self._test_wiring(version)
        for retries_left in reversed(range(self._retries + 1)):
            receipt = self.transport.publish(version)
            started = time.perf_counter()
            verdict = self.canary.check(version)
            self._tell_worker(version, passed=verdict.passed)
            if verdict.passed:
                seconds = receipt.seconds | {"verify": time.perf_counter() - started}
                return on_all_ranks(attrs.evolve(receipt, seconds=seconds, canary=verdict.metrics))
            if retries_left and is_first_rank():
                log.warning("version %d failed the canary and is published again", version)
        raise RuntimeError(f"the engines do not serve what was published: {verdict.reason}")

    def _test_wiring(self, version: int) -> None:
        # Engines serve perturbed weights meanwhile, so the worker must not start a rollout.
        self._tell_worker(version, passed=False)
        report = wiring.wiring_test(
            self.canary.model, self.transport, self.canary, version=version, restore=False
        )
        self._test_wiring_first = False
        if is_first_rank():
            log.info("every group of tensors reaches the engines:\n%s", report)

    def _tell_worker(self, version: int, *, passed: bool) -> None:
        if self._worker is not None:
            self._worker.mark_version(version, verified=passed)


def transport_to(
    model: nn.Module,
    engine: Any,
    *,
    worker: HoldsRollouts | None = None,
    folder: str | os.PathLike[str] | None = None,
    encoding: Literal["full", "delta"] = "full",
    dtype: torch.dtype | None = None,
    quantize: Quantizer | None = None,
    temperature: float = 1.0,
    wiring_test: bool = False,
    publish: Literal["merged", "adapter"] = "merged",
    adapter: str = "default",
) -> SharedMemory | Disk | Adapter | VerifiedTransport:
    """The usual transport: shared memory or a folder, and a canary if the engine can be probed.

        transport = weights.transport_to(model, engine, worker=rollouts)
        receipt = transport.publish(0)
        run.log(..., metrics=receipt.metrics)

    An engine in this process copies from the trainer's own tensors, and nothing is probed; servers
    (``serving.VLLMEngine``) get a ``VerifiedTransport``.

    Args:
        model: the trainer's.
        engine: that serves it; None on ranks other than 0.
        worker: see ``VerifiedTransport``.
        folder: on a filesystem that the servers' hosts share; None for this host's memory.
        encoding: ``"full"`` or ``"delta"``.
        dtype: of parameters on the wire; by default what the servers compute in.
        quantize: for servers of a quantized checkpoint: ``fp8.CheckpointQuantizer``; with either
            encoding, and in the canary.
        temperature: of the rollouts, see ``Canary``.
        wiring_test: see ``VerifiedTransport``; off by default, because it publishes the model once
            for each group of tensors, hundreds of GB for a model of 30B parameters.
        publish: ``"merged"``, the weights with low-rank adapters added to them, or ``"adapter"``,
            one adapter alone, to an engine that samples under an adapter (see ``Adapter``).
        adapter: its name in the model.

    Raises:
        ValueError: an argument is out of range, or rank 0 has no engine, or one that does not take
            what ``publish`` says.
        RuntimeError: a server can't be sent weights: it takes adapters, or moves experts between
            devices.
    """
    if publish not in ("merged", "adapter"):
        raise ValueError(f'publish={publish!r}; expected "merged" or "adapter"')
    if publish == "adapter" and encoding != "full":
        raise ValueError(f"encoding={encoding!r} is of merged weights; adapters are sent whole")
    if publish == "adapter" and quantize is not None:
        raise ValueError("quantize= is of whole models; adapters are sent in 16 or 32 bits")
    served = on_first_rank(lambda: _served_dtype(engine, merged=publish == "merged"))
    dtype = dtype or (None if served is None else getattr(torch, served))
    engines = [] if engine is None else [engine]
    check_engines(engines, adapters=publish == "adapter")
    transport: SharedMemory | Disk | Adapter
    if publish == "adapter":
        transport = Adapter(model, *engines, folder=folder, adapter=adapter, dtype=dtype)
    elif folder is None:
        transport = SharedMemory(model, *engines, encoding=encoding, dtype=dtype, quantize=quantize)
    else:
        transport = Disk(
            model, *engines, folder=folder, encoding=encoding, dtype=dtype, quantize=quantize
        )
    if served is None:
        return transport
    canary = Canary(
        model,
        engine,
        dtype=getattr(torch, served),
        temperature=temperature,
        quantize=quantize,
    )
    return VerifiedTransport(transport, canary, worker=worker, wiring_test=wiring_test)


def _served_dtype(engine: Any, *, merged: bool) -> str | None:
    """What servers compute in, once they said that they can be sent weights; else None."""
    if not hasattr(engine, "probe"):
        return None
    if merged and hasattr(engine, "check_reloads"):
        engine.check_reloads()
    dtype: str = engine.dtype
    return dtype
