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
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import cloudpickle

from primerl.rollout.channel import Channel, ChannelClosed, Handlers

START_S = 120.0
STOP_S = 10.0
PARENT_POLL_S = 0.5
# A child is no rank of the trainer's process group.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")


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
    """

    def __init__(self, name: str, served: type, *, threads: int = 1) -> None:
        self.name = name
        self._served = served
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._serving: asyncio.Task[None] | None = None

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
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(self._threads),
                start_new_session=True,
            )
        self._channel = await Channel.over(ours, handlers)
        self._serving = asyncio.create_task(self._channel.serve())
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
            RuntimeError: the process died. What the method raises is raised.
        """
        assert self._channel is not None, "start() comes first"
        try:
            return await self._channel.call(name, *args)
        except ChannelClosed:
            raise RuntimeError(await self._obituary()) from None

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
        if self._channel is not None:
            self._channel.close()
        await self._gone(grace_s)
        self.kill()
        await self._gone(STOP_S)
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)

    def kill(self) -> None:
        """Kill the process and whatever it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

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
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        else:
            how = f"exited with code {code}"
        return f"{self.name} (process {self._process.pid}) {how}"


def pickle_arguments(**arguments: Any) -> dict[str, bytes]:
    """Each argument as bytes that a child can load, lambdas and local functions included.

    Raises:
        ValueError: an argument can't cross into another process; the message names it.
    """
    crossed = {}
    for name, value in arguments.items():
        try:
            crossed[name] = _dumps(value)
        except Exception as error:  # whatever a stranger's __reduce__ raises
            raise ValueError(
                f"the argument {name!r} ({type(value).__name__}) can't cross into the worker's "
                f"process: {error}; build it inside the function that uses it, or pass "
                "isolation='thread'"
            ) from error
    return crossed


def _dumps(value: Any) -> bytes:
    """Pickle by value what a fresh interpreter could not import: a notebook's or a test's code."""
    local: set[Any] = set()
    importable: dict[Any, bool] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | FunctionType):
                module = sys.modules.get(obj.__module__ or "")
                if module is not None and module not in importable:
                    importable[module] = _importable(module)
                if module is not None and module not in local and not importable[module]:
                    cloudpickle.register_pickle_by_value(module)
                    local.add(module)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file, protocol=5).dump(value)
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _importable(module: Any) -> bool:
    """Whether a fresh interpreter with this ``sys.path`` finds the same module by its name."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return True  # built in; cloudpickle itself knows __main__
    path: Any = None
    spec = None
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        found = (
            finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec")
        )
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and os.path.realpath(spec.origin or "") == os.path.realpath(file)


def _program(fd: int) -> str:
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from primerl.rollout.processes import run_child; run_child({fd}, {os.getpid()})"
    )


def _environment(threads: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
    }
    budget = {f"{library}_NUM_THREADS": str(threads) for library in _THREADS}
    return kept | budget | {"TOKENIZERS_PARALLELISM": "false"}


# ---- in the child ----


def run_child(fd: int, parent: int) -> None:
    """The child's whole life; called by the program that ``Child.start`` runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    threading.Thread(target=_watch, args=(parent,), name="primerl-watch", daemon=True).start()
    finished: list[bool] = []
    # Registered first, so it comes last: what the environment started ends with this process.
    atexit.register(lambda: os.killpg(0, signal.SIGKILL) if finished else None)
    asyncio.run(_serve(socket.socket(fileno=fd)))
    finished.append(True)


def _watch(parent: int) -> None:
    """Die with the parent, even when the event loop is blocked."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


async def _serve(sock: socket.socket) -> None:
    served: Any = None

    async def make(module: str, name: str, arguments: dict[str, bytes]) -> None:
        nonlocal served
        kind = getattr(importlib.import_module(module), name)
        served = kind(channel, **_load(arguments))
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
        if served is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S / 2):
                    await served.aclose()


def _load(arguments: dict[str, bytes]) -> dict[str, Any]:
    loaded = {}
    for name, content in arguments.items():
        try:
            loaded[name] = pickle.loads(content)
        except Exception as error:  # a module that is missing here, say
            raise ValueError(
                f"the argument {name!r} can't be rebuilt in the worker's process: "
                f"{type(error).__name__}: {error}"
            ) from error
    return loaded
