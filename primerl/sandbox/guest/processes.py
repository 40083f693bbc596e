"""Finding and killing the processes of a sandbox, from its init process."""

import contextlib
import os
import resource
import signal
import time

from primerl.sandbox.guest.isolation import kernel

_PAUSE_S = 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OwnNamespace:
    """The processes of a sandbox with its own pid namespace, in which this process is pid 1."""

    def listed(self) -> list[str]:
        """Return the pids of these processes, as strings."""
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def kill(self) -> None:
        """Kill all processes of the sandbox except init."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


class Descendants:
    """The processes of a sandbox without a pid namespace: this process's descendants.

    This process is a subreaper: an orphaned descendant becomes its child, so no descendant can
    escape.
    """

    def __init__(self) -> None:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._first = str(os.getpid())

    def listed(self) -> list[str]:
        """Return the pids of these processes, as strings."""
        return descendants(self._first)

    def kill(self) -> None:
        """Kill all processes of the sandbox except init.

        Before the first one is killed, their RLIMIT_NPROC is set to 0, so that none can fork and
        escape.
        """
        seen: set[str] = set()
        while new := set(self.listed()) - seen:
            for process in new:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    resource.prlimit(int(process), resource.RLIMIT_NPROC, (0, 0))
            seen |= new
        for process in self.listed():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


Processes = OwnNamespace | Descendants  # all processes of a sandbox except init


def children(process: str) -> list[str]:
    """Return the children of a process, of all its threads."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="utf-8") as file:
                found += file.read().split()
    return found


def descendants(process: str) -> list[str]:
    """Return all descendants of a process."""
    found: list[str] = []
    parents = [process]
    while parents:
        parents = [child for parent in parents for child in children(parent)]
        found += parents
    return found


def usage(process: str) -> tuple[float, int]:
    """Return the CPU seconds of a process with its descendants, and the largest one's peak memory.

    Memory is in bytes. As in ``wait4``, a child that has ended counts for the process that waited
    for it.
    """
    found = [_usage(one) for one in (process, *descendants(process))]
    return sum(cpu_s for cpu_s, _ in found), max(rss_bytes for _, rss_bytes in found)


def _usage(process: str) -> tuple[float, int]:
    cpu_s, rss_bytes = 0.0, 0
    with contextlib.suppress(OSError):  # the process has ended
        with open(f"/proc/{process}/stat", "rb") as file:  # bytes: a process name need not be UTF-8
            fields = file.read().rpartition(b")")[2].split()  # from the third field on
        cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime, stime, cutime, cstime
        with open(f"/proc/{process}/status", "rb") as file:
            for row in file:
                if row.startswith(b"VmHWM:"):
                    rss_bytes = int(row.split()[1]) << 10
    return cpu_s, rss_bytes


def end(processes: Processes, *, within_s: float) -> bool:
    """Kill and reap all processes; return whether none was left within ``within_s``."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        processes.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(_PAUSE_S)
    return False
