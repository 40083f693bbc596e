"""Child processes that serve calls and never outlive the process that started them.

A child is a fresh interpreter (never a fork) under a supervisor, which ends the child and
everything that it started. The child inherits one end of a socket pair, so no address or shared
memory can be left behind. Its temporary files are in a folder that is removed with it.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from primerl._common.processes import launch
from primerl._common.processes.launch import LaunchContext
from primerl._common.processes.supervisor import alive, remove_folder, stopped
from primerl.rollout.processes.channel import Channel, ChannelClosed, Handlers
from primerl.rollout.processes.pickling import load_arguments
from primerl.rollout.processes.running_clock import RunningLoop

START_S = 120.0
STOP_S = 10.0
POLL_S = 0.25
EXIT_CODE_S = 3.0  # for a supervisor to end what the child started and return its exit code
ORPHAN_S = 0.05  # a dying parent's connection may end this long before its process
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")


class ProcessDied(RuntimeError):
    """A child process has died; the message names the process and the cause of death."""


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
        threads: threads of numerical libraries in the child.
        by_value: pickle the code of arguments, for a child that can't import it (a script's code).
        context: what the child inherits; by default, this process's current context.

    Attributes:
        pid: the process's id; None until the child answers.
    """

    def __init__(
        self,
        name: str,
        served: type,
        *,
        threads: int = 1,
        by_value: bool = False,
        context: LaunchContext | None = None,
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self._served = served
        self._threads = threads
        self._by_value = by_value
        self._context = context or LaunchContext.current()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._folder = ""
        self._cause = ""

    @property
    def alive(self) -> bool:
        """Whether the child is running and can be called."""
        return self.pid is not None and self._serving is not None and not self._serving.done()

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by SIGSTOP or a debugger."""
        return self.pid is not None and stopped(self.pid)

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
        if self._process is not None:
            raise RuntimeError(f"{self.name} was started before; start it only once")
        context = self._context
        ours, theirs = socket.socketpair()
        self._folder = launch.make_folder("primerl-", within=context.temporary_folder)
        with theirs:
            self._process = launch.start(
                [sys.executable, "-c", _program(theirs.fileno(), context)],
                folder=self._folder,
                grace_s=0.0,  # closing the connection asks it to stop
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(context, self._threads, self._folder),
                cwd=context.folder if os.path.isdir(context.folder or "") else None,
            )
        self._channel = await Channel.over(ours, handlers, by_value=self._by_value)
        self._serving = asyncio.create_task(self._channel.serve())
        self._watching = asyncio.create_task(self._watch(self._process, self._channel))
        path = (self._served.__module__, self._served.__qualname__)
        what = f"did not begin within {START_S:g} s"
        deadline = asyncio.timeout(START_S)
        try:
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
        if self._process is None:
            return
        self._cause = self._cause or "was closed"
        if self._watching is not None:
            self._watching.cancel()
        if self._channel is not None:
            self._channel.close()
        await self._wait_until_over(grace_s)
        self.kill()
        if not await self._wait_until_over(STOP_S):
            self._process.kill()  # then the inner supervisor ends the rest
            await self._wait_until_over(STOP_S)
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)
        remove_folder(self._folder)

    def kill(self, why: str = "") -> None:
        """Kill the process and everything that it started; ``why`` appears in error messages."""
        self._cause = self._cause or why
        if self._process is not None:
            self._process.terminate()

    def kill_and_wait(self) -> None:
        """Kill, as ``kill`` does, and wait without an event loop until all processes have ended."""
        self.kill()
        if self._process is not None:
            launch.wait_until_over(self._process, self._folder, timeout_s=STOP_S)
            remove_folder(self._folder)

    async def _watch(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        """Close the channel when the process has ended, even if a fork holds its socket open."""
        while process.poll() is None:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(POLL_S)  # messages may still be in the socket
        channel.close()

    async def _wait_until_over(self, timeout_s: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None or not launch.is_over(self._folder):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _cause_of_death(self) -> str:
        assert self._process is not None
        await self._wait_until_over(EXIT_CODE_S)
        code = self._process.poll()
        self.kill()
        if self._cause:
            how = self._cause
        elif code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was ended: its supervisor was killed by {signal.Signals(-code).name}"
        elif code > 128:
            how = f"was killed by {_signal_name(code - 128)}"
            how += " (out of memory?)" if code == 128 + signal.SIGKILL else ""
        else:
            how = f"exited with code {code}"
        process = f" (process {self.pid})" if self.pid is not None else ""
        return f"{self.name}{process} {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _program(fd: int, context: LaunchContext) -> str:
    path = [os.path.join(context.folder or "", one) for one in sys.path if isinstance(one, str)]
    return (
        f"import sys; sys.path[:] = {path!r}; "
        f"from primerl.rollout.processes.child import run_child; run_child({fd}, {os.getpid()})"
    )


def _environment(context: LaunchContext, threads: int, folder: str) -> dict[str, str]:
    budget = {f"{library}_NUM_THREADS": str(threads) for library in _THREADS}
    # TMPDIR also holds the temporary files of the child's subprocesses; all are removed with it.
    ours = {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": folder}
    return context.environment | budget | ours


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
