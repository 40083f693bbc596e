"""A pool of processes that play environments: each is watched, and replaced when it dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping

import attrs

from primerl.rollout.environments.host import EnvironmentHost
from primerl.rollout.processes.channel import Handlers
from primerl.rollout.processes.child import Child, ProcessDied
from primerl.rollout.processes.launch import LaunchContext

ANSWER_S = 5.0  # what an event loop that is not blocked needs to answer
SETTLED_S = 5.0  # a process that lived so long did not die of its start
MAX_BACKOFF_S = 30.0
MOST_BUILD_FAILURES, MOST_START_DEATHS = 3, 20  # in a row, before a place is given up

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Place:
    """One process, or its successor."""

    child: Child | None = None
    playing: int = 0
    ready: bool = False
    tried: bool = False  # until each has been, all first rollouts would go to the fastest
    broken: Exception | None = None


class ProcessPool:
    """Processes that each hold the same environment; they start when the first is asked for.

    Args:
        arguments: of ``EnvironmentHost``, pickled.
        handlers: what the processes may call here.
        processes: how many.
        threads: of numerical libraries, in each.
        most_each: rollouts at once in one process; any number by default.
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
        # Now, because code of an environment in this process may change what there is.
        self._context = LaunchContext.current()
        self._places: list[_Place] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._checks: dict[Child, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[Child]:
        """The process with the fewest rollouts, for one more; waits until one is free.

        Raises:
            RuntimeError: none can be started.
        """
        place = await self._least_loaded()
        assert place.child is not None
        place.playing += 1
        try:
            yield place.child
        finally:
            place.playing -= 1
            self._changed.set()

    def children(self) -> list[Child]:
        """The processes that there are."""
        return [place.child for place in self._places if place.child is not None]

    def check(self, child: Child) -> "asyncio.Task[None]":
        """See in the background whether a process still answers; one that doesn't is killed."""
        if child not in self._checks:
            self._checks[child] = asyncio.create_task(_kill_if_blocked(child))
            self._checks[child].add_done_callback(lambda _: self._checks.pop(child, None))
        return self._checks[child]

    async def aclose(self) -> None:
        """End the processes. The pool can be used again."""
        keepers, self._keepers, self._places = self._keepers, [], []
        self._changed = asyncio.Event()  # the next use may be on another event loop
        for task in (*keepers, *self._checks.values()):
            task.cancel()
        if keepers:
            await asyncio.wait(keepers)

    async def _least_loaded(self) -> _Place:
        if not self._keepers:
            self._places = [_Place() for _ in range(self._processes)]
            self._keepers = [
                asyncio.create_task(self._keep(place, number))
                for number, place in enumerate(self._places)
            ]
        most = float("inf") if self._most_each is None else self._most_each
        while True:
            broken = [place.broken for place in self._places if place.broken is not None]
            if broken and len(broken) == len(self._places):
                raise RuntimeError(f"no environment process can start: {broken[0]}") from broken[0]
            ready = [p for p in self._places if p.ready and p.child is not None and p.child.alive]
            free = [place for place in ready if place.playing < most]
            if free and all(place.tried for place in self._places):
                return min(free, key=lambda place: place.playing)
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, place: _Place, number: int) -> None:
        """Keep a process in the place until cancelled, or until it can't be started."""
        build_failures = deaths = 0
        while place.broken is None:
            name = f"environment process {number}"
            place.child = Child(name, EnvironmentHost, threads=self._threads, context=self._context)
            try:
                began = time.monotonic()
                await place.child.start(self._arguments, self._handlers)
                build_failures = 0
                place.ready = place.tried = True
                self._changed.set()
                how = await place.child.wait()
                log.warning("%s; starting another", how)
                deaths = deaths + 1 if time.monotonic() - began < SETTLED_S else 0
                self.restarts += 1
            except ProcessDied as error:  # while it started
                deaths += 1
                place.broken = error if deaths == MOST_START_DEATHS else None
            except Exception as error:  # whatever building the environment raises
                build_failures += 1
                place.broken = error if build_failures == MOST_BUILD_FAILURES else None
            finally:
                place.ready, place.tried = False, True
                await place.child.close(grace_s=2.0)
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
            child.kill("was blocked, and was killed for it")
            await child.wait()
