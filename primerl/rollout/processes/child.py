"""Child processes that serve calls and never outlive the process that started them.

A child is a fresh interpreter (never a fork) that answers calls over a channel. Where it runs is
the concern of its ``ChildProcess``: on this host, or on another one.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

from primerl._common.processes.supervisor import alive, stopped
from primerl.rollout.processes.channel import Channel, ChannelClosed, Handlers
from primerl.rollout.processes.pickling import load_arguments
from primerl.rollout.processes.running_clock import RunningLoop
from primerl.rollout.processes.supervised import STOP_S, SupervisedProcess

START_S = 120.0
POLL_S = 0.25
ORPHAN_S = 0.05  # a dying parent's connection may end this long before its process


class ProcessDied(RuntimeError):
    """A child process has died; the message names the process and the cause of death."""


class ChildProcess(Protocol):
    """A process that runs ``run_child``, with everything that it starts."""

    @property
    def host(self) -> str:
        """The name of the other host on which the process runs; empty on this host."""
        ...

    async def open(self) -> socket.socket:
        """Start the process; return a connected socket whose other end the process serves."""
        ...

    async def wait(self) -> None:
        """Wait until the process has ended."""
        ...

    async def cause(self) -> str:
        """Return how the process ended; end it if it has only closed its connection."""
        ...

    async def close(self, grace_s: float) -> None:
        """End the process and everything that it started, by force after ``grace_s``."""
        ...

    def kill(self) -> None:
        """Kill the process and everything that it started, without waiting."""
        ...

    def kill_and_wait(self) -> None:
        """Kill the process; wait, without an event loop, until everything has ended."""
        ...


class Child:
    """A child process that serves the methods of one object, over a channel.

        child = Child("the rollout worker", Collector)
        await child.start(pickle_arguments(plan=plan), {"generate": generate})
        await child.call("take", 0)
        await child.close()

    Args:
        name: the name of the process in error messages.
        served: an importable class. The child creates ``served(channel, **arguments)`` and answers
            calls with the object's methods. It awaits ``astart`` at the beginning and ``aclose`` at
            the end.
        by_value: pickle the code of arguments, for a child that can't import it (a script's code).
        process: the process, not yet started; by default a ``SupervisedProcess`` on this host.

    Attributes:
        pid: the process's id on its host; None until the child answers.
    """

    def __init__(
        self,
        name: str,
        served: type,
        *,
        by_value: bool = False,
        process: ChildProcess | None = None,
    ) -> None:
        self.pid: int | None = None
        self._name = name
        self._served = served
        self._by_value = by_value
        self._process = SupervisedProcess() if process is None else process
        self._started = False
        self._channel: Channel | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._cause = ""

    @property
    def name(self) -> str:
        """The name of the process, with that of its host if it runs on another one."""
        host = self._process.host
        return f"{self._name} on {host}" if host else self._name

    @property
    def alive(self) -> bool:
        """Whether the child is running and can be called."""
        return self.pid is not None and self._serving is not None and not self._serving.done()

    @property
    def stopped(self) -> bool:
        """Whether the process, if it is on this host, is stopped by SIGSTOP or a debugger."""
        return self.pid is not None and not self._process.host and stopped(self.pid)

    async def start(
        self,
        arguments: Mapping[str, bytes],
        handlers: Handlers,
        *,
        make_timeout_s: float = START_S,
        advice: str = "",
    ) -> None:
        """Start the process and wait until its object is created.

        Args:
            arguments: the object's arguments by name, from ``pickle_arguments``.
            handlers: functions of this process that the child may call.
            make_timeout_s: how long creating the object may take.
            advice: appended to the error message if a timeout expires.

        Raises:
            RuntimeError: the process was started before, it died, or it took longer than
                ``START_S`` to answer or ``make_timeout_s`` to create its object.
            Exception: what creating the object raises.
        """
        if self._started:
            raise RuntimeError(f"{self.name} was started before; start it only once")
        self._started = True
        path = (self._served.__module__, self._served.__qualname__)
        what = f"did not begin within {START_S:g} s"
        deadline = asyncio.timeout(START_S)
        try:
            sock = await self._process.open()
            self._channel = await Channel.over(sock, handlers, by_value=self._by_value)
            self._serving = asyncio.create_task(self._channel.serve())
            self._watching = asyncio.create_task(self._watch(self._channel))
            async with deadline:
                self.pid = await self.call("process_id")
            what = (
                f"began, but was still making its {', '.join(arguments)} after {make_timeout_s:g} s"
            )
            deadline = asyncio.timeout(make_timeout_s)
            async with deadline:
                await self.call("make", *path, dict(arguments))
        except BaseException as error:
            await self.close(grace_s=0)
            if isinstance(error, TimeoutError) and deadline.expired():
                raise RuntimeError(f"{self.name} {what}{advice}") from None
            raise

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of the child's object and return its result.

        Raises:
            ProcessDied: the process died before it answered.
            Exception: what the method raises.
        """
        assert self._channel is not None, "start() comes first"
        try:
            return await self._channel.call(name, *args)
        except ChannelClosed:
            raise ProcessDied(await self._cause_of_death()) from None

    def notify(self, name: str, *args: Any) -> None:
        """Call a method without waiting for it."""
        if self._channel is not None:
            self._channel.notify(name, *args)

    async def wait(self) -> str:
        """Wait until the process has ended; return a description of the cause."""
        assert self._serving is not None, "start() comes first"
        await asyncio.wait([self._serving])
        return await self._cause_of_death()

    async def close(self, *, grace_s: float = STOP_S) -> None:
        """End the process and everything that it started, by force after ``grace_s``."""
        if not self._started:
            return
        self._cause = self._cause or "was closed"
        if self._watching is not None:
            self._watching.cancel()
        if self._channel is not None:
            self._channel.close()
        await self._process.close(grace_s)
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)

    def kill(self, why: str = "") -> None:
        """Kill the process and everything that it started; ``why`` appears in error messages."""
        self._cause = self._cause or why
        self._process.kill()

    def kill_and_wait(self) -> None:
        """Kill, as ``kill`` does, and wait without an event loop until all processes have ended."""
        self._process.kill_and_wait()

    async def _watch(self, channel: Channel) -> None:
        """Close the channel when the process has ended, even if a fork holds its socket open."""
        await self._process.wait()
        await asyncio.sleep(POLL_S)  # messages may still be in the socket
        channel.close()

    async def _cause_of_death(self) -> str:
        how = await self._process.cause()
        process = f" (process {self.pid})" if self.pid is not None else ""
        return f"{self.name}{process} {self._cause or how}"


# ---- in the child ----


def run_child(fd: int, parent: int) -> None:
    """Run the child; called by the program that ``Child.start`` starts."""
    # The parent decides when to stop. (SIG_IGN would be inherited by subprocesses.)
    signal.signal(signal.SIGINT, lambda *_: None)
    os.set_inheritable(fd, False)
    tempfile.gettempdir()  # caches the folder: an environment may change TMPDIR
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        runner.run(_serve(socket.socket(fileno=fd), parent))


async def _serve(sock: socket.socket, parent: int) -> None:
    served: Any = None

    async def make(module: str, name: str, arguments: dict[str, bytes]) -> None:
        nonlocal served
        kind = getattr(importlib.import_module(module), name)
        served = kind(channel, **load_arguments(arguments))
        for method in dir(served):
            if not method.startswith("_"):
                channel.handlers[method] = getattr(served, method)
        # Half of the time went into collections that scanned these long-lived objects again. This
        # comes before astart, which begins to measure the event loop's lag: it takes long itself.
        gc.collect()
        gc.freeze()
        await served.astart()

    channel = await Channel.over(sock, {"process_id": os.getpid, "make": make})
    try:
        await channel.serve()
    finally:
        await asyncio.sleep(ORPHAN_S)
        if not alive(parent):  # nobody would receive the errors of cancelled rollouts
            os.kill(os.getpid(), signal.SIGKILL)
        await channel.wait_for_handlers(STOP_S / 2)
        if served is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S / 2):
                    await served.aclose()
