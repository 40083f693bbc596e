"""Publications that count once a canary has passed."""

import logging
import os
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from primerl._gathering import is_first_rank
from primerl._outcomes import on_first_rank
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.receipts import Receipt
from primerl.weights.transports.shared_memory import SharedMemory
from primerl.weights.verification.canary import Canary
from primerl.weights.verification.wiring import Transport, wiring_test

log = logging.getLogger(__name__)


@runtime_checkable
class Settles(Protocol):
    """The rollout worker, which holds what versions sampled until they are settled."""

    def mark_version(self, version: int, *, verified: bool) -> None:
        """Release what ``version`` sampled, or drop it."""
        ...


class Proven:
    """A transport whose versions are provisional until the canary has passed.

        transport = weights.Proven(transport, weights.Canary(model, engine), worker=rollouts)
        transport.publish(version)

    The worker (with ``await_proof=True``) holds what was sampled meanwhile, and drops it if the
    canary fails. The same version is then published again, as often as ``repairs`` says, before
    ``publish`` raises. All ranks of a sharded trainer publish; rank 0 has the worker.

    Args:
        transport: that publishes.
        canary: of the same model and engine.
        worker: that is told, by ``mark_version``; None on other ranks.
        wiring: whether the first publication tests that each group of tensors reaches the engines
            (``wiring_test``): one publication for each group, and one more, once.
        repairs: how often a version that fails is published again.
    """

    def __init__(
        self,
        transport: Transport,
        canary: Canary,
        *,
        worker: Settles | None,
        wiring: bool = True,
        repairs: int = 1,
    ) -> None:
        self.transport = transport
        self.canary = canary
        self._worker = worker
        self._wiring = wiring
        self._repairs = repairs
        self.figures: dict[str, float] = {}
        """The canary's of the last publication: ``mismatch_kl``, for steps without fresh tokens."""

    def publish(self, version: int) -> Receipt | None:
        """Put the weights of ``version`` into every engine; returns when a canary has passed.

        Raises:
            RuntimeError: they did not arrive, or no repair made the canary pass.
        """
        if self._wiring:
            self._test_wiring(version)
        for repairs_left in reversed(range(self._repairs + 1)):
            receipt: Receipt | None = self.transport.publish(version)
            verdict = self.canary.check(version)
            self._settle(version, proven=verdict.passed)
            self.figures = {"mismatch_kl": verdict.mismatch_kl}
            if verdict.passed:
                return receipt
            if repairs_left and is_first_rank():
                log.warning("what version %d sampled is dropped; it is published again", version)
        raise RuntimeError(f"the engines do not serve what was published: {verdict.reason}")

    def _test_wiring(self, version: int) -> None:
        # Engines serve perturbed weights meanwhile, so the worker is to start nothing.
        self._settle(version, proven=False)
        report = wiring_test(
            self.canary.model, self.transport, self.canary, version=version, restore=False
        )
        self._wiring = False
        if is_first_rank():
            log.info("every group of tensors reaches the engines:\n%s", report)

    def _settle(self, version: int, *, proven: bool) -> None:
        if self._worker is not None:
            self._worker.mark_version(version, verified=proven)


def transport_to(
    model: nn.Module,
    engine: Any,
    *,
    worker: Settles | None = None,
    folder: str | os.PathLike[str] | None = None,
    encoding: str = "full",
    dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    wiring: bool = True,
) -> "SharedMemory | Disk | Proven":
    """The usual transport: shared memory or a folder, and a canary if the engine can be probed.

        transport = weights.transport_to(model, engine, worker=rollouts)
        transport.publish(0)

    An engine in this process copies from the trainer's own tensors, and nothing is probed; servers
    (``rollout.VLLMEngine``) get a ``Proven`` transport.

    Args:
        model: the trainer's.
        engine: that serves it; None on ranks other than 0.
        worker: see ``Proven``.
        folder: on a filesystem that the servers' hosts share; None for this host's memory.
        encoding: ``"full"`` or ``"delta"``.
        dtype: of parameters on the wire; by default what the servers compute in.
        temperature: of the rollouts, see ``Canary``.
        wiring: see ``Proven``.

    Raises:
        ValueError: an argument that no publication could be made with.
    """
    served = on_first_rank(lambda: engine.dtype if hasattr(engine, "probe") else None)
    dtype = dtype or (None if served is None else getattr(torch, served))
    engines = [] if engine is None else [engine]
    if folder is None:
        transport: SharedMemory | Disk = SharedMemory(
            model, *engines, encoding=encoding, dtype=dtype
        )
    else:
        transport = Disk(model, *engines, folder=folder, encoding=encoding, dtype=dtype)
    if served is None:
        return transport
    canary = Canary(model, engine, dtype=getattr(torch, served), temperature=temperature)
    return Proven(transport, canary, worker=worker, wiring=wiring)
