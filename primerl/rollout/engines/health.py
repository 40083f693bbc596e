"""Engine health: an outage counts as a failure of the engine, not of the rollouts that it affects.

A failed request is retried with backoff until it is answered. The engine is given up when it has
answered no request for a given time. A single request (for example, a prompt that crashes its
server) is given up when it keeps failing while others are answered.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator

from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.errors import summary
from primerl.rollout.processes.running_clock import running_time

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
MAX_FAILURES = 8  # failures of one request while others are answered
NOT_OUTAGES = (
    BadCompletion,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    NameError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
"""Errors of the request, or of the code that serves it, which a retry would raise again."""

log = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """An engine was given up, either for one request or for all."""


class RequestFailed(EngineFailed):
    """An engine was given up for one request, which it failed while it answered others."""


def is_outage(error: BaseException) -> bool:
    """Return whether an engine's error may be temporary, such as a timeout or a server error."""
    return not isinstance(error, NOT_OUTAGES)


def is_timeout(error: BaseException) -> bool:
    """Return whether an error is a ``TimeoutError``, or was caused by one."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, TimeoutError):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


class EngineHealth:
    """Counts the completions and failures of an engine, over all of its rollouts.

    Args:
        name: the engine's name in error messages.
        timeout_s: how long the engine may fail every request before it is given up.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self.name = name
        self.answers = 0
        """Number of answered requests."""
        self.answered_at = -math.inf
        """Time of the last answer, on the clock of this process."""
        self.errors: Counter[str] = Counter()
        """Number of failures, by the name of the error."""
        self._timeout_s = timeout_s
        self._users = 0
        self._failures = 0  # since the last answer
        self._down_since: float | None = None
        self._down_s = 0.0
        self._last: BaseException | None = None
        self._answered = asyncio.Event()

    @property
    def down_s(self) -> float:
        """Total duration of the engine's outages so far, in seconds."""
        now = 0.0 if self._down_since is None else running_time() - self._down_since
        return self._down_s + now

    @property
    def reason(self) -> str | None:
        """Why the engine is given up, or None."""
        if self._down_since is None or self._failures < MAX_FAILURES:
            return None
        down_s = running_time() - self._down_since
        if down_s <= self._timeout_s:
            return None
        assert self._last is not None
        return (
            f"the engine ({self.name}) has failed every request for {down_s:.0f} s "
            f"(timeout_s={self._timeout_s:g}); the last error: {summary(self._last)}"
        )

    def describe(self) -> str:
        """Return the engine's failures, for error messages; empty if there are none."""
        if self._last is None:
            return ""
        return (
            f"; errors of the engine ({self.name}): {dict(self.errors)}, the last: "
            f"{summary(self._last)}"
        )

    def answered(self) -> None:
        """Record an answered request."""
        self.answers += 1
        self.answered_at = running_time()
        self._recovered()
        self._answered.set()

    def failed(self, error: BaseException) -> None:
        """Record a failed request."""
        self.errors[type(error).__name__] += 1
        self._last = error
        self._failures += 1
        self._answered.clear()
        if self._down_since is None:
            self._down_since = running_time()
        if self._failures == MAX_FAILURES:
            log.warning("the engine (%s) fails: %s; rollouts wait", self.name, summary(error))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Mark the engine as in use during the body; an outage ends when nobody uses the engine."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._recovered()

    async def pause(self, timeout_s: float) -> None:
        """Wait until the engine answers a request, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()

    def _recovered(self) -> None:
        self._down_s, self._down_since, self._failures = self.down_s, None, 0


class Retry:
    """The retries of one request or rollout that the engine failed."""

    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        self._answers = health.answers
        self._alone = 0
        self._failures = 0

    async def failed(self, error: BaseException) -> None:
        """Record a failure and wait until the next attempt.

        Raises:
            RequestFailed: this request keeps failing while others are answered.
            EngineFailed: all requests have failed for too long.
        """
        health = self._health
        health.failed(error)
        self._failures += 1
        if health.answers > self._answers:
            self._answers = health.answers
            self._alone += 1
        if self._alone >= MAX_FAILURES:
            raise RequestFailed(
                f"the engine ({health.name}) failed one request {self._failures} times while it "
                f"answered others; the last error: {summary(error)}"
            ) from error
        if health.reason is not None:
            raise EngineFailed(health.reason) from error
        await health.pause(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20)))
