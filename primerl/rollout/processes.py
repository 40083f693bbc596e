"""Child processes that are supervised: they serve calls, and none outlives the one that started it.

A child is a fresh interpreter (never a fork) in a session of its own. It inherits one end of a
socket pair, so there is no address, no file and no shared memory that could be left behind. When
its parent dies it kills its whole process group, environments' subprocesses included; when it
dies, its parent does that.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from primerl.rollout.channel import Channel, ChannelClosed, Handlers
from primerl.rollout.crossing import load_arguments

START_S = 120.0
STOP_S = 10.0
PARENT_POLL_S = 0.5
ORPHAN_S = 0.05  # between a parent's last word and its death
# A child is no rank of the trainer's process group.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
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
    """

    def __init__(
        self, name: str, served: type, *, threads: int = 1, by_value: bool = False
    ) -> None:
        self.name = name
        self._served = served
        self._threads = threads
        self._by_value = by_value
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._folder: str | None = None
        self._fate = ""
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The process's id; None before it was started."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether it runs and can be called."""
        return self._serving is not None and not self._serving.done()

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
            RuntimeError: it died, or took longer than ``timeout_s``. What making the object
                raises is raised.
        """
        ours, theirs = socket.socketpair()
        self._folder = tempfile.mkdtemp(prefix="primerl-")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(self._threads, self._folder),
                start_new_session=True,
            )
        self._channel = await Channel.over(ours, handlers, by_value=self._by_value)
        self._serving = asyncio.create_task(self._channel.serve())
        self._watching = asyncio.create_task(self._watch(self._process, self._channel))
        path = (self._served.__module__, self._served.__qualname__)
        try:
            async with asyncio.timeout(timeout_s):
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
        """End the process: politely, then by force; its process group goes with it."""
        if self._process is None:
            return
        self._fate = self._fate or "was closed"
        if self._watching is not None:
            self._watching.cancel()
        if self._channel is not None:
            self._channel.close()
        await self._gone(grace_s)
        self.kill()
        await self._gone(STOP_S)
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self, why: str = "") -> None:
        """Kill the process and whatever it started; ``why`` is what error messages will say."""
        self._fate = self._fate or why
        if self._process is not None and not self._killed:
            self._killed = self._process.returncode is not None  # its number may be given anew
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        """Close the channel when the process ends: its forks may hold the socket open."""
        while process.poll() is None:
            await asyncio.sleep(PARENT_POLL_S / 2)
        await asyncio.sleep(PARENT_POLL_S / 2)  # for what it said last
        channel.close()

    async def _gone(self, timeout_s: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self._process.poll() is not None

    async def _obituary(self) -> str:
        assert self._process is not None
        await self._gone(1.0)
        code = self._process.poll()
        self.kill()
        if self._fate:
            how = self._fate
        elif code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        else:
            how = f"exited with code {code}"
        return f"{self.name} (process {self._process.pid}) {how}"


def _program(fd: int) -> str:
    return (
        f"import sys; sys.path[:] = {[one for one in sys.path if isinstance(one, str)]!r}; "
        f"from primerl.rollout.processes import run_child; run_child({fd}, {os.getpid()})"
    )


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables of torchrun, for a child that is no rank."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
    }


def _environment(threads: int, folder: str) -> dict[str, str]:
    kept = without_torchrun(os.environ)
    budget = {f"{library}_NUM_THREADS": str(threads) for library in _THREADS}
    # Temporary files of whatever the child starts go where they can be found and removed.
    return kept | budget | {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": folder}


# ---- in the child ----


def run_child(fd: int, parent: int) -> None:
    """The child's whole life; called by the program that ``Child.start`` runs."""
    # The parent says when to stop. (Ignored outright, it would be so in subprocesses, too.)
    signal.signal(signal.SIGINT, lambda *_: None)
    os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(parent,), name="primerl-watch", daemon=True).start()
    finished: list[bool] = []
    # Registered first, so it comes last: what the environment started ends with this process.
    atexit.register(lambda: os.killpg(0, signal.SIGKILL) if finished else None)
    asyncio.run(_serve(socket.socket(fileno=fd), parent))
    finished.append(True)


def _watch(parent: int) -> None:
    """Die with the parent, even when the event loop is blocked."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    _end()


def _end() -> None:
    """End this process and all that it started, without its parent's help."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


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

    channel = await Channel.over(sock, {"make": make})
    try:
        await channel.serve()
    finally:
        await asyncio.sleep(ORPHAN_S)
        if os.getppid() != parent:  # it died: nobody will hear what rollouts say to that
            _end()
        if served is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S / 2):
                    await served.aclose()
