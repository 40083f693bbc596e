"""Runs a server as a child process, and takes its whole process tree along when anything ends.

A program of its own, of the standard library alone, for Linux: ``serve_vllm`` starts this file in
a session of its own, and it starts the server. Whoever dies, and however, nothing is left behind:

- the process that asked for the server dies (kill -9 included): the server is asked to stop, then
  killed;
- the server ends: what it started is killed, and its exit code is passed on (128 + the signal's
  number when a signal killed it);
- this process is killed: the kernel kills the server, and a guard, a second small process, kills
  the rest of the group.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

POLL_S = 0.2
GRACE_S = 10.0  # between SIGTERM and SIGKILL
SWEEP_S = 1.0  # what a dead server started may end by itself, and remove what it shared
_WAKING = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# It has no name that `pkill -f vllm` would find, as it has to clean up after one.
_GUARD = """
import os, signal, time
while os.getppid() == {supervisor}:
    time.sleep({poll_s})
os.killpg(0, signal.SIGKILL)
"""


def supervise(parent: int, command: list[str]) -> int:
    """Run ``command`` until it or the process ``parent`` ends; returns its exit code."""
    # Signals are taken one at a time by sigtimedwait, so that none interrupts anything.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the tree become our children
    program = _GUARD.format(supervisor=os.getpid(), poll_s=POLL_S)
    guard = _start([sys.executable, "-I", "-S", "-c", program])
    server = _start(command, dies_with_us=libc)
    kill_at = float("inf")
    while server not in (ended := _ended()):
        taken = signal.sigtimedwait(_WAKING, POLL_S)
        asked = taken is not None and taken.si_signo != signal.SIGCHLD
        if kill_at == float("inf") and (asked or os.getppid() != parent):
            os.kill(server, signal.SIGTERM)
            kill_at = time.monotonic() + GRACE_S
        elif time.monotonic() > kill_at:
            os.kill(server, signal.SIGKILL)
    _sweep(guard)
    code = ended[server]
    return code if code >= 0 else 128 - code


def _start(command: list[str], *, dies_with_us: ctypes.CDLL | None = None) -> int:
    """The process id of a child that runs ``command``."""
    supervisor = os.getpid()
    pid = os.fork()  # safe: this process has one thread
    if pid:
        return pid
    try:
        if dies_with_us is not None:
            dies_with_us.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
        if os.getppid() == supervisor:  # it may have died before that call
            os.execvp(command[0], command)
    finally:
        os._exit(127)


def _ended() -> dict[int, int]:
    """Exit codes of the children that ended since the last call, by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


def _sweep(guard: int) -> None:
    """Kill what the server left, wherever it moved its processes to, and the guard last."""
    if not _gone(guard):
        # A resource tracker of multiprocessing removes shared memory once all the others are gone.
        _kill({pid for pid in _descendants(guard) if not _tracks_resources(pid)})
    if not _gone(guard):
        _kill(_descendants(guard))
        _gone(guard)
    _kill({guard})
    with contextlib.suppress(ChildProcessError):
        os.waitpid(guard, 0)


def _gone(guard: int) -> bool:
    """Whether nothing but the guard is left within ``SWEEP_S``."""
    deadline = time.monotonic() + SWEEP_S
    while left := bool(_descendants(guard)):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S / 10)
        _ended()
    return not left


def _descendants(guard: int) -> set[int]:
    """Process ids of this process's children and of theirs, except the guard's."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            # The command's name stands in parentheses and may hold anything.
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += [child for child in children.get(pid, []) if child != guard]
    return set(found[1:])


def _tracks_resources(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:]))
