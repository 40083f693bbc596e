"""Evaluations that a worker plays while the trainer trains."""

import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from primerl.rollout.processes.running_clock import running_time
from primerl.types import Outcome, PolicyVersion, Rollout

if TYPE_CHECKING:
    from primerl.rollout.workers import Worker

MOST = 2  # evaluations at once: one may still wait for its last rollouts when the next is due

log = logging.getLogger(__name__)


class TookTooLong(RuntimeError):
    """A wait for the worker that reached its time limit."""


class Evaluation:
    """An evaluation that runs while the trainer trains."""

    def __init__(
        self, owner: "Worker", future: "Future[Any]", *, version: PolicyVersion | None = None
    ) -> None:
        self.version = version
        """The version that was asked for; tokens have this version or later ones."""
        self.collected = False
        """Whether the trainer has the results, or has given them up."""
        self._owner = owner
        self._future = future
        self._cancelled_by: Exception | None = None

    def __str__(self) -> str:
        return "the evaluation" + ("" if self.version is None else f" of version {self.version}")

    def done(self) -> bool:
        """Return whether ``result`` would return, or raise, at once."""
        return self._future.done()

    def result(self, timeout_s: float = 600.0) -> list[Rollout]:
        """Wait for the rollouts and return them in the order of the tasks, without failed ones.

        Raises:
            RuntimeError: it took longer than ``timeout_s`` from now, or was cancelled because of
                that before; or more than one version of the weights sampled, with ``one_version``.
            Exception: an environment's error, without ``keep_errors``.
        """
        outcomes = self.outcomes(timeout_s)
        return [outcome.rollout for outcome in outcomes if outcome.rollout is not None]

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended or failed; at the time limit, cancel it and return False.

        Raises:
            RuntimeError: the worker has ended.
        """
        try:
            self._finish(timeout_s)
        except TookTooLong:
            return False
        except Exception:  # its own error is raised by ``outcomes``
            if not self._future.done() or self._future.cancelled():
                raise
        return True

    def outcomes(self, timeout_s: float = 600.0) -> list[Outcome]:
        """Wait for all results, failed ones included, and return them in the order of the tasks.

        It raises what ``result`` raises.
        """
        self.collected = True
        began = time.monotonic()
        outcomes = self._finish(timeout_s)
        self._owner._notify("waited_for_evaluation", time.monotonic() - began)
        return outcomes

    def _finish(self, timeout_s: float) -> list[Outcome]:
        """Wait for the outcomes; of an evaluation that was cancelled, raise why."""
        if self._cancelled_by is not None:
            raise self._cancelled_by
        try:
            outcomes: list[Outcome] = self._owner._finish(self._future, str(self), timeout_s)
        except BaseException as error:
            if self._future.cancelled():
                interrupted = RuntimeError(f"{self} was cancelled: the wait for it was interrupted")
                self._cancelled_by = error if isinstance(error, Exception) else interrupted
            raise
        return outcomes


class UncollectedEvaluations:
    """The evaluations of a worker whose results the trainer has still to get.

    ``owed`` is whether an evaluation is to be started as soon as possible.
    """

    def __init__(self, *, owed: bool = False) -> None:
        self.owed = owed
        self._started: list[Evaluation] = []

    def __bool__(self) -> bool:
        return self.owed or bool(self._left)

    def add(self, evaluation: Evaluation) -> Evaluation:
        """Add an evaluation that was started, and return it."""
        self._started = [*self._left, evaluation]
        return evaluation

    def due(self, step: int, every: int) -> bool:
        """Return whether an evaluation is to be started; see ``Worker.evaluation_due``."""
        is_due = bool(every) and step % every == 0
        if not (is_due or (every and self.owed)):
            return False
        running = [str(one) for one in self._left if not one.done()]
        self.owed = len(running) >= MOST
        if self.owed and is_due:
            log.warning(
                "the evaluation of version %s waits: %s still run; evaluate less often, or play "
                "fewer tasks",
                *(step, " and ".join(running)),
            )
        return not self.owed

    def take_ended(self, timeout_s: float) -> list[Evaluation]:
        """Return those that have ended; see ``Worker.ended_evaluations``."""
        deadline = running_time() + timeout_s
        late = []
        for one in self._left:
            if timeout_s and not one.wait(max(0.0, deadline - running_time())):
                log.warning("%s is dropped: it had not ended after %.0f s", one, timeout_s)
                late.append(one)
        ended = [one for one in self._left if one.done() and one not in late]
        for one in (*late, *ended):  # not before, because an interrupted wait returns none of them
            one.collected = True
        return ended

    def log_cancelled(self) -> None:
        """Log which of them are cancelled, because their worker is closed."""
        for one in self._left:
            if not one.done():
                log.warning("%s is cancelled, because the worker is closed", one)

    @property
    def _left(self) -> list[Evaluation]:
        return [one for one in self._started if not one.collected]
