"""Publications that count once a canary has passed."""

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from primerl.weights.canary import Canary
from primerl.weights.disk import Disk
from primerl.weights.gathering import is_first_rank
from primerl.weights.receipts import Receipt
from primerl.weights.shared_memory import SharedMemory

log = logging.getLogger(__name__)


class Transport(Protocol):
    """What puts the trainer's weights into engines."""

    def publish(self, version: int) -> Receipt | None:
        """Put the weights of ``version`` into every engine; returns when all serve them."""
        ...


class Proven:
    """A transport whose versions are provisional until the canary has passed.

        transport = weights.Proven(transport, weights.Canary(model, engine), settle=rollouts.settle)
        transport.publish(version)

    ``settle(version, proven=...)`` tells the rollout worker, which holds what was sampled meanwhile
    and drops it if the canary fails. The next publication is then the repair; where it fails as
    well, ``publish`` raises. All ranks of a sharded trainer publish; rank 0 has the worker.

    Args:
        transport: that publishes.
        canary: of the same model and engine.
        settle: ``Worker.settle`` of a worker with ``await_proof=True``; None on other ranks.
        most_failures: how many publications in a row may fail the canary.
    """

    def __init__(
        self,
        transport: Transport,
        canary: Canary,
        *,
        settle: Callable[..., Any] | None,
        most_failures: int = 1,
    ) -> None:
        self.transport = transport
        self.canary = canary
        self._settle = settle
        self._most_failures = most_failures
        self._failures = 0

    def publish(self, version: int) -> Receipt | None:
        """Put the weights of ``version`` into every engine and say whether they can be trusted.

        Raises:
            RuntimeError: they did not arrive, or the canary failed too often in a row.
        """
        receipt = self.transport.publish(version)
        verdict = self.canary.check(version)
        self._failures = 0 if verdict.passed else self._failures + 1
        if self._settle is not None:
            self._settle(version, proven=verdict.passed)
        if self._failures > self._most_failures:
            raise RuntimeError(f"{self._failures} publications in a row failed: {verdict.reason}")
        if self._failures and is_first_rank():
            log.warning("%s; what it sampled is dropped, and the next one repairs", verdict.reason)
        return receipt


def publisher(
    model: nn.Module,
    *engines: Any,
    folder: str | os.PathLike[str] | None = None,
    settle: Callable[..., Any] | None = None,
    prove: bool = True,
    encoding: str = "full",
    dtype: torch.dtype | None = None,
) -> Transport:
    """The usual transport: shared memory or a folder, with a canary where servers can be probed.

        transport = weights.publisher(model, engine, settle=rollouts.settle)
        transport.publish(0)

    Args:
        model: the trainer's.
        engines: that serve it, on rank 0.
        folder: on a filesystem that the engines' hosts share; None for this host's memory.
        settle: see ``Proven``.
        prove: whether engines are servers that a canary checks; alike on all ranks.
        encoding: ``"full"`` or ``"delta"``.
        dtype: of parameters for servers; None keeps the trainer's.

    Raises:
        ValueError: an argument that no publication could be made with.
    """
    if folder is None:
        transport: Transport = SharedMemory(model, *engines, encoding=encoding, dtype=dtype)
    else:
        transport = Disk(model, *engines, folder=folder, encoding=encoding, dtype=dtype)
    if not prove:
        return transport
    canary = Canary(model, engines[0] if engines else None, dtype=dtype or torch.float32)
    return Proven(transport, canary, settle=settle)
