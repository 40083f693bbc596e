"""Groups: several rollouts of one task, run together, with retries, survivors and a deadline."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import attrs

from primerl.rollout.contract import BadCompletion, Limits, check_completion, check_rollout
from primerl.rollout.engine import Engine
from primerl.rollout.environment import Environment, RewardError, Task
from primerl.rollout.errors import summary
from primerl.rollout.staleness import oldest_version
from primerl.types import Completion, Group, PolicyVersion, Rollout, SamplingParams

FAILED = "failed"
TIMEOUT = "timeout"
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
    bad: dict[int, BadCompletion] = attrs.Factory(dict)
    """Of each rollout: an answer that broke the contract, whatever its environment made of it."""
    begun: bool = False
    """Whether its task runs: one that is cancelled before could not account for its end."""
    unproven: bool = False
    """Whether it is cancelled because a version that sampled it was rejected."""

    def oldest_version(self, served: PolicyVersion) -> PolicyVersion:
        """The oldest version that a token of the group may have; ``served`` before any has."""
        return min(self.oldest.values(), default=served)


@attrs.frozen
class _Observed:
    """An engine that notes when a rollout first samples, and how much."""

    engine: Engine
    progress: Progress
    rollout: int

    @property
    def version(self) -> PolicyVersion:
        return self.engine.version

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        served = self.engine.version
        self.progress.oldest.setdefault(self.rollout, served)
        completion = await self.engine.generate(prompt_ids, params, session=session)
        try:
            limits = Limits.of(self.engine, oldest=served)
            check_completion(completion, len(prompt_ids), params, limits)
        except BadCompletion as error:
            self.progress.bad[self.rollout] = error
            raise
        self.progress.tokens += len(completion.token_ids)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)  # what this engine has beyond the protocol


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
) -> Group:
    """Run ``size`` rollouts of ``task`` at once.

    A rollout that fails is played again, up to ``retries`` times. The group closes when all have
    ended, or at its deadline, with those that succeeded if they are at least ``min_size`` (all
    of them by default). As soon as that can't be reached any more, the rest is cancelled, so that
    nothing goes on sampling for a group that will not be used.

    Raises:
        GroupFailed: too few rollouts survived: ``reason`` is ``"failed"``, or ``"timeout"`` where
            the deadline decided. The last failure is its cause.
        RewardError: at once: a mistake in the experiment, which no retry mends.
    """
    needed = size if min_size is None else min_size
    seen = progress if progress is not None else Progress()
    rollouts = [
        asyncio.create_task(
            play(environment, task, engine, params, retries=retries, progress=seen, index=index)
        )
        for index in range(size)
    ]
    pending = set(rollouts)
    failures: list[BaseException] = []
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        while pending and size - len(failures) >= needed:
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
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
    reason = TIMEOUT if size - len(failures) >= needed else FAILED
    raise GroupFailed(
        f"task {task_id!r}: {len(failures)} of {size} rollouts failed"
        + (f" and {late} had not ended after {timeout_s:.0f} s" if reason == TIMEOUT else "")
        + (f"; the last: {summary(failures[-1])}" if failures else ""),
        reason=reason,
    ) from (failures[-1] if failures else None)


async def play(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    retries: int = 0,
    progress: Progress | None = None,
    index: int = 0,
) -> Rollout:
    """Play one rollout, again where it fails, up to ``retries`` times; raises the last failure.

    ``progress`` takes note of it as the group's rollout ``index``.
    """
    progress = progress or Progress()
    for number in range(retries + 1):
        progress.oldest.pop(index, None)
        progress.bad.pop(index, None)
        try:
            rollout = await attempt(environment, task, _Observed(engine, progress, index), params)
            if (bad := progress.bad.pop(index, None)) is not None:
                raise bad  # the environment caught it; its rollout is not to be trusted
            check_rollout(rollout, params, Limits.of(engine))
        except Exception as error:  # whatever an environment raises is data
            progress.errors[type(error).__name__] += 1
            if number == retries or isinstance(error, RewardError):
                raise
            progress.retried += 1
        else:
            versions = oldest_version(Group(task_id="", rollouts=[rollout]))
            if versions is not None:
                progress.oldest[index] = versions
            return rollout
    raise AssertionError("unreachable")


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
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        done, _ = await asyncio.wait(waiting, timeout=CANCEL_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen, so that it is not reported as forgotten
