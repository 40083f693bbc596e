"""A pool of processes that play an environment; watchdogs replace those that die."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping

import attrs

from primerl._common.processes.launch import LaunchContext
from primerl.rollout.collection.groups import attempt
from primerl.rollout.engines.remote import EngineAddress, RemoteEngines
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.processes.channel import Channel, Handlers
from primerl.rollout.processes.child import Child, ProcessDied
from primerl.types import PolicyVersion, Rollout, SamplingParams

CLOSE_S = 5.0  # for cancelled rollouts to clean up
ANSWER_S = 5.0  # in which an event loop that is not blocked answers
STABLE_S = 5.0  # a process that lived so long did not die of starting
MAX_BACKOFF_S = 30.0
MAX_BUILD_FAILURES, MAX_START_DEATHS = 3, 20  # in a row, before a slot is given up
MAX_REPLY_BYTES = 1 << 31  # a larger rollout is a mistake, and would exhaust the worker's memory

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Slot:
    """One process, or its replacement."""

    child: Child | None = None
    playing: int = 0
    ready: bool = False
    tried: bool = False  # before each has been, all rollouts would go to the fastest to start
    broken: Exception | None = None


class ProcessPool:
    """Processes that each hold the same environment; they start when the first is asked for.

    Each plays at most ``most_each`` rollouts at once, any number by default.
    """

    def __init__(
        self,
        arguments: Mapping[str, bytes],
        handlers: Handlers,
        *,
        processes: int,
        threads: int,
        most_each: int | None = None,
    ) -> None:
        self.restarts = 0
        self._arguments = arguments
        self._handlers = handlers
        self._processes = processes
        self._threads = threads
        self._most_each = most_each
        # Recorded now, because an environment in this process may change it.
        self._context = LaunchContext.current()
        self._slots: list[_Slot] = []
        self._watchdogs: list[asyncio.Task[None]] = []
        self._checks: dict[Child, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[Child]:
        """The process with the fewest rollouts, for one more; waits until one is free.

        Raises:
            RuntimeError: none can be started.
        """
        slot = await self._least_loaded()
        assert slot.child is not None
        slot.playing += 1
        try:
            yield slot.child
        finally:
            slot.playing -= 1
            self._changed.set()

    def children(self) -> list[Child]:
        """The processes that have been started."""
        return [slot.child for slot in self._slots if slot.child is not None]

    def check(self, child: Child) -> "asyncio.Task[None]":
        """Check in the background that a process still answers; if not, it is killed."""
        if child not in self._checks:
            self._checks[child] = asyncio.create_task(_kill_if_blocked(child))
            self._checks[child].add_done_callback(lambda _: self._checks.pop(child, None))
        return self._checks[child]

    async def aclose(self) -> None:
        """End the processes. The pool can be used again."""
        watchdogs, self._watchdogs, self._slots = self._watchdogs, [], []
        self._changed = asyncio.Event()  # the next use may be on another event loop
        for task in (*watchdogs, *self._checks.values()):
            task.cancel()
        if watchdogs:
            await asyncio.wait(watchdogs)

    async def _least_loaded(self) -> _Slot:
        if not self._watchdogs:
            self._slots = [_Slot() for _ in range(self._processes)]
            self._watchdogs = [
                asyncio.create_task(self._watch(slot, number))
                for number, slot in enumerate(self._slots)
            ]
        most = float("inf") if self._most_each is None else self._most_each
        while True:
            broken = [slot.broken for slot in self._slots if slot.broken is not None]
            if broken and len(broken) == len(self._slots):
                raise RuntimeError(f"no environment process can start: {broken[0]}") from broken[0]
            ready = [p for p in self._slots if p.ready and p.child is not None and p.child.alive]
            free = [slot for slot in ready if slot.playing < most]
            if free and all(slot.tried for slot in self._slots):
                return min(free, key=lambda slot: slot.playing)
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self, slot: _Slot, number: int) -> None:
        """The watchdog of a slot: replaces its process until cancelled, or until none can start."""
        build_failures = deaths = 0
        while slot.broken is None:
            name = f"environment process {number}"
            slot.child = Child(name, EnvironmentHost, threads=self._threads, context=self._context)
            try:
                began = time.monotonic()
                await slot.child.start(self._arguments, self._handlers)
                build_failures = 0
                slot.ready = slot.tried = True
                self._changed.set()
                how = await slot.child.wait()
                log.warning("%s; starting another", how)
                deaths = deaths + 1 if time.monotonic() - began < STABLE_S else 0
                self.restarts += 1
            except ProcessDied as error:  # while it started
                deaths += 1
                slot.broken = error if deaths == MAX_START_DEATHS else None
            except Exception as error:  # making the environment may raise anything
                build_failures += 1
                slot.broken = error if build_failures == MAX_BUILD_FAILURES else None
            finally:
                slot.ready, slot.tried = False, True
                await slot.child.close(grace_s=CLOSE_S)
                self._changed.set()
            pause_s = 0.05 * 2 ** min(10, max(0, deaths + build_failures - 1))
            await asyncio.sleep(min(MAX_BACKOFF_S, pause_s))


async def _kill_if_blocked(child: Child) -> None:
    with contextlib.suppress(ProcessDied):  # it died meanwhile
        try:
            async with asyncio.timeout(ANSWER_S):
                await child.call("ping")
        except TimeoutError:
            log.warning("%s is blocked and is killed", child.name)
            child.kill("was killed because it was blocked")
            await child.wait()


class EnvironmentHost:
    """What each process serves: it plays rollouts."""

    def __init__(self, channel: Channel, *, environment: Environment) -> None:
        channel.max_message_bytes = MAX_REPLY_BYTES
        self._engines = RemoteEngines(channel)
        self._environment = environment

    async def astart(self) -> None:
        """Do nothing: environments set themselves up."""

    async def aclose(self) -> None:
        """Close the environment."""
        if hasattr(self._environment, "aclose"):
            await self._environment.aclose()

    async def play(self, task: Task, engine: EngineAddress, params: SamplingParams) -> Rollout:
        """Play one rollout; completions come from the parent's engine."""
        try:
            return await attempt(self._environment, task, self._engines.find(engine), params)
        finally:
            self._engines.forget(engine)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """The parent reports the versions that an engine serves now."""
        self._engines.serves(index, version, newest)

    def ping(self) -> bool:
        """Answer, which shows that the event loop is not blocked."""
        return True
