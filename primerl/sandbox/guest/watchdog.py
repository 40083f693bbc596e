"""A watchdog that measures the memory of a whole sandbox, where no cgroup counts it.

It counts the resident memory of all processes, with shared pages divided among the processes that
share them, and the content of the writable filesystem, including deleted and shared-memory files.
Memory that it can't count is refused or bounded: memfd_create, System V IPC and anonymous shared
mappings are refused, and pipes and sockets are bounded by the limit on open files.
"""

import os
from collections.abc import Callable
from typing import Any

from primerl.sandbox.guest.processes import Processes

_PAGE = os.sysconf("SC_PAGE_SIZE")
# About the rate at which two cores can touch new pages. The next check comes before they could
# have filled the remaining memory.
_FILL_BYTES_PER_S = 4 << 30
_SHORTEST_S, _LONGEST_S = 0.004, 0.1


class Watchdog:
    """Checks a sandbox's memory, disk and open files; more often the closer to a limit."""

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
        """Return the exceeded limit, ``memory``, ``files`` or ``disk``, or None.

        Also sets ``interval_s``, the time until the next check.
        """
        processes = self._processes.listed()
        open_files = sum(_open_files(process) for process in processes)
        if open_files > self._limits["all_open_files"]:
            return "files"
        written, files = self._written()
        if written > self._limits["disk_bytes"] or files > self._limits["files"]:
            return "disk"
        used = written + sum(map(_resident_bytes, processes))
        if used > self._memory_bytes:  # maybe only because shared pages count several times
            used = written + sum(map(_proportional_bytes, processes))
        if used > self._memory_bytes:
            return "memory"
        left = min(self._memory_bytes - used, self._limits["disk_bytes"] - written)
        left_s = left / _FILL_BYTES_PER_S
        self.interval_s = min(max(left_s, _SHORTEST_S), _LONGEST_S)
        return None


def filesystem_use() -> tuple[int, int]:
    """Return the bytes and files in use in a sandbox's own filesystem, including deleted files."""
    status = os.statvfs("/tmp")
    size = (status.f_blocks - status.f_bfree) * status.f_frsize
    return size, status.f_files - status.f_ffree


def _resident_bytes(process: str) -> int:
    """Return a process's anonymous resident memory; file pages are counted in the filesystem."""
    pages = _private_pages(f"/proc/{process}/statm")
    if pages == 0:  # its main thread has ended; other threads may still run
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
    except (OSError, ValueError):  # the process has ended
        return 0
    return int(resident) - int(shared)


def _proportional_bytes(process: str) -> int:
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
            for line in file:
                if line.startswith("Pss_Anon:"):
                    return int(line.split()[1]) << 10
    except OSError:  # the process has ended or became unreadable
        pass
    return _resident_bytes(process)


def _open_files(process: str) -> int:
    count = _entries(f"/proc/{process}/fd")
    if count == 0:  # its main thread has ended; other threads may still run
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:
            return 0
        count = max((_entries(f"/proc/{process}/task/{name}/fd") for name in threads), default=0)
    return count


def _entries(folder: str) -> int:
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))  # st_size counts it since 6.2
    except OSError:  # the process has ended
        return 0
