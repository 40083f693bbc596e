"""Publications that count once a canary has passed."""

import logging
import os
from typing import Any, Protocol

import torch
from torch import nn

from primerl.weights.canary import Canary
from primerl.weights.disk import Disk
from primerl.weights.gathering import is_first_rank
from primerl.weights.probing import Prober
from primerl.weights.receipts import Receipt
from primerl.weights.scoring import from_first_rank
from primerl.weights.shared_memory import SharedMemory
from primerl.weights.wiring import Transport, wiring_test

log = logging.getLogger(__name__)


class Settles(Protocol):
    """The rollout worker, which holds what versions sampled until they are settled."""

    def settle(self, version: int, *, proven: bool) -> None:
        """Release what ``version`` sampled, or drop it."""
        ...


class Proven:
    """A transport whose versions are provisional until the canary has passed.

        transport = weights.Proven(transport, weights.Canary(model, engine), worker=rollouts)
        transport.publish(version)

    The worker (with ``await_proof=True``) holds what was sampled meanwhile and drops it if the
    canary fails. The next publication is then the repair; if that fails as well, ``publish``
    raises. All ranks of a sharded trainer publish; rank 0 has the worker.

    Args:
        transport: that publishes.
        canary: of the same model and engine.
        worker: that is told, by ``settle``; None on other ranks.
        wiring: whether the first publication tests that each group of tensors reaches the engines
            (``wiring_test``): as many publications as there are groups, once.
        most_failures: how many publications in a row may fail the canary.
    """

    def __init__(
        self,
        transport: Transport,
        canary: Canary,
        *,
        worker: Settles | None,
        wiring: bool = True,
        most_failures: int = 1,
    ) -> None:
        self.transport = transport
        self.canary = canary
        self._worker = worker
        self._wiring = wiring
        self._most_failures = most_failures
        self._failures = 0

    def publish(self, version: int) -> Receipt | None:
        """Put the weights of ``version`` into every engine and say whether they can be trusted.

        Raises:
            RuntimeError: they did not arrive, or the canary failed too often in a row.
        """
        if self._wiring:
            report = wiring_test(self.canary.model, self.transport, self.canary, version=version)
            self._wiring = False
            if self._worker is not None:  # what was sampled meanwhile is of perturbed weights
                self._worker.settle(version, proven=False)
            if is_first_rank():
                log.info("every group of tensors reaches the engines:\n%s", report)
        receipt: Receipt | None = self.transport.publish(version)
        verdict = self.canary.check(version)
        self._failures = 0 if verdict.passed else self._failures + 1
        if self._worker is not None:
            self._worker.settle(version, proven=verdict.passed)
        if self._failures > self._most_failures:
            raise RuntimeError(f"{self._failures} publications in a row failed: {verdict.reason}")
        if self._failures and is_first_rank():
            log.warning("what version %d sampled is dropped; the next one repairs it", version)
        return receipt


def publisher(
    model: nn.Module,
    engine: Any,
    *,
    worker: Settles | None = None,
    folder: str | os.PathLike[str] | None = None,
    encoding: str = "full",
    dtype: torch.dtype | None = None,
    wiring: bool = True,
) -> Transport:
    """The usual transport: shared memory or a folder, and a canary if the engine can be probed.

        transport = weights.publisher(model, engine, worker=rollouts)
        transport.publish(0)

    An engine in this process copies from the trainer's own tensors, and nothing is probed; servers
    (``rollout.VLLMEngine``) get a ``Proven`` transport.

    Args:
        model: the trainer's.
        engine: that serves it; None on ranks other than 0.
        worker: see ``Proven``.
        folder: on a filesystem that the servers' hosts share; None for this host's memory.
        encoding: ``"full"`` or ``"delta"``.
        dtype: that servers compute in; None keeps the trainer's.
        wiring: see ``Proven``.

    Raises:
        ValueError: an argument that no publication could be made with.
    """
    engines = [] if engine is None else [engine]
    if folder is None:
        transport: Transport = SharedMemory(model, *engines, encoding=encoding, dtype=dtype)
    else:
        transport = Disk(model, *engines, folder=folder, encoding=encoding, dtype=dtype)
    if not from_first_rank(lambda: isinstance(engine, Prober)):
        return transport
    own = next(model.parameters()).dtype
    canary = Canary(model, engine, dtype=dtype or own)
    return Proven(transport, canary, worker=worker, wiring=wiring)
