"""Playing each task once, or a few times, to score a policy rather than to train it."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from primerl._common.progress import report
from primerl.rollout.collection.groups import (
    CANCEL_S,
    Deadline,
    Progress,
    finish_by,
    results_of,
    run_rollout,
    start_in_turn,
)
from primerl.rollout.engines.health import EngineFailed, EngineHealth, RequestFailed
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.errors import located, name_of
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import Group, Outcome, PolicyVersion, SamplingParams

CLOSE_S = 15.0  # time in which an environment may close
_END = object()


def evaluate_tasks(
    engine: Engine,
    environment: Environment,
    tasks: Iterable[Task],
    params: SamplingParams,
    *,
    samples: int = 1,
    concurrency: int = 64,
    retries: int = 1,
    skip: Collection[tuple[str, int]] = (),
    rollout_timeout_s: float = 1800.0,
    timeout_s: float = 600.0,
) -> Iterator[Outcome]:
    """Play each task ``samples`` times; yield each result as soon as its rollout has ended.

        for outcome in rollout.evaluate_tasks(engine, environment, tasks, params, samples=4):
            results.append(outcome)

    If the environment or its reward still raises after ``retries``, the error is the rollout's
    result. If the engine fails, rollouts wait until it answers again. Leaving the loop early
    cancels the rollouts in flight.

    Args:
        engine: must serve the same weights throughout, since results are compared.
        environment: ``async (task, engine, params) -> Rollout``; it is closed at the end.
        tasks: mappings with a string ``"id"``.
        params: sampling parameters: greedy, or those with which the policy will be used.
        samples: rollouts per task.
        retries: how often a failed rollout is played again.
        concurrency: the maximum number of rollouts in flight.
        skip: pairs of task id and index of rollouts that are not to be played again.
        rollout_timeout_s: how long a rollout may take, including its retries but not the engine's
            outages; after that its result is a ``TimeoutError``.
        timeout_s: how long the engine may fail every request before that is an error.

    Raises:
        EngineFailed: the engine was given up. The results yielded so far are valid.
        ValueError: a number is out of range, or a task has no id.
    """
    if samples < 1 or concurrency < 1 or retries < 0 or not rollout_timeout_s > 0:
        raise ValueError(
            f"samples={samples}, concurrency={concurrency}, retries={retries}, rollout_timeout_s="
            f"{rollout_timeout_s}: expected at least 1, at least 1, at least 0, and a time above 0"
        )
    tasks = list(tasks)
    for task in tasks:
        if not isinstance(task.get("id"), str):
            raise ValueError(f"the task {dict(task)!r:.80} has no 'id' that is a string")
    jobs = [
        (task, index)
        for task in tasks
        for index in range(samples)
        if (task["id"], index) not in skip
    ]
    ends: queue.Queue[Any] = queue.Queue()
    loop = BackgroundLoop("primerl-evaluation")
    health = EngineHealth(type(engine).__name__, timeout_s=timeout_s)
    outcomes = (
        partial(
            evaluate_once,
            environment,
            task,
            engine,
            params,
            index=index,
            name=f"evaluation-{engine.version}-{number}",
            retries=retries,
            health=health,
            timeout_s=rollout_timeout_s,
        )
        for number, (task, index) in enumerate(jobs)
    )
    closed = threading.Event()
    playing = loop.submit(_run(outcomes, concurrency, ends, environment, closed))
    try:
        for count in range(1, len(jobs) + 1):
            end = ends.get()
            if end is _END:
                break
            report("evaluating", f"{count}/{len(jobs)} rollouts")
            yield end
        playing.result()
    finally:
        playing.cancel()
        closed.wait(CANCEL_S + CLOSE_S)
        loop.stop()


async def evaluate(
    environment: Environment,
    tasks: Sequence[Task],
    engine: Engine,
    params: SamplingParams,
    *,
    samples: int,
    keep_errors: bool,
    one_version: bool,
    retries: int,
    health: EngineHealth,
    timeout_s: float,
    name: str,
    places: int,
    place: Callable[[], AbstractAsyncContextManager[None]],
    on_end: Callable[[], None],
) -> list[Outcome]:
    """Play each task ``samples`` times; return the results in the order of the tasks.

    Each rollout is played in a ``place``, at most ``places`` of them at once. ``on_end`` is called
    whenever a rollout has ended.

    Raises:
        RuntimeError: more than one version of the weights was served, with ``one_version``.
        Exception: the first error of an environment, without ``keep_errors``.
    """
    versions = {engine.version}
    outcomes: dict[int, Outcome] = {}
    jobs = [(task, index) for task in tasks for index in range(samples)]
    left = iter(enumerate(jobs))

    async def play_in_turn() -> None:
        for number, (task, index) in left:
            async with place():
                outcome = await evaluate_once(
                    environment,
                    task,
                    engine,
                    params,
                    index=index,
                    name=f"{name}.{number}",
                    retries=retries,
                    health=health,
                    timeout_s=timeout_s,
                    keep_error=keep_errors,
                )
            outcomes[number] = outcome
            versions.update(_bounds(outcome))
            on_end()

    turns = await start_in_turn(play_in_turn() for _ in range(min(places, len(jobs))))
    await results_of(turns)
    if one_version and len(versions) > 1:
        raise RuntimeError(
            f"weights {sorted(versions)} were served during one evaluation; publish after it "
            "has ended, or pass an engine that is not published to meanwhile (engine=)"
        )
    return [outcomes[number] for number in range(len(jobs))]


def _bounds(outcome: Outcome) -> set[PolicyVersion]:
    """Return the oldest and the newest version of a rollout's tokens to be trained."""
    if outcome.rollout is None:
        return set()
    found = Group(task_id="", rollouts=[outcome.rollout]).versions
    return {int(bound) for bound in (found.min(), found.max())} if len(found) else set()


async def evaluate_once(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    index: int,
    name: str,
    retries: int,
    health: EngineHealth,
    timeout_s: float,
    keep_error: bool = True,
) -> Outcome:
    """Play ``task`` once; record an environment's error as the result.

    So is the error of a request that the engine fails while it answers others. The sessions of the
    rollout are named after ``name``.

    Raises:
        EngineFailed: the engine was given up for all requests.
        Exception: the environment's error, without ``keep_error``.
    """
    began = time.monotonic()
    rollout = error = message = None
    progress = Progress(name=name)
    played = run_rollout(
        environment, task, engine, params, retries=retries, progress=progress, health=health
    )
    try:
        rollout = await finish_by(Deadline(timeout_s, health), played)
    except Exception as failure:  # an environment's error is a result, too
        given_up = isinstance(failure, EngineFailed) and not isinstance(failure, RequestFailed)
        if given_up or not keep_error:
            raise
        error, message = name_of(failure), located(failure)
    seconds = time.monotonic() - began
    return Outcome(
        task=task, index=index, seconds=seconds, rollout=rollout, error=error, message=message
    )


async def _run(
    outcomes: Iterator[Callable[[], Awaitable[Outcome]]],
    concurrency: int,
    ends: "queue.Queue[Any]",
    environment: Environment,
    closed: threading.Event,
) -> None:
    """Put each result into ``ends``, and finally ``_END``, even if this raises.

    ``closed`` is set when all rollouts have ended and the environment is closed.
    """

    async def play_in_turn() -> None:
        for one in outcomes:
            ends.put(await one())

    turns = [asyncio.create_task(play_in_turn()) for _ in range(concurrency)]
    try:
        await results_of(turns)
    finally:
        try:
            if hasattr(environment, "aclose"):
                async with asyncio.timeout(CLOSE_S):
                    await environment.aclose()
        finally:
            ends.put(_END)
            closed.set()
