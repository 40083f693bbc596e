"""The worker: collects rollouts while the trainer trains, within the staleness bound."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from primerl.rollout.buffer import Buffer
from primerl.rollout.engine import Engine
from primerl.rollout.environment import Environment, RewardError, Task
from primerl.rollout.groups import gather_or_cancel, run_group
from primerl.rollout.staleness import check_schedule
from primerl.types import Group, PolicyVersion, Rollout, SamplingParams

POLL_S = 0.01  # how soon a newly served version is noticed
JOIN_S = 30.0


def worker(
    engine: Engine,
    environment: Environment,
    tasks: Iterable[Task],
    *,
    params: SamplingParams,
    group_size: int,
    groups_per_step: int,
    max_staleness: int,
    publish_every: int = 1,
    keep: Sequence[Callable[[Group], bool]] = (),
    timeout_s: float = 600.0,
    isolation: str = "thread",
) -> "Worker":
    """A worker that plays ``tasks`` in the background; use it as a context manager.

        with rollout.worker(engine, environment, tasks, params=params, group_size=8,
                            groups_per_step=16, max_staleness=2) as rollouts:
            groups = rollouts.take(version=step)

    Args:
        engine: samples; its ``version`` says which weights it serves.
        environment: ``async (task, engine, params) -> Rollout``.
        tasks: mappings, iterated again from the start when they run out.
        params: how training rollouts are sampled.
        group_size: rollouts per task, compared with each other.
        groups_per_step: groups that one ``take`` returns.
        max_staleness: the bound, in policy steps; 0 is the synchronous loop.
        publish_every: how often the recipe publishes weights, in policy steps.
        keep: filters; a group that one refuses is counted under its name and replaced.
        timeout_s: how long a wait may see no group that is kept before it raises.
        isolation: ``"thread"``: in this process, on an event loop of its own.

    Raises:
        ValueError: there are no tasks, a count is out of range, a completion cannot fit the
            engine's context, the sampler would not sample what is trained (``top_p``, ``top_k``,
            greedy), or the schedule could only stand still.
    """
    if isolation != "thread":
        raise ValueError(f"isolation={isolation!r}; this version runs a worker as a 'thread'")
    check_schedule(
        publish_every=publish_every, max_staleness=max_staleness, groups_per_step=groups_per_step
    )
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected at least 1 rollout per task")
    if params.max_tokens >= engine.context_length:
        raise ValueError(
            f"max_tokens={params.max_tokens} leaves no room for a prompt in the engine's context "
            f"of {engine.context_length} tokens"
        )
    if params.temperature == 0 or params.top_p < 1 or params.top_k != -1:
        raise ValueError(
            f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k}: "
            "training needs temperature > 0 and the full distribution (top_p=1, top_k=-1), or "
            "the logprobs trained on are not those that were sampled"
        )
    buffer = Buffer(groups_per_step=groups_per_step, max_staleness=max_staleness, keep=keep)
    return Worker(engine, environment, tasks, params, group_size, buffer, timeout_s)


class Worker:
    """A running rollout worker: made by ``worker``.

    Owns the event loop, the tasks' cursor and the buffer. ``take`` and ``evaluate`` are called
    from the trainer's thread and block, with a deadline.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        tasks: Iterable[Task],
        params: SamplingParams,
        group_size: int,
        buffer: Buffer,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._params = params
        self._group_size = group_size
        self._buffer = buffer
        self._timeout_s = timeout_s
        self._max_failures = 2 * buffer.groups_per_step
        self._tasks = _repeat(tasks)
        self._next_task: Task | None = next(self._tasks, None)
        if self._next_task is None:
            raise ValueError("there are no tasks; pass at least one mapping with a 'prompt'")
        # Guards everything below, and wakes take() when a group ends.
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failures_in_a_row = 0
        self._kept = 0
        self._tokens = 0
        self._trainer_wait_s = 0.0
        self._rollout_wait_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pump_task: asyncio.Task[None] | None = None

    def __enter__(self) -> "Worker":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name="primerl-rollouts", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(self._stop)
        thread.join(JOIN_S)
        if thread.is_alive() and error is None:
            raise RuntimeError(f"the rollout worker did not stop within {JOIN_S:.0f} s")

    def take(self, version: PolicyVersion) -> list[Group]:
        """The groups of one policy step, oldest first; blocks until they are there.

        Args:
            version: of the weights that the batch will be applied to. No returned token is staler
                than ``version - max_staleness``.

        Raises:
            RuntimeError: the engine serves weights too old for any rollout to be used (nothing
                was published); rollouts keep failing; the reward function failed; or no group
                was kept for ``timeout_s`` (none ended, or the filters refused them all).
        """
        self._running()
        began = time.perf_counter()
        with self._changed:
            kept, deadline = self._kept, began + self._timeout_s
            while (groups := self._buffer.take(version)) is None:
                self._require_progress(version)
                self._changed.wait(min(1.0, self._timeout_s))
                if self._kept != kept:
                    kept, deadline = self._kept, time.perf_counter() + self._timeout_s
                elif time.perf_counter() > deadline:
                    raise RuntimeError(
                        f"no group was kept for {self._timeout_s:.0f} s while step {version} "
                        f"waited for {self._buffer.groups_per_step}; {self._describe()}"
                    )
            self._trainer_wait_s += time.perf_counter() - began
        return groups

    def evaluate(
        self, tasks: Iterable[Task], params: SamplingParams, *, timeout_s: float = 600.0
    ) -> list[Rollout]:
        """Play each task once, beside training, and return the rollouts in order.

        Raises:
            RuntimeError: it took longer than ``timeout_s``. What an environment raises is raised.
        """
        loop, _ = self._running()
        played = gather_or_cancel(self._environment(task, self._engine, params) for task in tasks)
        future = asyncio.run_coroutine_threadsafe(played, loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise RuntimeError(f"the evaluation took longer than {timeout_s:.0f} s") from None

    def stats(self) -> dict[str, Any]:
        """Totals since the start.

        Groups: ``started == trained + dropped + in_flight + buffered``, with ``dropped_by`` the
        count for each reason. ``rollout_tokens`` were sampled for groups that finished.
        ``trainer_wait_s``: time in ``take``. ``rollout_wait_s``: time in which the bound let no
        group run.
        """
        with self._changed:
            buffer = self._buffer
            return {
                "started": buffer.started,
                "trained": buffer.trained,
                "dropped": buffer.dropped.total(),
                "dropped_by": dict(buffer.dropped),
                "in_flight": buffer.in_flight,
                "buffered": buffer.buffered,
                "rollout_tokens": self._tokens,
                "trainer_wait_s": self._trainer_wait_s,
                "rollout_wait_s": self._rollout_wait_s,
            }

    def _running(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        self._raise_error()
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the worker is not running; use `with rollout.worker(...) as ...`")
        return self._loop, self._thread

    def _require_progress(self, version: int) -> None:
        """Raise what makes waiting pointless. Called with the lock held."""
        self._raise_error()
        served = self._engine.version
        if version - served > self._buffer.max_staleness:
            raise RuntimeError(
                f"step {version} cannot be filled: the engine still serves version {served}, so "
                f"any rollout would be {version - served} steps stale, more than "
                f"max_staleness={self._buffer.max_staleness}; publish weights after the optimizer "
                "step (and check that publishing succeeds)"
            )
        if self._next_task is None and self._buffer.in_flight == 0:
            raise RuntimeError(
                "the tasks ran out and could not be iterated again; pass a list, not an iterator"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"rollouts stopped: {self._error}") from self._error

    def _describe(self) -> str:
        buffer = self._buffer
        return (
            f"{buffer.in_flight} groups are in flight, {buffer.buffered} buffered, "
            f"{dict(buffer.dropped)} dropped; the engine serves version {self._engine.version}"
        )

    # ---- on the worker's event loop ----

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._pump_task = loop.create_task(self._pump())
        try:
            loop.run_until_complete(self._pump_task)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # what a task iterator raises, say; take() raises it again
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            loop.run_until_complete(_cancel_all(loop))
            loop.close()

    def _stop(self) -> None:
        if self._pump_task is not None:
            self._pump_task.cancel()

    async def _pump(self) -> None:
        """Start groups as the bound allows, until cancelled."""
        running: set[asyncio.Task[None]] = set()
        while True:
            while (admitted := self._admit()) is not None:
                number, task = admitted
                running.add(asyncio.create_task(self._play(number, task)))
            began = time.perf_counter()
            if running:
                _, running = await asyncio.wait(
                    running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(POLL_S)
                with self._changed:
                    self._rollout_wait_s += time.perf_counter() - began

    def _admit(self) -> tuple[int, Task] | None:
        with self._changed:
            task = self._next_task
            if (
                task is None
                or self._error is not None
                or not self._buffer.may_start(served=self._engine.version)
            ):
                return None
            self._next_task = next(self._tasks, None)
            self._buffer.start()
            return self._buffer.started, task

    async def _play(self, number: int, task: Task) -> None:
        """Run one group and hand it over; a failure is data, counted as ``"failed"``."""
        try:
            group = await run_group(
                self._environment,
                task,
                self._engine,
                self._params,
                size=self._group_size,
                task_id=str(task.get("id", number)),
            )
        except asyncio.CancelledError:
            self._end(None, "cancelled", None)
            raise
        except Exception as error:  # whatever an environment raises ends its group, not the worker
            self._end(None, "failed", error)
        else:
            self._end(group, "", None)

    def _end(self, group: Group | None, reason: str, error: Exception | None) -> None:
        with self._changed:
            try:
                if group is None:
                    self._buffer.drop(reason)
                else:
                    self._kept += self._buffer.put(group)
                    self._tokens += len(group.versions)
            except Exception as filter_error:  # a user's filter raised: the run cannot go on
                self._buffer.drop("failed")
                self._error = filter_error
            self._failures_in_a_row = self._failures_in_a_row + 1 if error else 0
            if error is not None and (
                isinstance(error, RewardError) or self._failures_in_a_row >= self._max_failures
            ):
                self._error = error
            self._changed.notify_all()


def _repeat(tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks again and again; ends where a pass yields nothing."""
    while True:
        empty = True
        for task in tasks:
            empty = False
            yield task
        if empty:
            return


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    others = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
