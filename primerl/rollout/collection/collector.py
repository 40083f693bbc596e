"""The collector: everything that a worker does, apart from its thread or process."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs

from primerl._common.engine_usage import EngineUsage
from primerl.rollout.collection.buffer import Buffer
from primerl.rollout.collection.concurrency import follow_load
from primerl.rollout.collection.engine_watch import EngineWatch, reports_metrics
from primerl.rollout.collection.evaluation import evaluate
from primerl.rollout.collection.groups import cancel_once, routes_of, wait_until_ended
from primerl.rollout.collection.scheduler import GroupScheduler
from primerl.rollout.collection.settings import (
    CollectionSettings,
    EvaluationOptions,
    decode_state,
    encode_state,
)
from primerl.rollout.collection.stalls import StallTimer, unfillable
from primerl.rollout.engines.health import EngineHealth
from primerl.rollout.engines.protocol import Engine, discard_routes
from primerl.rollout.engines.remote import EngineAddress, RemoteEngines
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.errors import message
from primerl.rollout.processes.channel import Channel
from primerl.rollout.processes.loop_lag import LoopLag
from primerl.rollout.processes.running_clock import CLOCK
from primerl.rollout.tasks.streams import TaskStream
from primerl.types import Group, Outcome, PolicyVersion, SamplingParams

HEARTBEAT_S = 1.0
VERSION_S = 0.05  # the delay within which an evaluation notices the version that it waits for
CLOSE_S = 15.0

log = logging.getLogger(__name__)


class Collector:
    """Plays tasks ahead of training and returns the groups of each step.

    Everything runs on one event loop, so there are no locks. The trainer's side calls the public
    methods.
    """

    def __init__(
        self,
        channel: Channel | None,
        *,
        engine: Engine | EngineAddress,
        environment: Environment,
        tasks: TaskStream,
        keep: Sequence[Callable[[Group], bool]],
        plan: CollectionSettings,
        state: bytes | None,
    ) -> None:
        self._channel = channel
        self._engines = RemoteEngines(channel)
        self._engine = self._engines.find(engine)
        self._health = EngineHealth(_name(engine, self._engine), timeout_s=plan.timeout_s)
        self._environment = environment
        self._plan = plan
        self._buffer = Buffer(
            groups_per_step=plan.groups_per_step,
            max_staleness=plan.max_staleness,
            keep=keep,
            on_stale=plan.on_stale,
            await_verification=plan.await_verification,
            on_drop=lambda group: discard_routes(self._engine, routes_of(group.rollouts)),
        )
        self._scheduler = GroupScheduler(
            environment=environment,
            tasks=tasks,
            engine=self._engine,
            health=self._health,
            buffer=self._buffer,
            plan=plan,
        )
        self._taken: PolicyVersion = 0  # the last step whose groups were returned
        self._ended_delivery = 0  # takes up to this number were delivered or given up
        self._evaluations: set[asyncio.Task[Any]] = set()
        self._evaluated: Counter[str] = Counter()  # rollouts of running evaluations
        self._evaluation_numbers = itertools.count(1)
        self._was_evaluating = False  # whether the restored state had an evaluation that ran
        self._takes = 0  # calls of take that wait
        self._background: list[asyncio.Task[None]] = []
        self.lag = LoopLag()
        self._engine_watch = EngineWatch()
        self._trainer_wait_s = 0.0
        self._evaluation_wait_s = 0.0
        if state is not None:
            self._restore(state)

    async def astart(self) -> None:
        """Start playing tasks.

        Raises:
            ValueError: there are no tasks.
        """
        self._scheduler.draw_first()
        self._background = [
            asyncio.create_task(self.lag.run()),
            asyncio.create_task(self._scheduler.run()),
        ]
        if self._plan.concurrency is not None:
            following = follow_load(
                self._engine,
                self._plan.concurrency,
                training=lambda: self._scheduler.rollouts_in_flight,
                evaluated=lambda: self._scheduler.evaluation_slots.in_flight,
                apply=self._scheduler.limit_rollouts,
                group_size=self._plan.group_size,
            )
            self._background.append(asyncio.create_task(following))
        if reports_metrics(self._engine):
            self._background.append(asyncio.create_task(self._engine_watch.run(self._engine)))
        if self._channel is not None:
            self._background.append(asyncio.create_task(_send_heartbeats(self._channel)))

    async def aclose(self) -> dict[str, Any]:
        """Cancel everything in flight, close the environment, and return the last stats."""
        for task in self._background:
            task.cancel()
        await asyncio.sleep(0)  # lets groups begin; otherwise they can't count their own end
        running = [*self._scheduler.in_flight, *self._evaluations]
        for task in running:
            cancel_once(task)
        await wait_until_ended(running, timeout_s=CLOSE_S)
        if hasattr(self._environment, "aclose"):  # aclose may be called twice
            try:
                await self._environment.aclose()
            except Exception:  # raising would hide the error that ended the run
                log.exception("the environment could not be closed")
        return self.stats()

    async def take(self, version: PolicyVersion, delivery: int) -> list[Group]:
        """Return the groups of one step.

        They stay buffered until ``deliver`` reports that they have reached the trainer.
        ``delivery`` is the number of the call. If the trainer gives up a call, before or while
        the call runs, the call reserves no groups.
        """
        self._takes += 1
        try:
            return await self._take(version, delivery)
        finally:
            self._takes -= 1

    async def _take(self, version: PolicyVersion, delivery: int) -> list[Group]:
        began = time.monotonic()
        stall = StallTimer(self._plan.timeout_s, self._buffer.dropped.copy())
        self._scheduler.cancel_unusable(version)
        while delivery > self._ended_delivery:
            in_flight = self._scheduler.oldest_versions()
            groups = self._buffer.reserve(version, in_flight=in_flight)
            if groups is not None:
                self._taken = version
                self._trainer_wait_s += time.monotonic() - began
                return groups
            self._require_fillable(version)
            if not stall.update(self._buffer.ready):
                raise RuntimeError(
                    f"no usable group was kept for {self._plan.timeout_s:.0f} s: step {version} "
                    f"waits for {self._plan.groups_per_step} groups; "
                    f"{stall.describe(self._buffer, self._engine.version)}{self._errors()}"
                )
            await self._scheduler.wait_for_change(min(1.0, self._plan.timeout_s))
        raise RuntimeError("the trainer gave up this take() before its groups were ready")

    def ready(self, version: PolicyVersion) -> bool:
        """Return whether there are groups for a step now."""
        return self._buffer.would_fill(version, in_flight=self._scheduler.oldest_versions())

    def deliver(self, delivery: int) -> None:
        """Record that the groups that ``take`` returned have reached the trainer."""
        self._ended_delivery = delivery
        self._buffer.deliver()
        self._scheduler.cancel_unusable(self._taken + 1)

    def give_back(self, delivery: int) -> None:
        """Put the groups of an abandoned ``take`` back: they did not reach the trainer."""
        self._ended_delivery = delivery
        self._buffer.give_back()
        self._scheduler.notify_change()

    def mark_version(self, version: PolicyVersion, verified: bool) -> None:
        """Record whether ``version`` is verified; see ``Worker.mark_version``."""
        self._buffer.mark_version(version, verified=verified)
        if not verified:
            self._scheduler.cancel_rejected(version)
        self._scheduler.notify_change()

    async def evaluate(
        self,
        tasks: Sequence[Task],
        params: SamplingParams,
        engine: Engine | EngineAddress | None,
        options: EvaluationOptions,
    ) -> list[Outcome]:
        """Play each task as the options say; return the results in the order of the tasks."""
        evaluated = self._engine if engine is None else self._engines.find(engine)
        health = self._health
        slots = self._scheduler.evaluation_slots
        place: Callable[[], AbstractAsyncContextManager[None]] = slots.one
        if evaluated is not self._engine:
            health = EngineHealth(_name(engine, evaluated), timeout_s=self._plan.timeout_s)
            place = contextlib.nullcontext
        current = asyncio.current_task()
        assert current is not None
        self._evaluations.add(current)
        self._evaluated["of"] += len(tasks) * options.samples
        try:
            while options.version is not None and evaluated.version < options.version:
                await self._scheduler.wait_for_change(VERSION_S)
            return await evaluate(
                self._environment,
                tasks,
                evaluated,
                params,
                samples=options.samples,
                keep_errors=options.keep_errors,
                one_version=options.one_version,
                retries=self._plan.retries,
                health=health,
                timeout_s=self._plan.group_timeout_s,
                name=f"evaluation-{next(self._evaluation_numbers)}",
                places=slots.most,
                place=place,
                on_end=lambda: self._evaluated.update(ended=1),
            )
        finally:
            self._evaluations.discard(current)
            if not self._evaluations:
                self._evaluated.clear()
            if evaluated is not self._engine:
                self._engines.forget(engine)

    def progress(self) -> tuple[str, str]:
        """Return what the trainer waits for, and the progress of that, for the live view."""
        evaluated = f"{self._evaluated['ended']}/{self._evaluated['of']} rollouts"
        if self._evaluations and not self._takes:
            return "evaluating", evaluated
        buffer = self._buffer
        refused = buffer.refusals.in_a_row
        detail = f"{buffer.ready}/{self._plan.groups_per_step} groups, {buffer.in_flight} in flight"
        detail += f", the last {refused} refused by filters" if refused else ""
        detail += f"; evaluation {evaluated}" if self._evaluations else ""
        engine = self._engine_watch.describe()
        return "rollouts", detail + (f"; {engine}" if engine else "")

    def stats(self) -> dict[str, Any]:
        """Return totals since the start; see ``Worker.stats``."""
        buffer = self._buffer
        return {
            **self._scheduler.counters.stats(),
            **self._engine_watch.stats(),
            "engine_errors": dict(self._health.errors),
            "started": buffer.started,
            "trained": buffer.trained,
            "dropped": buffer.dropped.total(),
            "dropped_by": dict(buffer.dropped),
            "in_flight": buffer.in_flight,
            "buffered": buffer.buffered,
            "tokens_by": dict(buffer.tokens),
            "masked_tokens": buffer.masked_tokens,
            "awaiting_verification": buffer.awaiting_verification,
            "trainer_wait_s": self._trainer_wait_s,
            "evaluation_wait_s": self._evaluation_wait_s,
            "rollout_wait_s": self._scheduler.idle_s,
            "loop_lag_p99_s": self.lag.p99_s,
            "loop_lag_max_s": self.lag.max_s,
            "suspended_s": CLOCK.suspended_s,
        }

    def state(self, evaluating: bool) -> bytes:
        """Return the state from which a worker can resume; see ``Worker.state``.

        ``evaluating`` is whether the trainer has still to get the results of an evaluation.
        """
        parts = {
            **self._scheduler.state(),
            "buffer": self._buffer.state(),
            "waits": [self._trainer_wait_s, self._evaluation_wait_s, self._scheduler.idle_s],
            "engine_errors": dict(self._health.errors),
            "engine": attrs.asdict(self._engine_watch.total),
            "evaluating": evaluating,
        }
        return encode_state(self._plan, parts)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """Record the versions that an engine serves, as the trainer's side reports them."""
        self._engines.serves(index, version, newest)
        self._scheduler.notify_change()

    def waited_for_evaluation(self, seconds: float) -> None:
        """Record how long the trainer waited for the result of an evaluation."""
        self._evaluation_wait_s += seconds

    def was_evaluating(self) -> bool:
        """Return whether the restored state had an evaluation whose results were not collected."""
        return self._was_evaluating

    def members(self) -> list[dict[str, Any]]:
        """Return the processes that the environment started."""
        return self._environment.members() if hasattr(self._environment, "members") else []

    def _restore(self, content: bytes) -> None:
        try:
            state = decode_state(content, self._plan)
            self._buffer.restore(state["buffer"])
            self._scheduler.restore(state)
            self._health.errors.update(state["engine_errors"])
            self._was_evaluating = state.get("evaluating", False)  # states of 0.1 lack it
            self._engine_watch.total = EngineUsage(**state.get("engine", {}))  # and this
            waits = state["waits"]
            self._trainer_wait_s, self._evaluation_wait_s, self._scheduler.idle_s = waits
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the state does not fit this worker: {type(error).__name__}: {error}; it is "
                "damaged, or comes from a worker with another kind of tasks"
            ) from error

    def _require_fillable(self, version: PolicyVersion) -> None:
        error = self._scheduler.error
        if error is not None:
            raise RuntimeError(f"rollouts stopped: {message(error)}") from error
        reason = self._health.reason or unfillable(
            version,
            served=self._engine.version,
            buffer=self._buffer,
            tasks_exhausted=self._scheduler.tasks_exhausted,
            max_refused=self._plan.max_refused,
        )
        if reason is not None:
            raise RuntimeError(f"step {version} cannot be filled: {reason}")

    def _errors(self) -> str:
        errors = self._scheduler.counters.errors
        return (f"; errors: {dict(errors)}" if errors else "") + self._health.describe()


async def _send_heartbeats(channel: Channel) -> None:
    while True:
        channel.notify("heartbeat")
        await asyncio.sleep(HEARTBEAT_S)


def _name(where: Any, engine: Engine) -> str:
    return where.name if isinstance(where, EngineAddress) else type(engine).__name__
