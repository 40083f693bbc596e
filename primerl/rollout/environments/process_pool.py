"""A pool of processes that play an environment, with watchdogs that replace dead processes."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import attrs

from primerl._common.ray.actors import NoRoom
from primerl.rollout.collection.groups import attempt
from primerl.rollout.engines.direct import DirectAddress, DirectEngines
from primerl.rollout.engines.observed import CallRecord
from primerl.rollout.engines.remote import EngineAddress, RemoteEngines
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.errors import summary
from primerl.rollout.processes.channel import Channel, Handlers
from primerl.rollout.processes.child import Child, ChildProcess, ProcessDied
from primerl.types import PolicyVersion, Rollout, SamplingParams

CLOSE_S = 5.0  # the time that cancelled rollouts have to clean up
ANSWER_S = 5.0  # an event loop that does not answer within this time is blocked
POLL_S = 0.1
STABLE_S = 5.0  # a process that lived this long had started properly
MAX_BACKOFF_S = 30.0
MAX_BUILD_FAILURES, MAX_START_DEATHS = 3, 20  # in a row, until a slot is given up
MAX_REPLY_BYTES = 1 << 31  # a larger rollout is a mistake, and would exhaust the worker's memory

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _PooledProcess:
    """A slot of the pool, which holds one process at a time: the first, or a replacement."""

    process: ChildProcess | None = None
    child: Child | None = None
    watchdog: asyncio.Task[None] | None = None
    playing: int = 0
    idle_since: float = attrs.field(factory=time.monotonic)
    ready: bool = False
    # Whether a start was tried. Rollouts wait until every slot has tried, because otherwise the
    # process that starts first would get all of them.
    tried: bool = False
    broken: Exception | None = None


class ProcessPool:
    """A pool of processes that each hold the same environment; they start on first use.

    Args:
        arguments: the environment, from ``pickle_arguments``.
        handlers: functions of this process that the processes may call.
        processes: the number of processes.
        make: makes a process that is not yet started.
        most_each: how many rollouts a process plays at once; by default any number. With a number,
            rollouts begin when the first process is ready, otherwise when all have been tried.
        most: the number of processes up to which more are started while rollouts wait for one;
            needs ``most_each``. By default there are always ``processes``.
        idle_s: how long a process beyond ``processes`` may be idle until it ends.
    """

    def __init__(
        self,
        arguments: Mapping[str, bytes],
        handlers: Handlers,
        *,
        processes: int,
        make: Callable[[], ChildProcess],
        most_each: int | None = None,
        most: int | None = None,
        idle_s: float = math.inf,
    ) -> None:
        self.restarts = 0
        self._arguments = arguments
        self._handlers = handlers
        self._processes = processes
        self._make = make
        self._most_each = most_each
        self._most = processes if most is None else most
        self._idle_s = idle_s
        self._slots: list[_PooledProcess] = []  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # watchdogs, also of slots that leave
        self._numbers = itertools.count()
        self._waiting = 0
        self._checks: dict[Child, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def process(self, *, timeout_s: float, wait_counts: bool = True) -> AsyncIterator[Child]:
        """Reserve the process with the fewest rollouts for one more; wait until one is free.

        The rollout is the body of the ``async with`` statement. When it is late or cancelled, its
        process is checked: a blocked process would attract all further rollouts.

        Args:
            timeout_s: timeout of the rollout.
            wait_counts: whether the wait for a process counts.

        Raises:
            RuntimeError: no process can be started.
            TimeoutError: the rollout did not end in time.
        """
        slot = None
        deadline = asyncio.timeout(timeout_s if wait_counts else None)
        try:
            async with deadline:
                slot = await self._reserve()
                if not wait_counts:
                    deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
                assert slot.child is not None
                child = slot.child
                yield child
        except asyncio.CancelledError:
            if slot is not None:
                self._check(child)
            raise
        except TimeoutError:
            if not deadline.expired():
                raise  # raised by the environment itself
            if slot is not None:
                await self._check(child)
            raise TimeoutError(
                f"the rollout did not end within {timeout_s:.0f} s"
                if slot is not None
                else f"no environment process was free within {timeout_s:.0f} s"
            ) from None
        finally:
            if slot is not None:
                slot.playing -= 1
                slot.idle_since = time.monotonic()
                self._changed.set()

    def retire(self, leaves: Callable[[ChildProcess], bool], *, within_s: float) -> int:
        """End the processes that ``leaves`` selects, when their rollouts have ended.

        They get no further rollouts, and others are started in their place at once. Rollouts that
        have not ended after ``within_s`` fail as ``ProcessDied``. Returns the number of processes
        that leave.
        """
        chosen = [slot for slot in self._slots if slot.process and leaves(slot.process)]
        for slot in chosen:
            self._retire(slot, within_s)
        while len(self._slots) < self._processes and self._tasks:
            self._add()
        self._grow()
        return len(chosen)

    def children(self) -> list[Child]:
        """List the processes that have been started."""
        return [slot.child for slot in self._slots if slot.child is not None]

    def _check(self, child: Child) -> "asyncio.Task[None]":
        """Check in the background that a process still answers, and kill it if it does not."""
        if child not in self._checks:
            self._checks[child] = asyncio.create_task(_kill_if_blocked(child))
            self._checks[child].add_done_callback(lambda _: self._checks.pop(child, None))
        return self._checks[child]

    async def aclose(self) -> None:
        """End the processes. The pool can be used again."""
        tasks, self._tasks, self._slots = self._tasks, set(), []
        self._changed = asyncio.Event()  # the next use may be on another event loop
        for task in (*tasks, *self._checks.values()):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _reserve(self) -> _PooledProcess:
        """Wait for a process that may play one more rollout; count the rollout as playing."""
        if not self._tasks:
            for _ in range(self._processes):
                self._add()
            if self._most > self._processes:
                self._start(self._end_idle())
        most = float("inf") if self._most_each is None else self._most_each
        while True:
            broken = [slot.broken for slot in self._slots if slot.broken is not None]
            if broken and len(broken) == len(self._slots):
                raise RuntimeError(f"no environment process can start: {broken[0]}") from broken[0]
            ready = [p for p in self._slots if p.ready and p.child is not None and p.child.alive]
            if self._most > self._processes:  # rollouts go to the oldest, so that others are idle
                ready = ready[: self._needed(1)]
            free = [slot for slot in ready if slot.playing < most]
            if free and (self._most_each is not None or all(slot.tried for slot in self._slots)):
                chosen = min(free, key=lambda slot: slot.playing)
                chosen.playing += 1
                return chosen
            self._changed.clear()
            self._waiting += 1
            self._grow()
            try:
                await self._changed.wait()
            finally:
                self._waiting -= 1

    # ---- the number of processes ----

    def _needed(self, more: int) -> int:
        """Return how many processes the rollouts and ``more`` of them need, within the limits."""
        rollouts = sum(slot.playing for slot in self._slots) + more
        needed = -(-rollouts // (self._most_each or rollouts or 1))
        return min(self._most, max(self._processes, needed))

    def _grow(self) -> None:
        """Add processes for the rollouts that wait."""
        while self._waiting and len(self._slots) < self._needed(self._waiting):
            self._add()

    def _add(self) -> None:
        slot = _PooledProcess()
        self._slots.append(slot)
        slot.watchdog = self._start(self._watch(slot, next(self._numbers)))

    def _retire(self, slot: _PooledProcess, within_s: float) -> None:
        self._slots.remove(slot)
        self._start(self._leave(slot, within_s))

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _leave(self, slot: _PooledProcess, within_s: float) -> None:
        """Wait until a slot's rollouts have ended, then end its process."""
        deadline = time.monotonic() + within_s
        while slot.playing and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        assert slot.watchdog is not None
        slot.watchdog.cancel()
        await asyncio.wait([slot.watchdog])

    async def _end_idle(self) -> None:
        """End processes that have been idle for long, down to the least number of processes."""
        while True:
            await asyncio.sleep(min(1.0, self._idle_s / 4))
            before = time.monotonic() - self._idle_s
            idle = [slot for slot in self._slots if not slot.playing and slot.idle_since < before]
            spare = len(self._slots) - self._needed(self._waiting)
            for slot in idle[::-1][: max(0, spare)]:
                self._retire(slot, 0.0)

    async def _watch(self, slot: _PooledProcess, number: int) -> None:
        """Start a slot's process and replace it whenever it dies, until no process can start."""
        build_failures = deaths = 0
        while slot.broken is None or isinstance(slot.broken, NoRoom):
            slot.process = self._make()
            slot.child = Child(
                f"environment process {number}", EnvironmentHost, process=slot.process
            )
            try:
                began = time.monotonic()
                await slot.child.start(self._arguments, self._handlers)
                build_failures, slot.broken = 0, None
                slot.ready = slot.tried = True
                self._changed.set()
                how = await slot.child.wait()
                log.warning("%s; starting another", how)
                deaths = deaths + 1 if time.monotonic() - began < STABLE_S else 0
                self.restarts += 1
            except ProcessDied as error:  # died while it was starting
                log.warning("%s", error)
                deaths += 1
                slot.broken = error if deaths == MAX_START_DEATHS else None
            except NoRoom as error:
                log.warning("%s", error)
                slot.broken = error
            except Exception as error:  # loading the environment may raise anything
                log.warning("%s could not start: %s", slot.child.name, summary(error))
                build_failures += 1
                slot.broken = error if build_failures == MAX_BUILD_FAILURES else None
            finally:
                slot.ready, slot.tried = False, True
                await slot.child.close(grace_s=CLOSE_S)
                self._changed.set()
            pause_s = 0.05 * 2 ** min(10, max(0, deaths + build_failures - 1))
            await asyncio.sleep(min(MAX_BACKOFF_S, pause_s))


async def _kill_if_blocked(child: Child) -> None:
    with contextlib.suppress(ProcessDied):  # it has died in the meantime
        try:
            async with asyncio.timeout(ANSWER_S):
                await child.call("ping")
        except TimeoutError:
            log.warning("%s is blocked and is killed", child.name)
            child.kill("was killed because it was blocked")
            await child.wait()


class EnvironmentHost:
    """The object that each process of the pool serves, which plays rollouts."""

    def __init__(self, channel: Channel, *, environment: Environment) -> None:
        channel.max_message_bytes = MAX_REPLY_BYTES
        self._engines = RemoteEngines(channel)
        self._direct = DirectEngines(channel)
        self._environment = environment

    async def astart(self) -> None:
        """Do nothing: environments set themselves up."""

    async def aclose(self) -> None:
        """Close the environment."""
        if hasattr(self._environment, "aclose"):
            await self._environment.aclose()

    async def play(
        self, task: Task, where: EngineAddress | DirectAddress, params: SamplingParams
    ) -> Rollout:
        """Play one rollout with the parent's engine, or a copy of it that samples from here."""
        engines: Any = self._direct if isinstance(where, DirectAddress) else self._engines
        engine = engines.find(where)
        try:
            return await attempt(self._environment, task, engine, params)
        finally:
            engines.forget(where)

    async def sample(
        self, index: int, number: int, session: str | None, version: PolicyVersion
    ) -> CallRecord:
        """Sample a call that a rollout made, when the parent process has admitted it."""
        return await self._direct.sample(index, number, session, version)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """Record the versions that an engine serves now, as reported by the parent process."""
        self._engines.serves(index, version, newest)

    def ping(self) -> bool:
        """Return True, to show that the event loop is not blocked."""
        return True
