"""Memory of a whole sandbox, where no cgroup counts it.

What is counted: the resident memory of all processes, with shared pages divided among those that
share them, and what the writable filesystem holds, deleted and shared-memory files included. What
can't be counted is bounded or refused instead: memfd_create, System V IPC and unnamed shared
mappings are refused, and pipes and sockets are bounded by the number of open files.
"""

import os
from collections.abc import Callable
from typing import Any

from primerl.sandbox.engine.processes import Processes

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Two cores that touch new pages fill about this much in a second: the next look comes before
# they could have filled what is left.
_FILL_BYTES_PER_S = 4 << 30
_SHORTEST_S, _LONGEST_S = 0.004, 0.1


class Watchdog:
    """Looks at a sandbox's use of memory, more often the closer it is to its limit."""

    def __init__(
        self,
        *,
        memory_bytes: int,
        limits: dict[str, Any],
        processes: Processes,
        written: Callable[[], tuple[int, int]],
    ) -> None:
        self._memory_bytes = memory_bytes
        self._limits = limits
        self._processes = processes
        self._written = written
        self.interval_s = _SHORTEST_S

    def exceeded(self) -> str | None:
        """The limit that is exceeded now, ``memory``, ``files`` or ``disk``, if any."""
        processes = self._processes.listed()
        open_files = sum(_open_files(process) for process in processes)
        if open_files > self._limits["all_open_files"]:
            return "files"
        written, files = self._written()
        if written > self._limits["disk_bytes"] or files > self._limits["files"]:
            return "disk"
        used = written + sum(map(_resident_bytes, processes))
        if used > self._memory_bytes:  # shared pages were counted more than once
            used = written + sum(map(_proportional_bytes, processes))
        if used > self._memory_bytes:
            return "memory"
        left = min(self._memory_bytes - used, self._limits["disk_bytes"] - written)
        left_s = left / _FILL_BYTES_PER_S
        self.interval_s = min(max(left_s, _SHORTEST_S), _LONGEST_S)
        return None


def filesystem_use() -> tuple[int, int]:
    """Bytes and files that a sandbox's own filesystem holds, deleted ones included."""
    status = os.statvfs("/tmp")
    size = (status.f_blocks - status.f_bfree) * status.f_frsize
    return size, status.f_files - status.f_ffree


def _resident_bytes(process: str) -> int:
    """Memory of its own: not that of files, which is counted where they lie."""
    pages = _private_pages(f"/proc/{process}/statm")
    if pages == 0:  # its first thread has ended, and the others may live on
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:
            return 0
        pages = max(
            (_private_pages(f"/proc/{process}/task/{name}/statm") for name in threads), default=0
        )
    return pages * _PAGE


def _private_pages(path: str) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            _, resident, shared = file.read().split()[:3]
    except (OSError, ValueError):  # it has ended
        return 0
    return int(resident) - int(shared)


def _proportional_bytes(process: str) -> int:
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
            for line in file:
                if line.startswith("Pss_Anon:"):
                    return int(line.split()[1]) << 10
    except OSError:  # it has ended, or made itself unreadable
        pass
    return _resident_bytes(process)


def _open_files(process: str) -> int:
    count = _entries(f"/proc/{process}/fd")
    if count == 0:  # as above
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:
            return 0
        count = max((_entries(f"/proc/{process}/task/{name}/fd") for name in threads), default=0)
    return count


def _entries(folder: str) -> int:
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))  # the size since Linux 6.2
    except OSError:  # it has ended
        return 0
