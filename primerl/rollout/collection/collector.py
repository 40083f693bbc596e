"""The collector: plays tasks on an event loop, as far ahead of training as the bound allows."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from primerl.rollout.collection.accounts import Accounts
from primerl.rollout.collection.buffer import Buffer
from primerl.rollout.collection.groups import (
    ENGINE,
    FAILED,
    GroupFailed,
    Progress,
    gather_or_cancel,
    play,
    run_group,
)
from primerl.rollout.collection.proofs import UNPROVEN
from primerl.rollout.collection.recording import require_plain
from primerl.rollout.collection.standstill import Wait, unfillable
from primerl.rollout.engines.health import EngineFailed, EngineHealth
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.remote import EngineAddress, RemoteEngines
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.errors import words
from primerl.rollout.processes.channel import Channel
from primerl.rollout.processes.loop_lag import LoopLag
from primerl.rollout.tasks.streams import TaskStream
from primerl.types import Group, PolicyVersion, Rollout, SamplingParams

POLL_S = 0.01  # how soon a newly served version is noticed
BEAT_S = 1.0
CLOSE_S = 15.0
STATE_FORMAT = 2
CANCELLED = "cancelled"
SAVED = ("group_size", "min_group", "groups_per_step", "await_proof")
"""Of the plan, what a state may not be restored without."""

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Plan:
    """How a worker collects; the arguments of ``worker`` that are numbers and words."""

    params: SamplingParams
    group_size: int
    min_group: int
    groups_per_step: int
    max_staleness: int
    on_stale: str
    retries: int
    quarantine_after: int
    group_timeout_s: float
    timeout_s: float
    await_proof: bool = False


class Collector:
    """What a worker is made of, without the thread or the process that it runs in.

    All of it lives on one event loop, so nothing is locked. Its public methods are what the
    trainer's side calls.
    """

    def __init__(
        self,
        channel: Channel | None,
        *,
        engine: Engine | EngineAddress,
        environment: Environment,
        tasks: TaskStream,
        keep: Sequence[Callable[[Group], bool]],
        plan: Plan,
        state: bytes | None,
    ) -> None:
        self._channel = channel
        self._engines = RemoteEngines(channel)
        self._engine = self._engines.find(engine)
        self._health = EngineHealth(_name(engine, self._engine), timeout_s=plan.timeout_s)
        self._environment = environment
        self._tasks = tasks
        self._plan = plan
        self._buffer = Buffer(
            groups_per_step=plan.groups_per_step,
            max_staleness=plan.max_staleness,
            keep=keep,
            on_stale=plan.on_stale,
            await_proof=plan.await_proof,
        )
        self._again: deque[Task] = deque()
        self._drawn_out = False
        self._taken: PolicyVersion = 0  # the last step that was handed out
        self._ended_delivery = 0  # takes up to this one have reached the trainer, or were given up
        self._in_flight: dict[asyncio.Task[None], tuple[Task, Progress]] = {}
        self._evaluations: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._last_failure: GroupFailed | None = None
        self._background: list[asyncio.Task[None]] = []
        self._lag = LoopLag()
        self._accounts = Accounts(
            groups_per_step=plan.groups_per_step, quarantine_after=plan.quarantine_after
        )
        self._trainer_wait_s = 0.0
        self._rollout_wait_s = 0.0
        if state is not None:
            self._restore(state)

    async def astart(self) -> None:
        """Begin to play.

        Raises:
            ValueError: there are no tasks.
        """
        if not self._again:
            first = self._draw()
            if first is None and not self._buffer.started:
                raise ValueError("there are no tasks; pass at least one mapping with a 'prompt'")
            if first is not None:
                self._again.append(first)
        self._background = [
            asyncio.create_task(self._lag.run()),
            asyncio.create_task(self._guarded_pump()),
        ]
        if self._channel is not None:
            self._background.append(asyncio.create_task(self._beat(self._channel)))

    async def aclose(self) -> dict[str, Any]:
        """Cancel what is in flight, close the environment, and return the last stats."""
        for task in self._background:
            task.cancel()
        await asyncio.sleep(0)  # a group that has not begun could not account for its end
        playing = list(self._in_flight)
        waiting = [*playing, *self._evaluations]
        for one in waiting:
            one.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_S)
        if hasattr(self._environment, "aclose"):  # it may be called again
            try:
                await self._environment.aclose()
            except Exception:  # the run is over; what it raised must not hide how
                log.exception("the environment could not be closed")
        return self.stats()

    async def take(self, version: PolicyVersion, delivery: int) -> list[Group]:
        """The groups of one step.

        They are buffered until ``deliver`` says that they arrived. ``delivery`` numbers the calls:
        one that was given up before, or while, it ran reserves nothing for a later one to lose.
        """
        began = time.monotonic()
        wait = Wait(self._plan.timeout_s, self._buffer.dropped)
        self._cancel_unusable(version)
        while delivery > self._ended_delivery:
            groups = self._buffer.reserve(version, in_flight=self._versions())
            if groups is not None:
                self._taken = version
                self._trainer_wait_s += time.monotonic() - began
                return groups
            self._require_fillable(version)
            if not wait.look(self._buffer.ready):
                raise RuntimeError(
                    f"no group was kept for {self._plan.timeout_s:.0f} s that step {version} can "
                    f"use, which waits for {self._plan.groups_per_step}; "
                    f"{wait.describe(self._buffer, self._engine.version)}{self._errors()}"
                )
            await self._change(min(1.0, self._plan.timeout_s))
        raise RuntimeError("the trainer gave this take up")

    def deliver(self, delivery: int) -> None:
        """The groups that ``take`` returned have reached the trainer."""
        self._ended_delivery = delivery
        self._buffer.deliver()
        self._cancel_unusable(self._taken + 1)

    def give_back(self, delivery: int) -> None:
        """The trainer gave a ``take`` up; what that returned, if it did, has not reached it."""
        self._ended_delivery = delivery
        self._buffer.give_back()
        self._changed.set()

    def settle(self, version: PolicyVersion, proven: bool) -> None:
        """Say whether engines that serve ``version`` were proven to; see ``Worker.settle``."""
        self._buffer.settle(version, proven=proven)
        if not proven:
            now = self._engine.version
            for group, (_, progress) in self._in_flight.items():
                if progress.oldest_version(now) <= version:  # it holds such a token, or will
                    progress.unproven = True
                    if progress.begun:
                        group.cancel()
        self._changed.set()

    async def evaluate(
        self,
        tasks: Iterable[Task],
        params: SamplingParams,
        engine: Engine | EngineAddress | None,
    ) -> list[Rollout]:
        """Play each task once, in order, with one version of the weights."""
        evaluated = self._engine if engine is None else self._engines.find(engine)
        health = self._health
        if evaluated is not self._engine:
            health = EngineHealth(_name(engine, evaluated), timeout_s=self._plan.timeout_s)
        version = evaluated.version
        mine = asyncio.current_task()
        assert mine is not None
        self._evaluations.add(mine)
        try:
            rollouts = await gather_or_cancel(
                play(
                    self._environment,
                    task,
                    evaluated,
                    params,
                    retries=self._plan.retries,
                    health=health,
                )
                for task in tasks
            )
        finally:
            self._evaluations.discard(mine)
            if evaluated is not self._engine:
                self._engines.forget(engine)
        groups = [Group(task_id="", rollouts=[one]) for one in rollouts]
        versions = {int(one) for group in groups for one in group.versions} | {version}
        if len(versions) > 1:
            raise RuntimeError(
                f"weights {sorted(versions)} were served during one evaluation; publish when it "
                "has ended, or evaluate with an engine that nothing is published to (engine=)"
            )
        return rollouts

    def stats(self) -> dict[str, Any]:
        """Totals since the start; see ``Worker.stats``."""
        buffer = self._buffer
        return {
            **self._accounts.stats(),
            "engine_errors": dict(self._health.errors),
            "started": buffer.started,
            "trained": buffer.trained,
            "dropped": buffer.dropped.total(),
            "dropped_by": dict(buffer.dropped),
            "in_flight": buffer.in_flight,
            "buffered": buffer.buffered,
            "tokens_by": dict(buffer.tokens),
            "masked_tokens": buffer.masked_tokens,
            "awaiting_proof": buffer.awaited,
            "trainer_wait_s": self._trainer_wait_s,
            "rollout_wait_s": self._rollout_wait_s,
            "loop_lag_p99_s": self._lag.p99_s,
            "loop_lag_max_s": self._lag.max_s,
        }

    def state(self) -> bytes:
        """Where collecting can go on from: see ``Worker.state``."""
        playing = [task for task, _ in self._in_flight.values()]
        for task in (*playing, *self._again):
            require_plain(task, f"task {task['id']!r}")
        content = {
            "format": STATE_FORMAT,
            "plan": {name: getattr(self._plan, name) for name in SAVED},
            "buffer": self._buffer.state(),
            "tasks": self._tasks.state(),
            "waits": [self._trainer_wait_s, self._rollout_wait_s],
            "again": [dict(task) for task in [*playing, *self._again]],
            "accounts": self._accounts.state(),
            "engine_errors": dict(self._health.errors),
        }
        return msgspec.msgpack.encode(content)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """The trainer's side says which version an engine serves now."""
        self._engines.serves(index, version, newest)
        self._changed.set()

    def members(self) -> list[dict[str, Any]]:
        """The processes that the environment started."""
        return self._environment.members() if hasattr(self._environment, "members") else []

    @property
    def last_beat(self) -> float:
        """When the event loop last turned, by the monotonic clock."""
        return self._lag.last_beat

    def _restore(self, content: bytes) -> None:
        try:
            state = msgspec.msgpack.decode(content)
            known = state["format"] == STATE_FORMAT
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"this is no state of a rollout worker: {error}") from error
        if not known:
            raise ValueError(
                f"the worker's state has format {state['format']}, expected {STATE_FORMAT}: it "
                "was written by another version of primerl"
            )
        try:
            self._require_same_plan(state["plan"])
            self._buffer.restore(state["buffer"])
            self._tasks.restore(state["tasks"])
            self._again.extend(state["again"])
            self._accounts.restore(state["accounts"])
            self._health.errors.update(state["engine_errors"])
            self._trainer_wait_s, self._rollout_wait_s = state["waits"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the state does not fit: {type(error).__name__}: {error}; it is damaged, or of a "
                "worker with tasks of another kind"
            ) from error

    def _require_same_plan(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state whose groups this worker would not have made."""
        mine = self._plan
        refused = {
            "group_size": "its finished groups have another size, and are compared with each other",
            "groups_per_step": "steps of another size can't continue its count",
        }
        if saved["min_group"] < mine.min_group:
            refused["min_group"] = "its finished groups may have fewer rollouts"
        if saved["await_proof"] and not mine.await_proof:
            refused["await_proof"] = "its groups that wait for proof would be trained without"
        for name, why in refused.items():
            if saved[name] != getattr(mine, name):
                raise ValueError(
                    f"the state was taken with {name}={saved[name]}, not {getattr(mine, name)}: "
                    f"{why}; resume with {name}={saved[name]}, or without the worker's state"
                )

    # ---- playing ----

    async def _guarded_pump(self) -> None:
        try:
            await self._pump()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # what a task stream raises, say; take() raises it again
            plain = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._fail(plain)

    async def _pump(self) -> None:
        """Start groups as the bound allows, until cancelled."""
        while True:
            while self._error is None and (task := self._admit()) is not None:
                self._buffer.start()
                progress = Progress()
                group = asyncio.create_task(self._play(task, progress))
                self._in_flight[group] = (task, progress)
                await asyncio.sleep(0)  # hundreds that began at once would block the event loop
            idle = not self._in_flight
            began = time.monotonic()
            await self._change(POLL_S)
            if idle:
                self._rollout_wait_s += time.monotonic() - began

    def _admit(self) -> Task | None:
        if self._buffer.proofs.halted:
            return None  # nothing that engines sample now could be trained
        if not self._buffer.may_start(served=self._engine.version):
            return None
        return self._again.popleft() if self._again else self._draw()

    def _draw(self) -> Task | None:
        """The next task that is not in quarantine; None when there are no more."""
        for _ in range(self._accounts.most_skips):
            task = self._tasks.draw()
            if task is None:
                self._drawn_out = True
                return None
            if not self._accounts.in_quarantine(task["id"]):
                return task
            self._accounts.skipped += 1
        some = ", ".join(self._accounts.quarantined[:5])
        raise RuntimeError(
            f"every task is in quarantine, having failed {self._plan.quarantine_after} times "
            f"({some} ...); errors: {dict(self._accounts.errors)}; the last: {self._last_failure}"
        ) from self._last_failure

    async def _play(self, task: Task, progress: Progress) -> None:
        """Run one group and hand it over; a failure is data, counted by name."""
        plan = self._plan
        try:
            progress.begun = True
            if progress.unproven:
                raise asyncio.CancelledError
            group = await run_group(
                self._environment,
                task,
                self._engine,
                plan.params,
                size=plan.group_size,
                task_id=task["id"],
                min_size=plan.min_group,
                retries=plan.retries,
                timeout_s=plan.group_timeout_s,
                progress=progress,
                health=self._health,
            )
        except asyncio.CancelledError:
            reason = UNPROVEN if progress.unproven else CANCELLED
            self._buffer.drop(reason, tokens=progress.tokens)
        except GroupFailed as failure:
            self._buffer.drop(failure.reason, tokens=progress.tokens)
            if failure.reason == ENGINE:  # nothing was learned of the task
                log.info("%s", failure)
                if self._health.reason is not None:  # or groups would end as soon as they begin
                    self._fail(EngineFailed(self._health.reason))
            else:
                self._failed(task, failure)
        except Exception as error:  # a RewardError, or what nobody foresaw: the run cannot go on
            self._buffer.drop(FAILED, tokens=progress.tokens)
            self._fail(error)
        else:
            self._ended(task, group)
        finally:
            playing = asyncio.current_task()
            assert playing is not None
            del self._in_flight[playing]
            self._accounts.attempted(progress)
            self._changed.set()

    def _ended(self, task: Task, group: Group) -> None:
        proofs = self._buffer.proofs
        if proofs.rejected(proofs.versions_of(group)):  # of no use to the curriculum either
            return self._buffer.drop(UNPROVEN, tokens=len(group.versions))
        self._accounts.succeeded(group)
        try:
            self._tasks.report(task, group)
            self._buffer.put(group)
        except Exception as error:  # a user's filter or curriculum raised: the run cannot go on
            self._buffer.drop(FAILED, tokens=len(group.versions))
            self._fail(error)

    def _failed(self, task: Task, failure: GroupFailed) -> None:
        self._last_failure = failure
        log.info("%s", failure)
        if self._accounts.failed(task):
            log.warning("task %r is in quarantine: %s", task["id"], failure)
        try:
            self._tasks.report(task, None)
        except Exception as error:  # a user's curriculum raised: the run cannot go on
            self._fail(error)
        if self._accounts.hopeless:
            self._fail(failure.__cause__ if isinstance(failure.__cause__, Exception) else failure)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    # ---- waiting ----

    def _cancel_unusable(self, version: PolicyVersion) -> None:
        """The next step is ``version``: cancel every group that it could not use."""
        if self._plan.on_stale != "drop":
            return
        oldest = version - self._plan.max_staleness
        for group, (_, progress) in self._in_flight.items():
            if progress.oldest_version(version) < oldest:
                group.cancel()

    def _versions(self) -> list[PolicyVersion]:
        served = self._engine.version
        return [progress.oldest_version(served) for _, progress in self._in_flight.values()]

    async def _change(self, timeout_s: float) -> None:
        """Wait until something has ended or is served, at most ``timeout_s``."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _require_fillable(self, version: PolicyVersion) -> None:
        if self._error is not None:
            raise RuntimeError(f"rollouts stopped: {words(self._error)}") from self._error
        if self._health.reason is not None:
            raise RuntimeError(f"step {version} cannot be filled: {self._health.reason}")
        reason = unfillable(
            version,
            served=self._engine.version,
            buffer=self._buffer,
            drawn_out=self._drawn_out and not self._again,
        )
        if reason is not None:
            raise RuntimeError(f"step {version} cannot be filled: {reason}")

    def _errors(self) -> str:
        errors = self._accounts.errors
        return (f"; errors: {dict(errors)}" if errors else "") + self._health.describe()

    async def _beat(self, channel: Channel) -> None:
        while True:
            channel.notify("beat")
            await asyncio.sleep(BEAT_S)


def _name(where: Any, engine: Engine) -> str:
    return where.name if isinstance(where, EngineAddress) else type(engine).__name__
