"""Whether an engine answers: an outage is the engine's failure, not that of the tasks that meet it.

A request that the engine fails is sent again, after a pause that grows, until it is answered. The
engine is given up when it has answered nobody for a stated time, and a single request when it fails
again and again while others are answered (a prompt that brings its server down, say).
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator

from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.errors import summary

FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 5.0
MOST_FAILURES = 8  # of one request, while others are answered
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
"""What says that a request, or the code that serves it, is wrong: no repetition mends that."""

log = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """An engine was given up, for one request or for all."""


def is_outage(error: BaseException) -> bool:
    """Whether what an engine raised may pass: a lost connection, a timeout, a server's failure."""
    return not isinstance(error, NOT_OUTAGES)


def is_timeout(error: BaseException) -> bool:
    """Whether a ``TimeoutError`` is what was raised, or the cause of that."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, TimeoutError):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


class EngineHealth:
    """What is known of an engine from its answers and failures, shared by all of its rollouts.

    Args:
        name: what error messages call the engine.
        timeout_s: how long it may fail every request before it is given up.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self.name = name
        self.answers = 0
        """Requests that were answered."""
        self.answered_at = -math.inf
        """When the last was, by the monotonic clock."""
        self.errors: Counter[str] = Counter()
        """Failures, by the name of the error."""
        self._timeout_s = timeout_s
        self._users = 0
        self._failures = 0  # since the last answer
        self._down_since: float | None = None
        self._down_s = 0.0
        self._last: BaseException | None = None
        self._answered = asyncio.Event()

    @property
    def down_s(self) -> float:
        """For how long it has been failing so far, in all its outages."""
        now = 0.0 if self._down_since is None else time.monotonic() - self._down_since
        return self._down_s + now

    @property
    def reason(self) -> str | None:
        """Why it is given up; None while it is not."""
        if self._down_since is None or self._failures < MOST_FAILURES:
            return None
        down_s = time.monotonic() - self._down_since
        if down_s <= self._timeout_s:
            return None
        assert self._last is not None
        return (
            f"the engine ({self.name}) has failed every request for {down_s:.0f} s "
            f"(timeout_s={self._timeout_s:g}); the last: {summary(self._last)}"
        )

    def describe(self) -> str:
        """Its failures, in words; empty where there are none."""
        if self._last is None:
            return ""
        return (
            f"; errors of the engine ({self.name}): {dict(self.errors)}, the last: "
            f"{summary(self._last)}"
        )

    def answered(self) -> None:
        """It has answered a request."""
        self.answers += 1
        self.answered_at = time.monotonic()
        self._recovered()
        self._answered.set()

    def failed(self, error: BaseException) -> None:
        """It has failed a request."""
        self.errors[type(error).__name__] += 1
        self._last = error
        self._failures += 1
        self._answered.clear()
        if self._down_since is None:
            self._down_since = time.monotonic()
        if self._failures == MOST_FAILURES:
            log.warning("the engine (%s) fails: %s; rollouts wait", self.name, summary(error))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Somebody may ask it in the body; while nobody does, no outage goes on."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._recovered()

    async def pause(self, most_s: float) -> None:
        """Wait until it answers anybody, at most ``most_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._answered.wait()

    def _recovered(self) -> None:
        self._down_s, self._down_since, self._failures = self.down_s, None, 0


class Repetition:
    """One request, or one rollout, that is tried again where the engine failed it."""

    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        self._answers = health.answers
        self._alone = 0
        self._failures = 0

    async def failed(self, error: BaseException) -> None:
        """Wait until it may be tried again.

        Raises:
            EngineFailed: it is not: this one fails while others are answered, or all have failed
                for too long.
        """
        health = self._health
        health.failed(error)
        self._failures += 1
        if health.answers > self._answers:
            self._answers = health.answers
            self._alone += 1
        if self._alone >= MOST_FAILURES:
            raise EngineFailed(
                f"the engine ({health.name}) failed one request {self._failures} times while it "
                f"answered others; the last: {summary(error)}"
            ) from error
        if health.reason is not None:
            raise EngineFailed(health.reason) from error
        await health.pause(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20)))
