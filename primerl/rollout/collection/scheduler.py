"""The scheduler: starts groups as far ahead of training as the staleness bound allows."""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from primerl.rollout.collection.buffer import Buffer
from primerl.rollout.collection.counters import Counters
from primerl.rollout.collection.evaluation_slots import EvaluationSlots
from primerl.rollout.collection.groups import (
    ENGINE,
    FAILED,
    GroupFailed,
    Progress,
    cancel_once,
    run_group,
)
from primerl.rollout.collection.settings import CollectionSettings
from primerl.rollout.collection.verification import UNVERIFIED
from primerl.rollout.engines.health import EngineFailed, EngineHealth
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.tasks.streams import TaskStream
from primerl.types import Group, PolicyVersion

POLL_S = 0.01  # the delay within which a newly served version is noticed

log = logging.getLogger(__name__)


class GroupScheduler:
    """Draws tasks, runs their groups, and puts the groups into the buffer."""

    def __init__(
        self,
        *,
        environment: Environment,
        tasks: TaskStream,
        engine: Engine,
        health: EngineHealth,
        buffer: Buffer,
        plan: CollectionSettings,
    ) -> None:
        self.error: Exception | None = None
        """The error that has stopped the run, if any."""
        self.max_rollouts = math.inf
        """The maximum number of rollouts in flight; one group may always run."""
        self.idle_s = 0.0
        """Seconds in which no group was in flight."""
        self.counters = Counters(
            groups_per_step=plan.groups_per_step, quarantine_after=plan.quarantine_after
        )
        self._environment = environment
        self._tasks = tasks
        self._engine = engine
        self._health = health
        self._buffer = buffer
        self._plan = plan
        self._again: deque[Task] = deque()  # drawn tasks, to be started before new ones
        self._drawn_all = False
        self._in_flight: dict[asyncio.Task[None], tuple[Task, Progress]] = {}
        self._last_failure: GroupFailed | None = None
        self._changed = asyncio.Event()
        self.evaluation_slots = EvaluationSlots(
            rollouts_per_step=plan.groups_per_step * plan.group_size,
            cap=lambda: self.max_rollouts,
            training=lambda: self.rollouts_in_flight,
            wait_for_change=self.wait_for_change,
        )
        """The places of rollouts of evaluations, which count towards ``max_rollouts``, too."""

    @property
    def in_flight(self) -> list["asyncio.Task[None]"]:
        """The asyncio tasks of the groups in flight."""
        return list(self._in_flight)

    @property
    def rollouts_in_flight(self) -> int:
        """The number of rollouts in all groups in flight."""
        return len(self._in_flight) * self._plan.group_size

    def limit_rollouts(self, most: float) -> None:
        """Start no group that would exceed ``most`` rollouts in flight."""
        self.max_rollouts = most
        self.notify_change()

    @property
    def tasks_exhausted(self) -> bool:
        """Whether there are no further tasks to start."""
        return self._drawn_all and not self._again

    def draw_first(self) -> None:
        """Draw a task ahead of time, to check that there is one.

        Raises:
            ValueError: there are no tasks.
        """
        if not self._again:
            first = self._draw()
            if first is not None:
                self._again.append(first)
            elif not self._buffer.started:
                raise ValueError("there are no tasks; pass at least one mapping with a 'prompt'")

    async def run(self) -> None:
        """Start groups as the bound allows, until cancelled; an error stops the run."""
        try:
            while True:
                while self.error is None and (task := self._next_task()) is not None:
                    self._buffer.start()
                    progress = Progress(name=f"group-{self._buffer.started}")
                    group = asyncio.create_task(self._run_group(task, progress))
                    self._in_flight[group] = (task, progress)
                    await asyncio.sleep(0)  # starting hundreds at once would block the event loop
                idle = not self._in_flight
                began = time.monotonic()
                await self.wait_for_change(POLL_S)
                if idle:
                    self.idle_s += time.monotonic() - began
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # for example, of a task stream; take() raises it again
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def cancel_unusable(self, version: PolicyVersion) -> None:
        """Cancel every group that is too old for the next step, ``version``."""
        if self._plan.on_stale != "drop":
            return
        oldest = version - self._plan.max_staleness
        for group, (_, progress) in self._in_flight.items():
            if progress.oldest_version(version) < oldest:
                cancel_once(group)

    def cancel_rejected(self, version: PolicyVersion) -> None:
        """Cancel every group that holds a token of ``version``, or will."""
        served = self._engine.version
        for group, (_, progress) in self._in_flight.items():
            if progress.oldest_version(served) <= version:
                progress.rejected = True
                if progress.begun:
                    cancel_once(group)

    def oldest_versions(self) -> list[PolicyVersion]:
        """Return, for each group in flight, the oldest version that may have sampled it."""
        served = self._engine.version
        return [progress.oldest_version(served) for _, progress in self._in_flight.values()]

    def notify_change(self) -> None:
        """Wake up ``wait_for_change``."""
        self._changed.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait for a notified change (a group ended, a new version), at most ``timeout_s``."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def state(self) -> dict[str, Any]:
        """Return the task stream's state, the counts, and the tasks to start again."""
        in_flight = [task for task, _ in self._in_flight.values()]
        return {
            "tasks": self._tasks.state(),
            "again": [dict(task) for task in [*in_flight, *self._again]],
            "counters": self.counters.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        self._tasks.restore(state["tasks"])
        self._again.extend(state["again"])
        self.counters.restore(state["counters"])

    def _next_task(self) -> Task | None:
        if self._buffer.verification.newest_rejected:
            return None  # tokens sampled now could not be trained
        wanted = self.rollouts_in_flight + self._plan.group_size + self.evaluation_slots.reserved
        if self._in_flight and wanted > self.max_rollouts:
            return None
        if not self._buffer.may_start(served=self._engine.version):
            return None
        return self._again.popleft() if self._again else self._draw()

    def _draw(self) -> Task | None:
        """Return the next task that is not in quarantine; None if there are no more."""
        for _ in range(self.counters.max_skips):
            task = self._tasks.draw()
            if task is None:
                self._drawn_all = True
                return None
            if not self.counters.is_quarantined(task["id"]):
                return task
            self.counters.skipped += 1
        some = ", ".join(self.counters.quarantined[:5])
        raise RuntimeError(
            f"every task is in quarantine after {self._plan.quarantine_after} failed groups each "
            f"({some} ...); errors: {dict(self.counters.errors)}; the last failure: "
            f"{self._last_failure}"
        ) from self._last_failure

    async def _run_group(self, task: Task, progress: Progress) -> None:
        """Run one group and store it; count a failure by name instead of raising it."""
        try:
            progress.begun = True
            if progress.rejected:
                raise asyncio.CancelledError
            group = await run_group(
                self._environment,
                task,
                self._engine,
                self._plan.params,
                size=self._plan.group_size,
                task_id=task["id"],
                min_size=self._plan.min_group,
                retries=self._plan.retries,
                timeout_s=self._plan.group_timeout_s,
                progress=progress,
                health=self._health,
            )
        except asyncio.CancelledError:
            reason = UNVERIFIED if progress.rejected else "cancelled"
            self._buffer.drop(reason, tokens=progress.tokens)
        except GroupFailed as failure:
            log.info("%s", failure)
            self._buffer.drop(failure.reason, tokens=progress.tokens)
            if failure.reason != ENGINE:
                self._end_failed(task, failure)
            elif self._health.reason is not None:  # further groups would fail at once
                self._stop(EngineFailed(self._health.reason))
        except Exception as error:  # a RewardError, or unforeseen: the run cannot continue
            self._buffer.drop(FAILED, tokens=progress.tokens)
            self._stop(error)
        else:
            self._end(task, group)
        finally:
            current = asyncio.current_task()
            assert current is not None
            del self._in_flight[current]
            self.counters.add_attempts(progress)
            self.notify_change()

    def _end(self, task: Task, group: Group) -> None:
        if self._buffer.has_rejected_tokens(group):  # nor may the curriculum learn from the group
            self._buffer.drop_group(UNVERIFIED, group)
            return
        self.counters.add_success(group)
        try:
            self._tasks.report(task, group)
            self._buffer.put(group)
        except Exception as error:  # a user's filter or curriculum raised: the run cannot continue
            self._buffer.drop_group(FAILED, group)
            self._stop(error)

    def _end_failed(self, task: Task, failure: GroupFailed) -> None:
        self._last_failure = failure
        if self.counters.add_failure(task):
            log.warning("task %r is in quarantine: %s", task["id"], failure)
        try:
            self._tasks.report(task, None)
        except Exception as error:  # a user's curriculum raised: the run cannot continue
            self._stop(error)
        if self.counters.too_many_failures:
            self._stop(failure.__cause__ if isinstance(failure.__cause__, Exception) else failure)

    def _stop(self, error: Exception) -> None:
        self.error = self.error or error
        self.notify_change()
