"""Hosts of a worker's collector: a thread of this process, or a child process."""

import asyncio
import contextlib
import logging
import threading
from typing import Any

from primerl._common.interrupts import accept_interrupts, interrupt_main_thread
from primerl.rollout.collection.collector import Collector
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.remote import EngineHost, is_portable
from primerl.rollout.processes.child import Child
from primerl.rollout.processes.pickling import pickle_arguments
from primerl.rollout.processes.running_clock import running_time
from primerl.rollout.processes.supervised import SupervisedProcess

STOP_S = 20.0
INTERRUPT_S = 3.0  # before interrupting the trainer, which may get the error from a call instead
LATE_S = 2.0  # a heartbeat so late is looked into
BLOCKED_S = 10.0  # an event loop without a heartbeat for this long is ended by force

log = logging.getLogger(__name__)


class InThread:
    """Runs the collector on this process's event loop."""

    cause_of_death = ""  # a thread ends only with its process
    interrupted = False

    def __init__(self, engine: Engine, arguments: dict[str, Any]) -> None:
        self._collector = Collector(None, engine=engine, **arguments)

    def silence(self) -> tuple[float, float]:
        """Return the seconds of silence of the event loop, and 0: a thread is not stopped alone."""
        return running_time() - self._collector.lag.last_heartbeat, 0.0

    @property
    def held_by(self) -> str:
        """The code that held the event loop last."""
        return self._collector.lag.held_by

    def members(self) -> list[dict[str, Any]]:
        """Return the worker's processes, without those of the environment: none."""
        return []

    async def start(self) -> None:
        """Start collecting."""
        await self._collector.astart()

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of the collector and return its result."""
        result = getattr(self._collector, name)(*args)
        return await result if asyncio.iscoroutine(result) else result

    def notify(self, name: str, *args: Any) -> None:
        """Call a method of the collector without waiting for it."""
        getattr(self._collector, name)(*args)

    async def stop(self) -> dict[str, Any]:
        """Stop collecting; return the last stats."""
        return await self._collector.aclose()

    def failure_seen(self) -> None:
        """Do nothing: a thread does not die on its own."""

    def kill(self) -> None:
        """Do nothing: a thread ends with its process."""


class InProcess:
    """Runs the collector in a child process and serves this process's engines to it."""

    def __init__(
        self,
        engine: Engine,
        arguments: dict[str, bytes],
        *,
        threads: int,
        start_timeout_s: float,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._engines = EngineHost()
        process = SupervisedProcess(threads=threads)
        self._child = Child("the rollout worker", Collector, by_value=True, process=process)
        address = self._engines.add(engine, self._child.notify, portable=is_portable(engine))
        self._arguments = arguments | pickle_arguments(engine=address)
        self._background: list[asyncio.Task[None]] = []
        self._trainer = threading.current_thread()
        accept_interrupts()
        self.cause_of_death = ""
        self.interrupted = False
        self._death_reported = False
        self._heartbeat_at = self._stopped_at = running_time()
        self._warned = False

    def silence(self) -> tuple[float, float]:
        """Return the seconds of silence of the event loop, and of its process being stopped.

        The first number does not count time in which the process was stopped by SIGSTOP or a
        debugger. The second is 0 unless the process is stopped now.
        """
        now, stopped_s = running_time(), 0.0
        if now - self._heartbeat_at > LATE_S and self._child.stopped:
            self._stopped_at, stopped_s = now, now - self._heartbeat_at
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s (pid %s) is stopped, by SIGSTOP or a debugger; rollouts wait until it is "
                    "continued: kill -CONT %s",
                    *(self._child.name, self._child.pid, self._child.pid),
                )
        return now - max(self._heartbeat_at, self._stopped_at), stopped_s

    @property
    def held_by(self) -> str:
        """The code that held the event loop: its process has logged it."""
        return ""

    def members(self) -> list[dict[str, Any]]:
        """Return the worker's processes, without those of the environment."""
        return [{"name": self._child.name, "pid": self._child.pid, "alive": self._child.alive}]

    async def start(self) -> None:
        """Start the process and begin collecting."""
        await self._child.start(
            self._arguments,
            {
                "generate": self._engines.generate,
                "metrics": self._engines.metrics,
                "heartbeat": self._heartbeat,
            },
            make_timeout_s=self._start_timeout_s,
            advice="; restoring a state generates tasks without indices again, up to the stream's "
            "position; if that takes long, raise start_timeout_s",
        )
        self._heartbeat()
        self._background = [
            asyncio.create_task(self._engines.keep_reporting()),
            asyncio.create_task(self._watch_child()),
        ]

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of the collector and return its result."""
        with contextlib.ExitStack() as stack:
            sent = [self._sendable(one, stack) for one in args]
            self._engines.report()  # the child must know the versions that the trainer has seen
            return await self._child.call(name, *sent)

    def notify(self, name: str, *args: Any) -> None:
        """Call a method of the collector without waiting for it."""
        self._child.notify(name, *args)

    def failure_seen(self) -> None:
        """Record that a call's error reached the trainer, so that no interrupt has to report it."""
        self._death_reported = self._death_reported or not self._child.alive

    async def _watch_child(self) -> None:
        """Log the child's death, and interrupt a trainer that is busy elsewhere."""
        self.cause_of_death = await self._child.wait()
        log.error("%s", self.cause_of_death)
        await asyncio.sleep(INTERRUPT_S)
        if not self._death_reported and self._trainer is threading.main_thread():
            self.interrupted = True
            interrupt_main_thread()

    async def stop(self) -> dict[str, Any] | None:
        """Stop collecting; return the last stats, or None if the process has died."""
        for task in self._background:
            task.cancel()
        if self.silence()[0] > BLOCKED_S or self._child.stopped or not self._child.alive:
            await self._child.close(grace_s=0)
            return None
        try:
            async with asyncio.timeout(STOP_S):
                stats: dict[str, Any] = await self._child.call("aclose")
                return stats
        except (RuntimeError, TimeoutError):
            return None
        finally:
            await self._child.close(grace_s=2.0)

    def kill(self) -> None:
        """End the process by force."""
        self._child.kill_and_wait()

    def _sendable(self, value: Any, stack: contextlib.ExitStack) -> Any:
        if not isinstance(value, Engine):
            return value
        return stack.enter_context(
            self._engines.lease(value, self._child.notify, portable=is_portable(value))
        )

    def _heartbeat(self) -> None:
        self._heartbeat_at, self._warned = running_time(), False
