"""Tasks played once each, or a few times: for scores, not for training."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from primerl._common.progress import report
from primerl.rollout.collection.groups import CANCEL_S, Deadline, finish_by, play, results_of
from primerl.rollout.engines.health import EngineFailed, EngineHealth
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.errors import located, name_of
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import Group, Played, SamplingParams

CLOSE_S = 15.0  # for an environment to close
_END = object()


def play_tasks(
    engine: Engine,
    environment: Environment,
    tasks: Iterable[Task],
    params: SamplingParams,
    *,
    samples: int = 1,
    concurrency: int = 64,
    retries: int = 1,
    skip: Collection[tuple[str, int]] = (),
    play_timeout_s: float = 1800.0,
    timeout_s: float = 600.0,
) -> Iterator[Played]:
    """Play each task ``samples`` times, and yield each play when it has ended, in that order.

        for played in rollout.play_tasks(engine, environment, tasks, params, samples=4):
            results.add(played)

    What an environment or its reward raises is an end like any other, after ``retries``. A failure
    of the engine is not one of the play: it waits until the engine answers again. Leaving the loop
    early cancels what is in flight.

    Args:
        engine: must serve the same weights throughout, since plays are compared.
        environment: ``async (task, engine, params) -> Rollout``; it is closed at the end.
        tasks: mappings with a string ``"id"``.
        params: greedy, or as the policy is used.
        samples: plays of each task.
        retries: how often a play that failed is played again.
        concurrency: plays in flight.
        skip: ids and indices of plays that are not to be repeated.
        play_timeout_s: how long a play may take, with its retries and without outages of the
            engine; then its end is a ``TimeoutError``.
        timeout_s: how long the engine may fail every request before that is an error.

    Raises:
        EngineFailed: the engine was given up. What has been yielded stands.
        ValueError: a number is out of range, or a task has no id.
    """
    if samples < 1 or concurrency < 1 or retries < 0 or not play_timeout_s > 0:
        raise ValueError(
            f"samples={samples}, concurrency={concurrency}, retries={retries}, play_timeout_s="
            f"{play_timeout_s}: expected at least 1, 1 and 0, and a time above 0"
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
    plays = (
        partial(
            play_once,
            environment,
            task,
            engine,
            params,
            index=index,
            retries=retries,
            health=health,
            timeout_s=play_timeout_s,
        )
        for task, index in jobs
    )
    closed = threading.Event()
    playing = loop.submit(_run(plays, concurrency, ends, environment, closed))
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
    retries: int,
    health: EngineHealth,
    on_end: Callable[[Any], None],
) -> list[Played]:
    """Play each task ``samples`` times; returns the plays in the order of the tasks.

    ``on_end`` is called when one has ended.

    Raises:
        RuntimeError: more than one version of the weights was served.
        Exception: what the environment raised first, without ``keep_errors``.
    """
    version = engine.version
    playing = [
        asyncio.create_task(
            play_once(
                environment,
                task,
                engine,
                params,
                index=index,
                retries=retries,
                health=health,
                keep_error=keep_errors,
            )
        )
        for task in tasks
        for index in range(samples)
    ]
    for one in playing:
        one.add_done_callback(on_end)
    plays = await results_of(playing)
    rollouts = [played.rollout for played in plays if played.rollout is not None]
    versions = {version, *Group(task_id="", rollouts=rollouts).versions.tolist()}
    if len(versions) > 1:
        raise RuntimeError(
            f"weights {sorted(versions)} were served during one evaluation; publish when it "
            "has ended, or evaluate with an engine that nothing is published to (engine=)"
        )
    return plays


async def play_once(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    index: int,
    retries: int,
    health: EngineHealth,
    timeout_s: float | None = None,
    keep_error: bool = True,
) -> Played:
    """Play ``task`` once; what the environment raises is how it ended.

    Raises:
        EngineFailed: the engine was given up.
        Exception: what the environment raised, without ``keep_error``.
    """
    began = time.monotonic()
    rollout = error = message = None
    try:
        rollout = await finish_by(
            Deadline(timeout_s, health),
            play(environment, task, engine, params, retries=retries, health=health),
        )
    except EngineFailed:
        raise
    except Exception as failure:  # whatever an environment raises is a result
        if not keep_error:
            raise
        error, message = name_of(failure), located(failure)
    seconds = time.monotonic() - began
    return Played(
        task=task, index=index, seconds=seconds, rollout=rollout, error=error, message=message
    )


async def _run(
    plays: Iterator[Callable[[], Awaitable[Played]]],
    concurrency: int,
    ends: "queue.Queue[Any]",
    environment: Environment,
    closed: threading.Event,
) -> None:
    """Put each play's end into ``ends``, and at last ``_END``, also where this raises.

    ``closed`` is set when the plays have ended, and the environment is closed.
    """

    async def play_in_turn() -> None:
        for one in plays:
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
