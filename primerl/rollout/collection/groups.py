"""Groups: several rollouts of one task, run together, with retries, survivors and a deadline."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Iterable

import attrs

from primerl.rollout.collection.staleness import oldest_version
from primerl.rollout.engines.contract import Limits, check_rollout
from primerl.rollout.engines.health import EngineFailed, EngineHealth, Retry
from primerl.rollout.engines.observed import ObservedEngine
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, RewardError, Task
from primerl.rollout.errors import summary
from primerl.types import Group, PolicyVersion, Rollout, SamplingParams

FAILED = "failed"
TIMEOUT = "timeout"
ENGINE = "engine"
CANCEL_S = 5.0  # what a cancelled rollout may take to clean up, before it is left behind


class GroupFailed(RuntimeError):
    """Too few rollouts of a group survived; ``reason`` is the name to count it under."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@attrs.define(eq=False)
class Progress:
    """What is known of a group in flight, and what went wrong in it so far."""

    oldest: dict[int, PolicyVersion] = attrs.Factory(dict)
    """Of each rollout that has sampled: the oldest version that it may have sampled with."""
    tokens: int = 0
    """Sampled so far, in completed calls."""
    retried: int = 0
    errors: Counter[str] = attrs.Factory(Counter)
    """Failed attempts, by the name of the error."""
    begun: bool = False
    """Whether its task runs: one that is cancelled before could not account for its end."""
    attempts: dict[int, ObservedEngine] = attrs.Factory(dict)
    """Of each rollout, the attempt that is played."""
    unproven: bool = False
    """Whether it is cancelled because a version that sampled it was rejected."""

    def oldest_version(self, served: PolicyVersion) -> PolicyVersion:
        """The oldest version that a token of the group may have; ``served`` before any has."""
        return min(self.oldest.values(), default=served)

    @property
    def ignored_by_engine(self) -> bool:
        """Whether a rollout waits for the engine, which has long answered nobody."""
        return any(attempt.ignored for attempt in self.attempts.values())

    def observe(
        self, engine: Engine, index: int, health: EngineHealth | None = None
    ) -> ObservedEngine:
        """The engine for an attempt at rollout ``index``, of which this takes note."""
        self.oldest.pop(index, None)

        def begin(version: PolicyVersion | None) -> None:
            if version is None:
                self.oldest.pop(index, None)
            else:
                self.oldest.setdefault(index, version)

        def sampled(tokens: int) -> None:
            self.tokens += tokens

        self.attempts[index] = ObservedEngine(engine, begin=begin, sampled=sampled, health=health)
        return self.attempts[index]


async def run_group(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    size: int,
    task_id: str,
    min_size: int | None = None,
    retries: int = 0,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    health: EngineHealth | None = None,
) -> Group:
    """Run ``size`` rollouts of ``task`` at once.

    A rollout that fails is played again, up to ``retries`` times. The group closes when all have
    ended, or at its deadline, with those that succeeded if they are at least ``min_size`` (all
    of them by default). As soon as that can't be reached any more, the rest is cancelled, so that
    nothing goes on sampling for a group that will not be used.

    With ``health``, rollouts wait while the engine fails (the deadline moves by as much), and its
    failures are not theirs; without, they are.

    Raises:
        GroupFailed: too few rollouts survived: ``reason`` is ``"failed"``, ``"timeout"`` where
            the deadline decided, or ``"engine"`` where the engine did. The last failure is its
            cause.
        RewardError: at once: a mistake in the experiment, which no retry mends.
    """
    needed = size if min_size is None else min_size
    seen = progress if progress is not None else Progress()
    rollouts = [
        asyncio.create_task(
            play(
                environment,
                task,
                engine,
                params,
                retries=retries,
                progress=seen,
                index=index,
                health=health,
            )
        )
        for index in range(size)
    ]
    pending = set(rollouts)
    failures: list[BaseException] = []
    deadline = None if timeout_s is None else _Deadline(timeout_s, health)
    silent = False
    try:
        while pending and size - len(failures) >= needed:
            left = None if deadline is None else deadline.left_s
            if deadline is not None and deadline.left_s <= 0:
                silent = seen.ignored_by_engine
                break
            done, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            ended = [_failure(one) for one in rollouts if one in done]
            failures += [error for error in ended if error is not None]
            for error in failures:
                if isinstance(error, RewardError):
                    raise error
        survivors = [one.result() for one in rollouts if one.done() and _failure(one) is None]
    finally:
        await cancel_all(pending)
    if len(survivors) >= needed:
        return Group(
            task_id=task_id, rollouts=survivors, environment=str(task.get("environment", ""))
        )
    late = size - len(survivors) - len(failures)
    own = sum(not isinstance(error, EngineFailed) for error in failures)
    reason = TIMEOUT if size - len(failures) >= needed else FAILED
    unfinished = f" and {late} had not ended after {timeout_s:g} s" if reason == TIMEOUT else ""
    if silent or (reason == FAILED and size - own >= needed):
        reason = ENGINE
    raise GroupFailed(
        f"task {task_id!r}: {len(failures)} of {size} rollouts failed{unfinished}"
        + (f"; the last: {summary(failures[-1])}" if failures else ""),
        reason=reason,
    ) from (failures[-1] if failures else None)


class _Deadline:
    """The end of a group's time; an engine's outage does not count."""

    def __init__(self, timeout_s: float, health: EngineHealth | None) -> None:
        self._at = time.monotonic() + timeout_s
        self._health = health
        self._down_s = 0.0 if health is None else health.down_s

    @property
    def left_s(self) -> float:
        """How much time is left."""
        down_s = 0.0 if self._health is None else self._health.down_s - self._down_s
        return self._at + down_s - time.monotonic()


async def play(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    retries: int = 0,
    progress: Progress | None = None,
    index: int = 0,
    health: EngineHealth | None = None,
) -> Rollout:
    """Play one rollout, again where it fails, up to ``retries`` times; raises the last failure.

    ``progress`` takes note of it as the group's rollout ``index``. With the engine's ``health``,
    what the engine fails is no failure of the rollout, and is repeated until it answers.

    Raises:
        EngineFailed: the engine was given up. Else what the environment raised.
    """
    progress = progress or Progress()
    retry = None if health is None else Retry(health)
    failures = 0
    with contextlib.nullcontext() if health is None else health.used():
        while True:
            observed = progress.observe(engine, index, health)
            try:
                rollout = await attempt(environment, task, observed, params)
                if observed.bad is not None:
                    raise observed.bad  # caught by the environment, whose rollout is not trusted
                check_rollout(rollout, params, Limits.of(engine))
            except Exception as error:  # whatever an environment raises is data
                mistake = isinstance(error, RewardError)
                if not mistake and observed.given_up is not None:
                    raise observed.given_up from None
                if not mistake and retry is not None and observed.failed_by_engine(error):
                    await retry.failed(error)
                    continue
                progress.errors[type(error).__name__] += 1
                if failures == retries or mistake:
                    raise
                failures += 1
                progress.retried += 1
            else:
                versions = oldest_version(Group(task_id="", rollouts=[rollout]))
                if versions is not None:
                    progress.oldest[index] = versions
                return rollout


async def attempt(
    environment: Environment, task: Task, engine: Engine, params: SamplingParams
) -> Rollout:
    """Play one rollout and check what it returned; every failure is an ``Exception``."""
    try:
        rollout = await environment(dict(task), engine, params)
    except asyncio.CancelledError as error:
        if (mine := asyncio.current_task()) is not None and mine.cancelling():
            raise
        raise RuntimeError("the rollout was cancelled from within") from error
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:  # or it would end the event loop, and with it every rollout
        raise RuntimeError(f"the environment raised {type(error).__name__}: {error}") from error
    if not isinstance(rollout, Rollout):
        raise TypeError(f"the environment returned a {type(rollout).__name__}; expected a Rollout")
    return rollout


def _failure(task: "asyncio.Task[Rollout]") -> BaseException | None:
    if task.cancelled():  # not by us: a library inside the environment gave up
        return RuntimeError("the rollout was cancelled from within")
    return task.exception()


async def gather_or_cancel(rollouts: Iterable[Awaitable[Rollout]]) -> list[Rollout]:
    """All results in order; where one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable["asyncio.Future[Rollout]"]) -> None:
    """Cancel tasks and wait until they have cleaned up; one that refuses to end is left behind."""
    tasks = list(tasks)
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=CANCEL_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen, so that it is not reported as forgotten
