"""Environments in processes of their own: what hangs or dies there takes one process with it."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import attrs

from primerl.rollout.channel import Channel
from primerl.rollout.engine import Engine
from primerl.rollout.environment import Environment, Task
from primerl.rollout.processes import Child, pickle_arguments
from primerl.rollout.remote_engine import EngineAddress, EngineHost, RemoteEngine
from primerl.types import Rollout, SamplingParams

ANSWER_S = 5.0  # what an event loop that is not blocked needs to answer
SETTLED_S = 5.0  # a process that lived so long did not die of its start
MAX_BACKOFF_S = 30.0
MAX_START_FAILURES = 3

log = logging.getLogger(__name__)


def isolated(
    environment: Environment,
    *,
    processes: int = 2,
    timeout_s: float = 600.0,
    threads: int = 1,
) -> "IsolatedEnvironment":
    """The same environment, played in supervised processes of its own.

        environment = rollout.isolated(heavy_environment, processes=4)

    For environments that compute, block their event loop or crash. Each process plays many
    rollouts at once, and calls back for the engine's completions. A process that dies fails its
    rollouts, which are data (retried, counted), and is started again; one that is blocked when a
    rollout's time is up is killed first.

    Args:
        environment: crosses into each process by pickle, lambdas and local functions included.
        processes: a new rollout goes to the one with the fewest.
        timeout_s: how long a rollout may take, waiting for a process included.
        threads: of numerical libraries, in each process.

    Raises:
        ValueError: a number is out of range, or the environment can't cross.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}, expected at least 1")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected a positive time")
    return IsolatedEnvironment(
        pickle_arguments(environment=environment), processes, timeout_s, threads
    )


@attrs.define(eq=False)
class _Slot:
    """One process, or its successor."""

    child: Child | None = None
    playing: int = 0
    ready: bool = False
    tried: bool = False  # until each has been, all first rollouts would go to the fastest


class IsolatedEnvironment:
    """An environment behind a pool of processes: made by ``isolated``.

    The processes start with the first rollout, where that is played, and end with ``aclose``,
    which a worker calls, or with the process that started them.
    """

    def __init__(
        self, arguments: dict[str, bytes], processes: int, timeout_s: float, threads: int
    ) -> None:
        self._plan = (arguments, processes, timeout_s, threads)
        self._timeout_s = timeout_s
        self._engines = EngineHost()
        self._slots: list[_Slot] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        self.restarts = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return IsolatedEnvironment, self._plan  # processes stay where they were started

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play one rollout in the process that has the fewest.

        Raises:
            TimeoutError: it did not end within ``timeout_s``.
            RuntimeError: its process died, or none can be started. What the environment raises
                is raised.
        """
        child = None
        try:
            async with asyncio.timeout(self._timeout_s):
                slot = await self._least_loaded()
                child = slot.child
                assert child is not None
                slot.playing += 1
                try:
                    with self._engines.lease(engine) as address:
                        played: Rollout = await child.call("play", dict(task), address, params)
                    return played
                finally:
                    slot.playing -= 1
        except TimeoutError:
            if child is not None:
                await _kill_if_blocked(child)
            raise TimeoutError(
                f"the rollout did not end within {self._timeout_s:.0f} s"
                if child is not None
                else f"no environment process was ready within {self._timeout_s:.0f} s"
            ) from None

    def members(self) -> list[dict[str, Any]]:
        """The processes: ``name``, ``pid``, ``alive``."""
        children = [slot.child for slot in self._slots if slot.child is not None]
        return [{"name": one.name, "pid": one.pid, "alive": one.alive} for one in children]

    async def aclose(self) -> None:
        """End the processes; rollouts in flight fail."""
        keepers, self._keepers = self._keepers, []
        self._broken = RuntimeError("the environment was closed")
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)

    async def _least_loaded(self) -> _Slot:
        if not self._keepers and self._broken is None:
            _, processes, _, _ = self._plan
            self._slots = [_Slot() for _ in range(processes)]
            self._keepers = [
                asyncio.create_task(self._keep(slot, number))
                for number, slot in enumerate(self._slots)
            ]
        while True:
            if self._broken is not None:
                raise RuntimeError(f"no environment process: {self._broken}") from self._broken
            ready = [slot for slot in self._slots if slot.ready and slot.child and slot.child.alive]
            if ready and all(slot.tried for slot in self._slots):
                return min(ready, key=lambda slot: slot.playing)
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, slot: _Slot, number: int) -> None:
        """Keep a process in the slot until cancelled."""
        arguments, _, _, threads = self._plan
        failures = quick_deaths = 0
        while failures < MAX_START_FAILURES:
            slot.child = Child(f"environment process {number}", EnvironmentHost, threads=threads)
            try:
                began = time.monotonic()
                try:
                    await slot.child.start(arguments, {"generate": self._engines.generate})
                except Exception as error:  # what building the environment raises, too
                    failures += 1
                    if failures == MAX_START_FAILURES:
                        self._broken = error
                else:
                    failures = 0
                    slot.ready = slot.tried = True
                    self._changed.set()
                    how = await slot.child.wait()
                    log.warning("%s; starting another", how)
                    quick_deaths = quick_deaths + 1 if time.monotonic() - began < SETTLED_S else 0
                    self.restarts += 1
            finally:
                slot.ready, slot.tried = False, True
                await slot.child.close(grace_s=2.0)
                self._changed.set()
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.05 * 2 ** (quick_deaths + failures)))


async def _kill_if_blocked(child: Child) -> None:
    with contextlib.suppress(RuntimeError):  # it died meanwhile
        try:
            async with asyncio.timeout(ANSWER_S):
                await child.call("ping")
        except TimeoutError:
            log.warning("%s is blocked and is killed", child.name)
            child.kill()
            await child.wait()


class EnvironmentHost:
    """Plays rollouts in the child process."""

    def __init__(self, channel: Channel, *, environment: Environment) -> None:
        self._channel = channel
        self._environment = environment

    async def astart(self) -> None:
        """Nothing to do: environments prepare themselves."""

    async def aclose(self) -> None:
        """Close the environment."""
        if hasattr(self._environment, "aclose"):
            await self._environment.aclose()

    async def play(self, task: Task, engine: EngineAddress, params: SamplingParams) -> Rollout:
        """Play one rollout; completions come from the parent's engine."""
        try:
            return await self._environment(task, RemoteEngine(self._channel, engine), params)
        except SystemExit as error:
            raise RuntimeError(f"the environment called sys.exit({error.code!r})") from error

    def ping(self) -> bool:
        """Answer, if the event loop turns."""
        return True
