"""A program that runs a command, and ends its whole process tree with it or with the owner.

    python -I -S supervisor.py OWNER FOLDER GRACE_S COMMAND...

It is a separate program that uses only the standard library. The owner is the process that starts
it. Two supervisors run between the owner and the command, each in its own session:

    owner -> outer supervisor -> inner supervisor -> command -> whatever it starts

Both are subreapers: a process that loses its parent becomes their child, whatever session it has
moved to. So no process is left behind when any of them dies:

- The owner dies (kill -9 included), or sends SIGTERM: the command gets SIGTERM. After ``GRACE_S``
  it is killed, with all processes that it started. If the owner has died, ``FOLDER`` is removed.
- The command ends: the processes that it started are killed, and its exit code is passed on
  (128 + the signal's number if a signal killed it).
- A supervisor is killed: the other one ends the command and its processes in the same way.

Not covered are processes that others start on the command's behalf (``systemd-run``, ``docker``,
an existing ``tmux`` server) and processes of another user (``sudo``). If both supervisors are
killed at once, only the command itself is killed. Outside Linux, only the command's process group
is ended.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import stat
import sys
import time
from collections.abc import Callable

POLL_S = 0.2
SWEEP_S = 1.0  # time for descendants of a dead command to end and release shared memory
OUTER_GRACE_S = 5.0  # for the inner supervisor, in addition to the command's
MARKER = ".primerl-folder"
FAILED = 127  # the exit code where the command could not be run
_WAKING = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_MOST_ROUNDS = 100
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(owner: int, folder: str, grace_s: float, command: list[str]) -> int:
    """Run both supervisors until all processes have ended; return the command's exit code."""
    for number in _WAKING:  # an inherited, ignored SIGCHLD would hide exit codes
        signal.signal(number, signal.SIG_DFL)
    # Blocked signals are received one at a time by sigwait, so that none interrupts other code.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    # Both supervisors hold the lock until they end. The command does not: exec closes it.
    lock = os.open(os.path.join(folder, MARKER), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    outer = os.getpid()

    def inner() -> int:
        parent = os.getpid()
        run = functools.partial(_execute, command, parent)
        code = supervise(outer, run, lock, grace_s=grace_s, orphan_grace_s=0.0)
        if not alive(owner):
            remove_folder(folder)
        return code

    patience_s = grace_s + OUTER_GRACE_S
    code = supervise(owner, inner, lock, grace_s=patience_s, orphan_grace_s=patience_s)
    if not alive(owner):
        remove_folder(folder)
    return code


def supervise(
    parent: int, run: Callable[[], int], lock: int, *, grace_s: float, orphan_grace_s: float
) -> int:
    """Call ``run`` in a child process, and return its exit code.

    The child is ended when this process gets SIGTERM, SIGINT or SIGHUP, or when its ``parent``
    dies. It then gets SIGTERM, and after ``grace_s`` (``orphan_grace_s`` if ``parent`` has died)
    SIGKILL; with 0 it is killed at once. The file descriptor ``lock`` is kept open.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(run)
    _close_inherited(lock)
    patience_s, kill_at = grace_s, float("inf")
    while child not in (ended := _ended()):
        asked, orphaned = _signalled(), os.getppid() != parent
        if (asked or orphaned) and kill_at == float("inf"):
            patience_s = orphan_grace_s if orphaned else grace_s
            kill_at = time.monotonic() + patience_s
            if patience_s > 0:
                os.kill(child, signal.SIGTERM)
        if time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
    _sweep(child, min(patience_s, SWEEP_S))
    code = ended[child]
    return code if code >= 0 else 128 - code


def _start(run: Callable[[], int]) -> int:
    """Fork a child that calls ``run`` in a new session; return its process id."""
    pid = os.fork()  # safe: this process has one thread
    if pid:
        return pid
    code = FAILED
    try:
        os.setsid()  # a command that signals its own process group must not hit its supervisor
        code = run()
    except BaseException:  # the forked child must not run the rest of the parent's program
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _execute(command: list[str], parent: int) -> int:
    """Replace this process by the command, which the kernel kills when ``parent`` dies."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before the call of prctl
        return FAILED
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
    os.execvp(command[0], command)


def _close_inherited(lock: int) -> None:
    """Close inherited file descriptors: a pipe reaches EOF only once all copies are closed."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != lock:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _signalled() -> bool:
    """Wait for a signal, at most ``POLL_S``; return whether it asks this process to end."""
    if hasattr(signal, "sigtimedwait"):
        taken = signal.sigtimedwait(_WAKING, POLL_S)
        return taken is not None and taken.si_signo != signal.SIGCHLD
    time.sleep(POLL_S / 4)
    pending = signal.sigpending() & _WAKING
    return bool(pending) and signal.sigwait(pending) != signal.SIGCHLD


def _ended() -> dict[int, int]:
    """Return the exit codes of children that ended since the last call, by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


# ---- the process tree ----


def _sweep(child: int, patience_s: float) -> None:
    """Kill the remaining descendants of the child, in any session."""
    if not os.path.isdir("/proc/self"):
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        return
    if not _all_ended(patience_s):
        # Spared: multiprocessing's resource tracker frees shared memory after the others ended.
        _kill(lambda: {pid for pid in descendants(os.getpid()) if not _tracks_resources(pid)})
    if not _all_ended(SWEEP_S):
        _kill(lambda: descendants(os.getpid()))
        _all_ended(SWEEP_S)


def _all_ended(patience_s: float) -> bool:
    """Wait until all descendants have ended, at most ``patience_s``; return whether they have."""
    deadline = time.monotonic() + patience_s
    _ended()
    while left := bool(descendants(os.getpid())):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S / 20)
        _ended()
    return not left


def _kill(find: Callable[[], set[int]]) -> None:
    """Kill all processes that ``find`` returns; stop them first, so that none can fork."""
    stopped: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        new = find() - stopped
        _signal(new, signal.SIGSTOP)
        stopped |= new
        if not new:
            break
    _signal(stopped, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(root: int) -> set[int]:
    """Return the process ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        found = _state_and_parent(int(name))
        if found is not None:
            children.setdefault(found[1], []).append(int(name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return set(tree[1:])


def alive(pid: int) -> bool:
    """Check that a process exists and has not ended."""
    if os.path.isdir("/proc/self"):
        found = _state_and_parent(pid)
        return found is not None and found[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stopped(pid: int) -> bool:
    """Check whether a process is stopped by a signal or a debugger; False where unknown."""
    found = _state_and_parent(pid)
    return found is not None and found[0] in "Tt"


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name is in parentheses and may contain any character.
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):  # the process ended in the meantime
        return None
    return state, int(parent)


def _tracks_resources(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---- folders ----


def remove_folder(folder: str) -> None:
    """Remove a folder that ``launch.make_folder`` created; do nothing to any other folder."""
    import shutil  # here, because it takes as long to import as all other modules together

    try:
        known = os.lstat(folder)
        # These flags prevent following a link and blocking on a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        marker = os.open(os.path.join(folder, MARKER), flags)
    except OSError:
        return
    try:
        content = os.read(marker, 1 << 16)
    except OSError:
        return
    finally:
        os.close(marker)
    owned = stat.S_ISDIR(known.st_mode) and known.st_uid == os.getuid()
    if owned and content == os.fsencode(folder):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
