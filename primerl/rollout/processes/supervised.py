"""Processes on this host that run ``child.run_child`` under a supervisor.

The supervisor ends the process with everything that it started. The process inherits one end of a
socket pair, so no address or shared memory can be left behind. Its temporary files are in a folder
that is removed with it.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

from primerl._common.processes import launch
from primerl._common.processes.launch import LaunchContext
from primerl._common.processes.supervisor import remove_folder

STOP_S = 10.0
POLL_S = 0.25
EXIT_CODE_S = 3.0  # for a supervisor to end what the process started and return its exit code
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")


class SupervisedProcess:
    """A process on this host that serves one end of a socket pair; a ``ChildProcess``.

    Args:
        threads: threads of numerical libraries in the process.
        context: what the process inherits; by default, this process's current context.
    """

    host = ""

    def __init__(self, *, threads: int = 1, context: LaunchContext | None = None) -> None:
        self._threads = threads
        self._context = context or LaunchContext.current()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    async def open(self) -> socket.socket:
        """Start the process; return a connected socket whose other end the process serves."""
        context = self._context
        ours, theirs = socket.socketpair()
        self._folder = launch.make_folder("primerl-", within=context.temporary_folder)
        with theirs:
            self._process = launch.start(
                [sys.executable, "-c", _program(theirs.fileno(), launch.search_path())],
                folder=self._folder,
                grace_s=0.0,  # closing the connection asks it to stop
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(context, self._threads, self._folder),
                cwd=context.folder if os.path.isdir(context.folder or "") else None,
            )
        return ours

    async def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._process is not None, "open() comes first"
        while self._process.poll() is None:
            await asyncio.sleep(POLL_S)

    async def cause(self) -> str:
        """Return how the process ended; end it if it has only closed its connection."""
        assert self._process is not None, "open() comes first"
        await self._wait_until_over(EXIT_CODE_S)
        code = self._process.poll()
        self.kill()
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was ended: its supervisor was killed by {signal.Signals(-code).name}"
        if code > 128:
            memory = " (out of memory?)" if code == 128 + signal.SIGKILL else ""
            return f"was killed by {_signal_name(code - 128)}{memory}"
        return f"exited with code {code}"

    async def close(self, grace_s: float) -> None:
        """End the process and everything that it started, by force after ``grace_s``."""
        if self._process is None:
            return
        await self._wait_until_over(grace_s)
        self.kill()
        if not await self._wait_until_over(STOP_S):
            self._process.kill()  # then the inner supervisor ends the rest
            await self._wait_until_over(STOP_S)
        remove_folder(self._folder)

    def kill(self) -> None:
        """Kill the process and everything that it started, without waiting."""
        if self._process is not None:
            self._process.terminate()

    def kill_and_wait(self) -> None:
        """Kill the process; wait, without an event loop, until everything has ended."""
        self.kill()
        if self._process is not None:
            launch.wait_until_over(self._process, self._folder, timeout_s=STOP_S)
            remove_folder(self._folder)

    async def _wait_until_over(self, timeout_s: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None or not launch.is_over(self._folder):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _program(fd: int, path: list[str]) -> str:
    return (
        f"import sys; sys.path[:] = {path!r}; "
        f"from primerl.rollout.processes.child import run_child; run_child({fd}, {os.getpid()})"
    )


def _environment(context: LaunchContext, threads: int, folder: str) -> dict[str, str]:
    budget = {f"{library}_NUM_THREADS": str(threads) for library in _THREADS}
    # TMPDIR also holds the temporary files of the child's subprocesses; all are removed with it.
    ours = {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": folder}
    return context.environment | budget | ours
