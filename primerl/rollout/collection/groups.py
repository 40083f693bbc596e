"""Groups: rollouts of one task that run concurrently, with retries, survivors and a deadline."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import attrs

from primerl.rollout.collection.staleness import oldest_version
from primerl.rollout.engines.contract import EngineLimits, check_rollout, check_routes
from primerl.rollout.engines.health import EngineFailed, EngineHealth, Retry
from primerl.rollout.engines.observed import ObservedEngine
from primerl.rollout.engines.protocol import Engine, discard_routes
from primerl.rollout.environments.environment import Environment, RewardError, Task
from primerl.rollout.errors import located, name_of
from primerl.rollout.processes.running_clock import running_time
from primerl.types import Group, PolicyVersion, Rollout, SamplingParams

FAILED = "failed"
TIMEOUT = "timeout"
ENGINE = "engine"
CANCEL_S = 5.0  # time in which a cancelled rollout may clean up before it is abandoned
POLL_S = 0.01  # how often to check whether an outage is over
T = TypeVar("T")

# ---- one rollout ----


@attrs.define(eq=False)
class Progress:
    """The progress of a group in flight, with its failures so far."""

    name: str = ""
    """What the sessions of its rollouts are named after."""
    oldest: dict[int, PolicyVersion] = attrs.Factory(dict)
    """For each rollout that has sampled: the oldest version that may have sampled its tokens."""
    tokens: int = 0
    """Tokens sampled so far, in completed calls."""
    retried: int = 0
    errors: Counter[str] = attrs.Factory(Counter)
    """Number of failed attempts, by the name of the error."""
    begun: bool = False
    """Whether its asyncio task has begun to run; a task cancelled earlier can't count its end."""
    attempts: dict[int, ObservedEngine] = attrs.Factory(dict)
    """The engine of each rollout's current attempt."""
    rejected: bool = False
    """Whether the group is cancelled because a version that sampled it was rejected."""

    def oldest_version(self, served: PolicyVersion) -> PolicyVersion:
        """Return the oldest version that may have sampled a token of the group; else ``served``."""
        return min(self.oldest.values(), default=served)

    @property
    def ignored_by_engine(self) -> bool:
        """Whether an engine leaves a rollout waiting and has answered no request for long."""
        return any(attempt.ignored for attempt in self.attempts.values())

    def observe(
        self, engine: Engine, index: int, health: EngineHealth | None = None
    ) -> ObservedEngine:
        """Return the engine for a new attempt at rollout ``index``; it records its calls here."""
        self.oldest.pop(index, None)

        def begin(version: PolicyVersion | None) -> None:
            if version is None:
                self.oldest.pop(index, None)
            else:
                self.oldest.setdefault(index, version)

        def sampled(tokens: int) -> None:
            self.tokens += tokens

        name = f"{self.name}.{index}" if self.name else ""
        self.attempts[index] = ObservedEngine(
            engine, begin=begin, sampled=sampled, health=health, name=name
        )
        return self.attempts[index]


async def run_rollout(
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
    """Play one rollout, retrying up to ``retries`` times; raise the last failure.

    ``progress`` records it as the group's rollout ``index``. With the engine's ``health``, a
    failure of the engine does not count as a failure of the rollout: the rollout is played again
    until the engine answers, even if the environment caught the engine's error and returned a
    rollout without the completion.

    Raises:
        EngineFailed: the engine was given up.
        Exception: what the environment raised.
    """
    progress = progress or Progress()
    retry = None if health is None else Retry(health)
    failures = 0
    with contextlib.nullcontext() if health is None else health.used():
        while True:
            observed = progress.observe(engine, index, health)
            used: set[str] = set()
            try:
                rollout = await attempt(environment, task, observed, params)
                if observed.bad is not None:
                    raise observed.bad  # the environment caught it: distrust its rollout
                if observed.outage is not None:
                    raise observed.outage  # the environment gave up, e.g. at an agent's limit
                check_rollout(rollout, params, EngineLimits.of(engine))
                await check_routes(rollout, engine)
            except Exception as error:  # an environment may raise anything
                mistake = isinstance(error, RewardError)
                if not mistake and observed.given_up is not None:
                    raise observed.given_up from None
                if not mistake and retry is not None and observed.failed_by_engine(error):
                    await retry.failed(error)
                    continue
                progress.errors[name_of(error)] += 1
                if failures == retries or mistake:
                    raise
                failures += 1
                progress.retried += 1
            else:
                oldest = oldest_version(Group(task_id="", rollouts=[rollout]))
                if oldest is not None:
                    progress.oldest[index] = oldest
                used = routes_of([rollout])
                return rollout
            finally:  # also if it was cancelled
                discard_routes(engine, observed.routes_of_calls - used)


def routes_of(rollouts: Iterable[Rollout]) -> set[str]:
    """Return the references to the routes of rollouts."""
    return {ref for one in rollouts for sample in one.samples for ref in sample.routes}


async def attempt(
    environment: Environment, task: Task, engine: Engine, params: SamplingParams
) -> Rollout:
    """Play one rollout once; raise every failure as an ``Exception``."""
    try:
        rollout = await environment(dict(task), engine, params)
    except asyncio.CancelledError as error:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
        raise RuntimeError("the rollout was cancelled from within the environment") from error
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:  # would end the event loop, and with it every rollout
        raise RuntimeError(f"the environment raised {type(error).__name__}: {error}") from error
    if not isinstance(rollout, Rollout):
        raise TypeError(f"the environment returned a {type(rollout).__name__}; expected a Rollout")
    return rollout


# ---- a group ----


class GroupFailed(RuntimeError):
    """Too few rollouts of a group survived; ``reason`` is the name under which it is counted."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


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
    """Run ``size`` rollouts of ``task`` concurrently and return those that succeeded.

    A rollout that fails is played again, up to ``retries`` times. The group closes when all
    rollouts have ended, or at its deadline. It needs at least ``min_size`` successful rollouts
    (by default all); as soon as it can't reach them, the other rollouts are cancelled.

    With ``health``, rollouts wait while the engine fails: the deadline is extended by that time,
    and the engine's failures do not count as theirs. Without ``health``, they do.

    Raises:
        GroupFailed: too few rollouts survived. ``reason`` is ``"failed"``, ``"timeout"`` if the
            deadline passed, or ``"engine"`` if the engine failed. The last failure is its cause.
        RewardError: at once, because no retry can correct this mistake in the experiment.
    """
    needed = size if min_size is None else min_size
    progress = Progress() if progress is None else progress
    rollouts = [
        asyncio.create_task(
            run_rollout(
                environment,
                task,
                engine,
                params,
                retries=retries,
                progress=progress,
                index=index,
                health=health,
            )
        )
        for index in range(size)
    ]
    pending = set(rollouts)
    failures: list[BaseException] = []
    deadline = Deadline(timeout_s, health)
    reason = FAILED
    used: list[asyncio.Task[Rollout]] = []
    try:
        while pending and size - len(failures) >= needed:
            if deadline.over:
                reason = ENGINE if progress.ignored_by_engine else TIMEOUT
                break
            done, pending = await deadline.wait(pending)
            ended = [_failure(one) for one in rollouts if one in done]
            failures += [error for error in ended if error is not None]
            for error in failures:
                if isinstance(error, RewardError):
                    raise error
        survivors = [one for one in rollouts if one.done() and _failure(one) is None]
        used = survivors if len(survivors) >= needed else []
    finally:
        await cancel_all(pending, timeout_s=CANCEL_S)
        unused = [one for one in rollouts if one.done() and one not in used]
        discard_routes(engine, routes_of(one.result() for one in unused if _failure(one) is None))
    if len(survivors) < needed:
        text = f"task {task_id!r}: {len(failures)} of {size} rollouts failed"
        if reason == FAILED:
            their_own = sum(not isinstance(error, EngineFailed) for error in failures)
            reason = ENGINE if size - their_own >= needed else FAILED
        else:
            late = size - len(survivors) - len(failures)
            text += f" and {late} had not ended after {timeout_s:g} s"
        if failures:
            text += f"; the last error: {located(failures[-1])}"
        raise GroupFailed(text, reason=reason) from (failures[-1] if failures else None)
    return Group(
        task_id=task_id,
        rollouts=[one.result() for one in used],
        environment=str(task.get("environment", "")),
    )


class Deadline:
    """The deadline of a group or a rollout; the time of the engine's outages does not count."""

    def __init__(self, timeout_s: float | None, health: EngineHealth | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else running_time() + timeout_s
        self._health = health
        self._down_s = 0.0 if health is None else health.down_s

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        left_s = self._left_s
        return left_s is not None and left_s <= 0

    async def wait(
        self, tasks: "Collection[asyncio.Task[T]]"
    ) -> "tuple[set[asyncio.Task[T]], set[asyncio.Task[T]]]":
        """Wait until one of ``tasks`` has ended or time may be up; return (done, pending) tasks."""
        left_s = self._left_s
        if left_s is not None:
            left_s = max(left_s, POLL_S)  # an outage can freeze the time left close to 0
        return await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    @property
    def _left_s(self) -> float | None:
        if self._at is None:
            return None
        down_s = 0.0 if self._health is None else self._health.down_s - self._down_s
        return self._at + down_s - running_time()


async def finish_by(deadline: Deadline, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine; cancel it at its deadline.

    Raises:
        TimeoutError: the deadline passed.
        Exception: what the coroutine raises.
    """
    task = asyncio.create_task(coroutine)
    try:
        while not task.done():
            if deadline.over:
                raise TimeoutError(f"the rollout had not ended after {deadline.timeout_s:g} s")
            await deadline.wait([task])
        return task.result()
    finally:
        await cancel_all([task], timeout_s=CANCEL_S)


def _failure(task: "asyncio.Task[Rollout]") -> BaseException | None:
    if task.cancelled():  # not by us: a library inside the environment gave up
        return RuntimeError("the rollout was cancelled from within the environment")
    return task.exception()


async def start_in_turn(
    coroutines: Iterable[Coroutine[Any, Any, T]],
) -> "list[asyncio.Task[T]]":
    """Start tasks one by one, because starting hundreds at once would block the event loop."""
    tasks: list[asyncio.Task[T]] = []
    try:
        for coroutine in coroutines:
            tasks.append(asyncio.create_task(coroutine))
            await asyncio.sleep(0)
    except BaseException:
        await cancel_all(tasks, timeout_s=CANCEL_S)
        raise
    return tasks


async def results_of(tasks: Sequence["asyncio.Task[T]"]) -> list[T]:
    """Return the results of all tasks, or raise the first failure and cancel the other tasks.

    If this is cancelled, it cancels each task exactly once and waits for all of them, since a
    second cancellation would cut off a task's cleanup. (``asyncio.gather`` cancels the tasks as
    well, but waits only for the first to end.)
    """
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]  # raises if one has failed
    finally:
        await cancel_all(tasks, timeout_s=CANCEL_S)


async def cancel_all(tasks: Collection["asyncio.Task[Any]"], *, timeout_s: float) -> None:
    """Cancel tasks and wait until they have cleaned up; abandon tasks that do not end in time."""
    for task in tasks:
        task.cancel()
    await wait_until_ended(tasks, timeout_s=timeout_s)


def cancel_once(task: "asyncio.Task[None]") -> None:
    """Cancel a task, unless it was cancelled before: a second time would cut off its cleanup.

    Use it only for tasks that this package creates. ``asyncio.timeout``, which environments use,
    also cancels its task, and would hide that this function has not cancelled it.
    """
    if not task.cancelling():
        task.cancel()


async def wait_until_ended(tasks: Collection["asyncio.Task[Any]"], *, timeout_s: float) -> None:
    """Wait for cancelled tasks; abandon those that do not end in time."""
    waiting = [task for task in tasks if not task.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved
