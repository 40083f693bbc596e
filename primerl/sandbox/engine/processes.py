"""The processes of a sandbox, as its first process finds and ends them."""

import contextlib
import os
import resource
import signal
import time

from primerl.sandbox.engine.barriers import kernel

_PAUSE_S = 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OwnNamespace:
    """Those of a pid namespace, whose first process this is."""

    def listed(self) -> list[str]:
        """Their numbers, as ``/proc`` names them."""
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def kill(self) -> None:
        """Kill all processes."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


class Descendants:
    """Those that this process started, where there is no namespace.

    Whose parent ends becomes this process's child: nothing it starts can leave its family.
    """

    def __init__(self) -> None:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._first = str(os.getpid())

    def listed(self) -> list[str]:
        """Their numbers, as ``/proc`` names them."""
        return descendants(self._first)

    def kill(self) -> None:
        """Kill all processes.

        They may start none before any is killed, or new ones could escape.
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


Processes = OwnNamespace | Descendants  # all of a sandbox but the first


def children(process: str) -> list[str]:
    """The children of a process, started by any of its threads."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="utf-8") as file:
                found += file.read().split()
    return found


def descendants(process: str) -> list[str]:
    """The children of a process, theirs, and so on."""
    found: list[str] = []
    parents = [process]
    while parents:
        parents = [child for parent in parents for child in children(parent)]
        found += parents
    return found


def usage(process: str) -> tuple[float, int]:
    """CPU seconds of a process and its descendants, and the peak memory of the largest, in bytes.

    As ``wait4`` counts them: children that have ended belong to the process that waited for them.
    """
    found = [_usage(one) for one in (process, *descendants(process))]
    return sum(cpu_s for cpu_s, _ in found), max(rss_bytes for _, rss_bytes in found)


def _usage(process: str) -> tuple[float, int]:
    cpu_s, rss_bytes = 0.0, 0
    with contextlib.suppress(OSError):  # it has ended
        with open(f"/proc/{process}/stat", "rb") as file:  # its name may be any bytes
            fields = file.read().rpartition(b")")[2].split()  # from the third on
        cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S  # its own, and its children's
        with open(f"/proc/{process}/status", "rb") as file:
            for row in file:
                if row.startswith(b"VmHWM:"):
                    rss_bytes = int(row.split()[1]) << 10
    return cpu_s, rss_bytes


def end(processes: Processes, *, within_s: float) -> bool:
    """Kill and reap all; returns whether none is left in time."""
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
