"""``VerifiedTransport``, which checks publications with a canary, and ``transport_to``."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from primerl._common.checkpoint_tensors import Quantizer
from primerl._common.progress import report
from primerl._common.ranks import is_first_rank, on_every_rank, on_first_rank
from primerl._common.threads import in_thread
from primerl.weights.transports.adapter import Adapter
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.network import Network
from primerl.weights.transports.receipts import Receipt, check_engines, on_all_ranks
from primerl.weights.transports.shared_memory import SharedMemory
from primerl.weights.transports.transport import PendingPublication, Transport
from primerl.weights.verification import wiring
from primerl.weights.verification.canary import Canary, CanaryAnswers
from primerl.weights.verification.fingerprints import changed_since, fingerprints

log = logging.getLogger(__name__)


@runtime_checkable
class HoldsRollouts(Protocol):
    """A rollout worker that holds the rollouts of a version back until the version is verified."""

    def mark_version(self, version: int, *, verified: bool) -> None:
        """Release the rollouts of ``version`` if it is ``verified``, or else drop them."""
        ...


class VerifiedTransport(Transport):
    """A transport whose versions are provisional until a canary has passed.

        transport = weights.VerifiedTransport(
            transport, weights.Canary(model, engine), worker=rollouts
        )
        receipt = transport.publish(version)

    Until then, the worker holds back the rollouts that were sampled with the version. If the canary
    fails, the worker drops them, and the same version is published again, at most ``retries``
    times, before ``publish`` raises. All ranks of a sharded trainer call ``publish``; only rank 0
    has the worker.

    After ``start``, ``wait`` returns once the canary has passed. The canary compares the engines
    with the trainer, so ``wait`` must be called before the weights change; otherwise it raises.

    Args:
        transport: publishes the weights.
        canary: checks the same model and engine.
        worker: is notified whether a version passed; None on ranks other than 0.
        wiring_test: whether to run ``weights.wiring_test`` before the first publication, to test
            that each group of tensors reaches the engines. It takes one publication per group, and
            one more.
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
        self._told: tuple[int, bool] | None = None

    def _close(self) -> None:
        self.transport._close()

    def _publish(self, version: int) -> Receipt:
        report("publishing", f"version {version}")
        if self._test_wiring_first:
            self._test_wiring(version)
        with self._rejected_if_it_fails(version):
            return self._verified(version, self.transport.publish(version))

    def _start(self, version: int) -> "tuple[Callable[[], Receipt], Future[Any] | None]":
        if self._test_wiring_first:
            return super()._start(version)
        model = self.canary.model
        before = fingerprints(model)
        pending = self.transport.start(version)
        asking = in_thread(lambda: self._asked(pending, version)) if is_first_rank() else None

        def finish() -> Receipt:
            with self._rejected_if_it_fails(version):
                receipt = pending.wait()
                changed = on_every_rank(lambda: changed_since(before, model)[:3], self._agreeing())
                self._require_unchanged(version, changed)
                return self._verified(version, receipt, _result_on_first_rank(asking))

        return finish, pending.work if asking is None else asking

    def _asked(self, pending: PendingPublication, version: int) -> CanaryAnswers:
        """Have the engines answer the canary as soon as they serve the version."""
        if pending.work is not None:
            pending.work.result()
        return self.canary.ask(version)

    def _require_unchanged(self, version: int, changed: Sequence[Sequence[str]]) -> None:
        """Check that no rank's weights have changed, which would be compared with the engines."""
        for rank, names in enumerate(changed):
            if names:
                raise RuntimeError(
                    f"the weights changed after start({version}), so that the engines can't be "
                    f"compared with them: {', '.join(names)} on rank {rank}; call wait() before "
                    "the optimizer's step"
                )

    @contextmanager
    def _rejected_if_it_fails(self, version: int) -> Iterator[None]:
        """Have the worker drop what was sampled with a version that can't be verified."""
        try:
            yield
        except Exception:
            if self._told != (version, False):
                self._tell_worker(version, passed=False)
            raise

    def _verified(
        self, version: int, receipt: Receipt, answers: CanaryAnswers | None = None
    ) -> Receipt:
        """Return the receipt once the canary has passed; publish again if it fails.

        ``answers`` are the engines' to the first check, on rank 0, if they were asked before.
        """
        for retries_left in reversed(range(self._retries + 1)):
            started = time.perf_counter()
            verdict = self.canary.check(version, answers)
            self._tell_worker(version, passed=verdict.passed)
            if verdict.passed:
                asked_s = 0.0 if answers is None else answers.seconds
                seconds = receipt.seconds | {"verify": asked_s + time.perf_counter() - started}
                return on_all_ranks(attrs.evolve(receipt, seconds=seconds, canary=verdict.metrics))
            if retries_left and is_first_rank():
                log.warning("version %d failed the canary and is published again", version)
            if retries_left:
                receipt = self.transport.publish(version)
                answers = None
        raise RuntimeError(f"the engines do not serve the published weights: {verdict.reason}")

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
        self._told = (version, passed)
        if self._worker is not None:
            self._worker.mark_version(version, verified=passed)


def _result_on_first_rank(
    asking: "Future[CanaryAnswers] | None",
) -> CanaryAnswers | None:
    """Wait on all ranks for what rank 0 asked; return it on rank 0, and None on the others."""

    def wait_for_it() -> None:
        assert asking is not None, "rank 0 asks"
        asking.result()

    on_first_rank(wait_for_it)
    return None if asking is None else asking.result()


def transport_to(
    model: nn.Module,
    engine: Any,
    *,
    worker: HoldsRollouts | None = None,
    folder: str | os.PathLike[str] | None = None,
    towards: str | None = None,
    encoding: Literal["full", "delta"] = "full",
    dtype: torch.dtype | None = None,
    quantize: Quantizer | None = None,
    temperature: float = 1.0,
    wiring_test: bool = False,
    publish: Literal["merged", "adapter"] = "merged",
    adapter: str = "default",
) -> SharedMemory | Disk | Adapter | VerifiedTransport:
    """Return the usual transport for an engine, with a canary if the engine can be probed.

        transport = weights.transport_to(model, engine, worker=rollouts)
        receipt = transport.publish(0)
        run.log(..., metrics=receipt.metrics)

    For servers (``serving.VLLMEngine``) the transport is a ``VerifiedTransport``. An engine in this
    process copies the trainer's own tensors, so it needs no canary.

    Args:
        model: the trainer's model.
        engine: the engine that serves the model; None on ranks other than 0.
        worker: see ``VerifiedTransport``.
        folder: a folder on a file system that the servers' hosts share; None for this host's shared
            memory.
        towards: the name or address of a server's host, to keep the weights in the memory of the
            trainer's hosts and only manifests in the folder (see ``Network``); None to write the
            weights into the folder.
        encoding: ``"full"`` or ``"delta"``.
        dtype: the dtype in which parameters are sent; by default the dtype that the servers compute
            in.
        quantize: ``fp8.CheckpointQuantizer``, for servers of a quantized checkpoint; works with
            both encodings and with the canary.
        temperature: the sampling temperature of rollouts, see ``Canary``.
        wiring_test: see ``VerifiedTransport``. Off by default, because it publishes the model once
            per group of tensors: hundreds of GB for a model of 30B parameters.
        publish: ``"merged"`` to send the weights with low-rank adapters merged into them, or
            ``"adapter"`` to send only one adapter, to an engine that samples under an adapter (see
            ``Adapter``).
        adapter: the adapter's name in the model.

    Raises:
        ValueError: an argument is out of range, rank 0 has no engine, or its engine can't receive
            the kind of weights that ``publish`` selects.
        RuntimeError: a server's weights can't be updated, because it accepts adapters, moves
            experts between devices or has padded experts.
    """
    if publish not in ("merged", "adapter"):
        raise ValueError(f'publish={publish!r}; expected "merged" or "adapter"')
    if publish == "adapter" and encoding != "full":
        raise ValueError(f'encoding={encoding!r} needs publish="merged"; adapters are sent whole')
    if publish == "adapter" and quantize is not None:
        raise ValueError(
            'quantize= needs publish="merged"; adapters are sent in 16 or 32 bits, not quantized'
        )
    served = on_first_rank(lambda: _served_dtype(engine, merged=publish == "merged"))
    dtype = dtype or (None if served is None else getattr(torch, served))
    engines = [] if engine is None else [engine]
    check_engines(engines, adapters=publish == "adapter")
    if towards is not None and (folder is None or publish == "adapter"):
        raise ValueError(
            f'towards={towards!r} needs folder=, for manifests, and publish="merged": adapters are '
            "small, and go through the folder"
        )
    sent: dict[str, Any] = {"encoding": encoding, "dtype": dtype, "quantize": quantize}
    transport: SharedMemory | Disk | Adapter
    if publish == "adapter":
        transport = Adapter(model, *engines, folder=folder, adapter=adapter, dtype=dtype)
    elif folder is None:
        transport = SharedMemory(model, *engines, **sent)
    elif towards is None:
        transport = Disk(model, *engines, folder=folder, **sent)
    else:
        transport = Network(model, *engines, folder=folder, towards=towards, **sent)
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
    """Check that servers can be sent weights; return the dtype that they compute in.

    Returns None for an engine in this process.
    """
    if not hasattr(engine, "probe"):
        return None
    if merged and hasattr(engine, "check_reloads"):
        engine.check_reloads()
    dtype: str = engine.dtype
    return dtype
