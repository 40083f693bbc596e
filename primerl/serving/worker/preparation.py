"""Background work of a weight receiver, done while vLLM continues to sample."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from primerl._common.threads import in_thread

GRACE_S = 0.005  # how long a call may block vLLM's engine


class Preparation:
    """Runner of one piece of work at a time in a thread; the caller polls for the result."""

    def __init__(self) -> None:
        self._ticket: str | None = None
        self._outcome: Future[dict[str, Any]] = Future()
        self._outcome.set_result({})

    def ask(
        self, ticket: str, work: Callable[[], dict[str, Any]], *, timeout_s: float = GRACE_S
    ) -> dict[str, Any] | None:
        """Return the result of ``work``, or None while it runs; raise its exception if it fails.

        The first call with a new ``ticket`` starts the work. If the work of an earlier ticket still
        runs, the call starts nothing and returns None.
        """
        wait([self._outcome], timeout=timeout_s)
        if not self._outcome.done():
            return None
        if ticket != self._ticket:
            self._ticket, self._outcome = ticket, in_thread(work)
            wait([self._outcome], timeout=timeout_s)
        return self._outcome.result() if self._outcome.done() else None
