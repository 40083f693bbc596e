"""A watchdog that measures the memory of a whole sandbox, where no cgroup counts it.

It counts the resident memory and page tables of all processes, with shared pages divided among the
processes that share them, the content of the writable filesystem, including deleted and
shared-memory files, the buffers that the kernel holds for sockets, and its records of mappings.
Memory that it can't count is refused or bounded: memfd_create, System V IPC and anonymous shared
mappings are refused; pipes are bounded by the limit on open files, and locks by a limit of their
own.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from primerl.sandbox.guest.isolation import kernel
from primerl.sandbox.guest.processes import Processes

# About the rate at which two cores can touch new pages. The next check comes before they could
# have filled the remaining memory.
_FILL_BYTES_PER_S = 4 << 30
_SHORTEST_S, _LONGEST_S = 0.004, 0.1
_SOCKET_BYTES = 213_000  # the default size of a socket's buffer
_FREE_SOCKETS = 32
_MAPPING_BYTES = 256  # of the kernel's record of one mapping
_MOST_MAPPINGS = 1024  # times the number of processes that are allowed
_MOST_LOCKS = 8192
_MOST_DESCRIPTIONS = 8  # open files of /proc/PID/fdinfo: the kernel keeps the whole text of each
_COUNTS_EVERY_S = 0.1
_COUNTS_SELDOM = 20  # counting mappings and locks takes a twentieth of the time, if that is
_COUNTS_AT_LEAST_S = 0.5  # often enough
_CHUNK = 1 << 16


class Watchdog:
    """Checks a sandbox's memory, disk and open files; more often the closer to a limit.

    ``sockets`` returns how many sockets the given processes have, as far as they matter.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        limits: dict[str, Any],
        processes: Processes,
        written: Callable[[], tuple[int, int]],
        sockets: Callable[[list[str]], int],
    ) -> None:
        self._memory_bytes = memory_bytes
        self._limits = limits
        self._processes = processes
        self._written = written
        self._sockets = sockets
        self._mappings = 0
        self._counts_at = time.monotonic() + _COUNTS_EVERY_S
        # A session's background processes may have filled it up to its limits. Other sandboxes are
        # new: most of their runs end before the first check.
        unused = min(memory_bytes, limits["disk_bytes"])
        self.interval_s = _SHORTEST_S if limits["session"] else _interval_s(unused)

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
        if time.monotonic() >= self._counts_at and (limit := self._counted(processes)):
            return limit
        held = written + self._mappings * _MAPPING_BYTES
        held += max(0, self._sockets(processes) - _FREE_SOCKETS) * _SOCKET_BYTES
        used = held + sum(map(_resident_bytes, processes))
        if used > self._memory_bytes:  # maybe only because shared pages count several times
            used = held + sum(map(_proportional_bytes, _of_their_own(processes)))
        if used > self._memory_bytes:
            return "memory"
        left = min(self._memory_bytes - used, self._limits["disk_bytes"] - written)
        self.interval_s = _interval_s(left)
        return None

    def _counted(self, processes: list[str]) -> str | None:
        """Count mappings and locks, which takes longer; return the exceeded limit, or None."""
        started = time.monotonic()
        most = _MOST_MAPPINGS * self._limits["processes"]
        self._mappings, hidden = 0, False
        for process in processes:
            if self._mappings > most:
                break
            count = _mappings(process, most=most)
            if count is not None:
                self._mappings += count
            # A new process is unreadable until it is confined, which takes long on a busy machine.
            # Others execute a program that can't be read: their memory can't be measured either.
            elif _is_confined(process):
                hidden = True
        descriptions = sum(map(_open_descriptions, processes))
        locks = _locks(processes)
        took_s = time.monotonic() - started
        pause_s = min(max(_COUNTS_EVERY_S, _COUNTS_SELDOM * took_s), _COUNTS_AT_LEAST_S)
        self._counts_at = time.monotonic() + pause_s
        if self._mappings > most or hidden:
            return "memory"
        return "files" if locks > _MOST_LOCKS or descriptions > _MOST_DESCRIPTIONS else None


def _interval_s(left_bytes: int) -> float:
    return min(max(left_bytes / _FILL_BYTES_PER_S, _SHORTEST_S), _LONGEST_S)


def filesystem_use() -> tuple[int, int]:
    """Return the bytes and files in use in a sandbox's own filesystem, including deleted files."""
    status = os.statvfs("/tmp")
    size = (status.f_blocks - status.f_bfree) * status.f_frsize
    return size, status.f_files - status.f_ffree


def sockets_of_namespace(processes: list[str]) -> int:
    """Return the number of all sockets in this network namespace, also of those in flight."""
    del processes
    try:
        with open("/proc/net/sockstat", "rb", buffering=0) as file:
            return int(file.read(_CHUNK).split(None, 3)[2])  # "sockets: used 12"
    except (OSError, IndexError, ValueError):  # a kernel without this file
        return 0


def sockets_of_processes(processes: list[str]) -> int:
    """Return the number of sockets that the processes have open, if they have many files open."""
    if sum(map(_open_files, processes)) <= _FREE_SOCKETS:
        return 0
    return sum(map(_open_sockets, processes))


def _open_sockets(process: str) -> int:
    return sum(name.startswith("socket:") for name in _names_of_open_files(process))


def _names_of_open_files(process: str) -> list[str]:
    """Return the names of a process's open files, such as ``socket:[123]``."""
    names = _links(f"/proc/{process}/fd")
    if not names:  # its main thread has ended; other threads may still run
        names = max((_links(f"{thread}/fd") for thread in _threads(process)), key=len, default=[])
    return names


def _open_descriptions(process: str) -> int:
    """Return how many descriptions of open files, which can be megabytes long, it has open."""
    return sum("/fdinfo/" in name for name in _names_of_open_files(process))


def _links(folder: str) -> list[str]:
    found = []
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed in the meantime
                found.append(os.readlink(f"{folder}/{name}"))
    except OSError:  # the process has ended
        pass
    return found


def _of_their_own(processes: list[str]) -> list[str]:
    """Leave out the processes that run in their parent's memory, as after ``vfork``."""
    return [process for process in processes if not _in_memory_of_parent(process, processes)]


def _in_memory_of_parent(process: str, processes: list[str]) -> bool:
    # A main thread that has ended has no memory, as every other such thread: they would seem equal.
    has_memory = _anonymous(f"/proc/{process}/status") is not None
    return (
        has_memory
        and (parent := _parent(process)) in processes
        and kernel.same_memory(process, parent)
    )


def _parent(process: str) -> str:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[1].decode()
    except (OSError, IndexError):  # the process has ended
        return ""


def _resident_bytes(process: str) -> int:
    """Return a process's anonymous resident memory and page tables.

    File pages are counted in the filesystem.
    """
    size = _anonymous(f"/proc/{process}/status")
    if size is None:  # its main thread has ended; other threads may still run
        sizes = (_anonymous(f"{thread}/status") for thread in _threads(process))
        size = max((size for size in sizes if size is not None), default=0)
    return size


def _threads(process: str) -> list[str]:
    """Return the folders of a process's threads in ``/proc``."""
    try:
        return [f"/proc/{process}/task/{name}" for name in os.listdir(f"/proc/{process}/task")]
    except OSError:  # the process has ended
        return []


def _anonymous(path: str) -> int | None:
    """Return the bytes of anonymous memory and page tables by a ``status`` file.

    None means that the process or thread has no memory.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            status = file.read(_CHUNK)
    except OSError:  # the process has ended
        return None
    # A process can't forge a line: a line break in its name is escaped.
    sizes = [_kib(status, name) for name in (b"\nRssAnon:", b"\nVmPTE:")]
    return None if sizes[1] == 0 else sum(sizes) << 10


def _kib(status: bytes, name: bytes) -> int:
    at = status.find(name)
    return int(status[at + len(name) : status.index(b" kB", at)]) if at >= 0 else 0


def _proportional_bytes(process: str) -> int:
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
            for line in file:
                if line.startswith("Pss_Anon:"):
                    tables = _page_tables(process)
                    return (int(line.split()[1]) << 10) + tables
    except OSError:  # the process has ended or became unreadable
        pass
    return _resident_bytes(process)


def _page_tables(process: str) -> int:
    try:
        with open(f"/proc/{process}/status", "rb", buffering=0) as file:
            return _kib(file.read(_CHUNK), b"\nVmPTE:") << 10
    except OSError:  # the process has ended
        return 0


def _open_files(process: str) -> int:
    count = _entries(f"/proc/{process}/fd")
    if count == 0:  # its main thread has ended; other threads may still run
        count = max((_entries(f"{thread}/fd") for thread in _threads(process)), default=0)
    return count


def _entries(folder: str) -> int:
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))  # st_size counts it since 6.2
    except OSError:  # the process has ended
        return 0


def _is_confined(process: str) -> bool:
    """Check that a process has a seccomp filter, as all have that run untrusted code."""
    try:
        with open(f"/proc/{process}/status", "rb", buffering=0) as file:
            return b"\nSeccomp:\t2\n" in file.read(_CHUNK)
    except OSError:  # the process has ended
        return False


def _mappings(process: str, *, most: int) -> int | None:
    """Count a process's mappings, up to about ``most``; None if they may not be read."""
    count = _lines(f"/proc/{process}/maps", most=most)
    if count == 0:  # its main thread has ended; other threads may still run
        counts = [_lines(f"{thread}/maps", most=most) for thread in _threads(process)]
        return None if None in counts else max((n for n in counts if n is not None), default=0)
    return count


def _lines(path: str, *, most: int) -> int | None:
    """Count the lines of a file, up to about ``most``; None if the file may not be read."""
    count = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while count <= most and (chunk := file.read(_CHUNK)):
                count += chunk.count(b"\n")
    except PermissionError:
        return None
    except OSError:  # the process has ended
        return 0
    return count


def _locks(processes: list[str]) -> int:
    """Return how many locks of files the processes hold, up to about ``_MOST_LOCKS``."""
    count, rest = 0, b""
    wanted = {process.encode() for process in processes}
    try:
        with open("/proc/locks", "rb", buffering=0) as file:
            while count <= _MOST_LOCKS and (chunk := file.read(_CHUNK)):
                *rows, rest = (rest + chunk).split(b"\n")
                count += sum(_owner(row) in wanted for row in rows)
    except OSError:  # hidden
        return 0
    return count


def _owner(row: bytes) -> bytes:
    """Return the process id of a row like ``1: POSIX  ADVISORY  WRITE 123 00:1c:5 0 EOF``."""
    fields = row.replace(b"-> ", b"").split(None, 5)
    return fields[4] if len(fields) > 4 else b""
