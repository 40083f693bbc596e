"""Child processes that serve calls; none outlives the one that started it.

A child is a fresh interpreter (never a fork) under a supervisor, which ends it and all that it
started. It inherits one end of a socket pair, so there is no address and no shared memory that
could be left behind; its temporary files go to a folder of its own.
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

from primerl.rollout.processes import supervised
from primerl.rollout.processes.channel import Channel, ChannelClosed, Handlers
from primerl.rollout.processes.crossing import load_arguments
from primerl.rollout.processes.supervised import Surroundings
from primerl.rollout.processes.supervisor import alive

START_S = 120.0
STOP_S = 10.0
POLL_S = 0.25
LAST_WORD_S = 3.0  # in which a supervisor says how a child ended, after ending what it started
ORPHAN_S = 0.05  # between a parent's last word and its death
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")


class ProcessDied(RuntimeError):
    """A child process is gone; the message says which, and how."""


class Child:
    """A child process that serves the methods of one object, over a channel.

        child = Child("the rollout worker", Collector)
        await child.start(pickle_arguments(plan=plan), {"generate": generate})
        await child.call("take", 0)
        await child.close()

    Args:
        name: what error messages call it.
        served: an importable class. The child makes ``served(channel, **arguments)`` and answers
            calls with its methods. ``astart`` is awaited at the beginning, ``aclose`` at the end.
        threads: of numerical libraries in the child.
        by_value: pickle the arguments of calls for a child that can't import a script's own code.
        surroundings: what it inherits; by default what is there now.

    Attributes:
        pid: the process's id; None until it answers.
    """

    def __init__(
        self,
        name: str,
        served: type,
        *,
        threads: int = 1,
        by_value: bool = False,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self._served = served
        self._threads = threads
        self._by_value = by_value
        self._surroundings = surroundings or Surroundings.now()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._folder: str | None = None
        self._fate = ""

    @property
    def alive(self) -> bool:
        """Whether it runs and can be called."""
        return self.pid is not None and self._serving is not None and not self._serving.done()

    async def start(
        self,
        arguments: Mapping[str, bytes],
        handlers: Handlers,
        *,
        timeout_s: float = START_S,
    ) -> None:
        """Start it and wait until its object is made.

        Args:
            arguments: of the object, from ``pickle_arguments``.
            handlers: what the child may call here.
            timeout_s: how long that may take.

        Raises:
            RuntimeError: it was started before, it died, or it took longer than ``timeout_s``.
                What making the object raises is raised.
        """
        if self._process is not None:
            raise RuntimeError(f"{self.name} was started before")
        around = self._surroundings
        ours, theirs = socket.socketpair()
        self._folder = supervised.make_folder("primerl-", within=around.temporary_folder)
        with theirs:
            self._process = supervised.start(
                [sys.executable, "-c", _program(theirs.fileno(), around)],
                folder=self._folder,
                grace_s=0.0,  # closing the connection asks it to stop
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(around, self._threads, self._folder),
                cwd=around.folder if os.path.isdir(around.folder or "") else None,
            )
        self._channel = await Channel.over(ours, handlers, by_value=self._by_value)
        self._serving = asyncio.create_task(self._channel.serve())
        self._watching = asyncio.create_task(self._watch(self._process, self._channel))
        path = (self._served.__module__, self._served.__qualname__)
        try:
            async with asyncio.timeout(timeout_s):
                self.pid = await self.call("process_id")
                await self.call("make", *path, dict(arguments))
        except TimeoutError:
            await self.close(grace_s=0)
            raise RuntimeError(f"{self.name} did not start within {timeout_s:.0f} s") from None
        except BaseException:
            await self.close(grace_s=0)
            raise

    async def call(self, name: str, *args: Any) -> Any:
        """The result of a method of the child's object.

        Raises:
            ProcessDied: before it answered. What the method raises is raised.
        """
        assert self._channel is not None, "start() comes first"
        try:
            return await self._channel.call(name, *args)
        except ChannelClosed:
            raise ProcessDied(await self._obituary()) from None

    def notify(self, name: str, *args: Any) -> None:
        """Call a method without waiting for it."""
        if self._channel is not None:
            self._channel.notify(name, *args)

    async def wait(self) -> str:
        """Wait until the process is gone; returns how it ended, in words."""
        assert self._serving is not None, "start() comes first"
        await asyncio.wait([self._serving])
        return await self._obituary()

    async def close(self, *, grace_s: float = STOP_S) -> None:
        """End the process, politely and then by force, and all that it started."""
        if self._process is None:
            return
        self._fate = self._fate or "was closed"
        if self._watching is not None:
            self._watching.cancel()
        if self._channel is not None:
            self._channel.close()
        await self._gone(grace_s)
        self.kill()
        if not await self._gone(STOP_S):
            self._process.kill()  # then the inner supervisor ends the rest
            await self._gone(STOP_S)
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)
        self._remove_folder()

    def kill(self, why: str = "") -> None:
        """Kill the process and whatever it started; ``why`` is what error messages will say."""
        self._fate = self._fate or why
        if self._process is not None:
            self._process.terminate()

    def kill_and_wait(self) -> None:
        """The same as ``kill``, for when no event loop can wait: it returns when all is over."""
        self.kill()
        if self._process is not None and self._folder is not None:
            supervised.wait_until_over(self._process, self._folder, timeout_s=STOP_S)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            supervised.remove_folder(self._folder)

    async def _watch(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        """Close the channel when the process has ended, whoever holds its socket open."""
        while process.poll() is None:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(POLL_S)  # for what it said last
        channel.close()

    async def _gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (over := self._is_over()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return over

    def _is_over(self) -> bool:
        assert self._process is not None
        assert self._folder is not None
        return self._process.poll() is not None and supervised.is_over(self._folder)

    async def _obituary(self) -> str:
        assert self._process is not None
        await self._gone(LAST_WORD_S)
        code = self._process.poll()
        self.kill()
        if self._fate:
            how = self._fate
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


def _program(fd: int, around: Surroundings) -> str:
    path = [os.path.join(around.folder or "", one) for one in sys.path if isinstance(one, str)]
    return (
        f"import sys; sys.path[:] = {path!r}; "
        f"from primerl.rollout.processes.child import run_child; run_child({fd}, {os.getpid()})"
    )


def _environment(around: Surroundings, threads: int, folder: str) -> dict[str, str]:
    budget = {f"{library}_NUM_THREADS": str(threads) for library in _THREADS}
    # Temporary files of whatever the child starts go where they can be found and removed.
    ours = {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": folder}
    return around.environment | budget | ours


# ---- in the child ----


def run_child(fd: int, parent: int) -> None:
    """The child's whole life; called by the program that ``Child.start`` runs."""
    # The parent says when to stop. (Ignored outright, it would be so in subprocesses, too.)
    signal.signal(signal.SIGINT, lambda *_: None)
    os.set_inheritable(fd, False)
    tempfile.gettempdir()  # remembered: an environment may change TMPDIR
    asyncio.run(_serve(socket.socket(fileno=fd), parent))


async def _serve(sock: socket.socket, parent: int) -> None:
    served: Any = None

    async def make(module: str, name: str, arguments: dict[str, bytes]) -> None:
        nonlocal served
        kind = getattr(importlib.import_module(module), name)
        served = kind(channel, **load_arguments(arguments))
        for method in dir(served):
            if not method.startswith("_"):
                channel.handlers[method] = getattr(served, method)
        await served.astart()
        gc.collect()
        gc.freeze()  # what was set up stays: looking through it again took half of the time

    channel = await Channel.over(sock, {"process_id": os.getpid, "make": make})
    try:
        await channel.serve()
    finally:
        await asyncio.sleep(ORPHAN_S)
        if not alive(parent):  # nobody will hear what rollouts say to that
            os.kill(os.getpid(), signal.SIGKILL)
        if served is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S / 2):
                    await served.aclose()
