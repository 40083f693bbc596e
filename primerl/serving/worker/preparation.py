"""Work that a receiver does while its engine continues to sample."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from primerl.weights.transports.broadcast_group import in_thread

GRACE_S = 0.005  # what a call may keep the engine waiting


class Preparation:
    """One piece of work at a time, in a thread, polled until it is done."""

    def __init__(self) -> None:
        self._ticket: str | None = None
        self._outcome: Future[dict[str, Any]] = Future()
        self._outcome.set_result({})

    def ask(
        self, ticket: str, work: Callable[[], dict[str, Any]], *, timeout_s: float = GRACE_S
    ) -> dict[str, Any] | None:
        """What ``work`` returned, or None while it runs; raises what it raised.

        The first call with a ``ticket`` starts the work, once that of an earlier one is over.
        """
        wait([self._outcome], timeout=timeout_s)
        if not self._outcome.done():
            return None
        if ticket != self._ticket:
            self._ticket, self._outcome = ticket, in_thread(work)
            wait([self._outcome], timeout=timeout_s)
        return self._outcome.result() if self._outcome.done() else None
