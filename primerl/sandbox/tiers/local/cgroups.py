"""Hard limits on memory and processes through cgroup v2, if a cgroup is delegated to the owner.

A cgroup is delegated if this process can create groups below it and enable the ``memory`` and
``pids`` controllers for them; ``cpu`` is enabled, too, if it can be. It may be the cgroup of this
process or its parent. systemd delegates with ``Delegate=yes``. The kernel then allows processes
only in leaf cgroups, so the owner must run in a child of the delegated cgroup.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

_CONTROLLERS = ("memory", "pids")
_SHARES = "cpu"  # gives each cgroup an equal share of the processors, however many processes it has
_OF_FIRST_PROCESS = 32 << 20  # memory of the sandbox's init process and its forks
_FIRST_PROCESSES = 2


class Cgroup:
    """The cgroup of one sandbox."""

    def __init__(self, path: Path, *, memory_bytes: int, processes: int) -> None:
        path.mkdir()
        self.path = path
        try:
            self.limit_memory(memory_bytes)
            _write(path / "pids.max", str(processes + _FIRST_PROCESSES))
            if (path / "memory.swap.max").exists():  # absent if there is no swap
                _write(path / "memory.swap.max", "0")
            # Opened here because the kernel checks the opener's permissions when the sandbox's
            # init process writes to it.
            self.entrance = os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            path.rmdir()
            raise
        self._kills = self._kill_count()

    def limit_memory(self, memory_bytes: int) -> None:
        """Set the memory limit of all processes and files of the sandbox together."""
        _write(self.path / "memory.max", str(memory_bytes + _OF_FIRST_PROCESS))

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process for its memory limit since the last call."""
        before, self._kills = self._kills, self._kill_count()
        return self._kills > before

    def close(self) -> None:
        """Kill all processes in the cgroup; it can be removed once they are gone."""
        if self.entrance >= 0:
            os.close(self.entrance)
            self.entrance = -1
            with contextlib.suppress(OSError):
                _write(self.path / "cgroup.kill", "1")

    def _kill_count(self) -> int:
        try:
            rows = (self.path / "memory.events").read_text().split("\n")
        except OSError:
            return 0
        counts = dict(row.split() for row in rows if row)
        return int(counts.get("oom_kill", 0))


class Cgroups:
    """The cgroups of a pool's sandboxes, below a cgroup that is delegated to this process."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._closed: list[Cgroup] = []

    def make(self, *, memory_bytes: int, processes: int) -> Cgroup:
        """Create a cgroup for one sandbox, with its limits.

        Raises:
            OSError: the kernel refuses.
        """
        self.remove_closed()
        path = self.parent / f"primerl-{secrets.token_hex(8)}"
        return Cgroup(path, memory_bytes=memory_bytes, processes=processes)

    def close(self, group: Cgroup) -> None:
        """Kill all processes in a cgroup, and remove it now or as soon as they are gone."""
        group.close()
        self._closed.append(group)
        self.remove_closed()

    def remove_closed(self) -> int:
        """Remove closed cgroups whose processes are gone; return how many closed ones remain."""
        left = []
        for group in self._closed:
            try:
                group.path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left.append(group)
        self._closed = left
        return len(left)


def delegated(
    *, groups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> tuple[Path | None, str]:
    """Find a cgroup that is delegated to this process; return it and "", or None and the reason."""
    root = _mounted_at(mounts)
    if root is None:
        return None, "cgroup v2 is not mounted"
    own = next(
        (
            row[3:]
            for row in groups.read_text(encoding="utf-8").split("\n")
            if row.startswith("0::")
        ),
        None,
    )
    if own is None:
        return None, "this process is not in a cgroup v2 group"
    group = root / own.lstrip("/")
    reasons = []
    for candidate in (group, group.parent):
        reason = _reason_against(candidate) if candidate.is_relative_to(root) else "above the mount"
        if not reason:
            return candidate, ""
        reasons.append(f"{candidate}: {reason}")
    return None, "; ".join(reasons)


def _reason_against(group: Path) -> str:
    try:
        offered = (group / "cgroup.controllers").read_text().split()
        if missing := _missing(offered):
            return f"it lacks the controllers {missing}"
        if not os.access(group, os.W_OK) or not os.access(group / "cgroup.procs", os.W_OK):
            return "this process may not write to it"
        enabled = (group / "cgroup.subtree_control").read_text().split()
        if _SHARES in offered and _SHARES not in enabled:
            with contextlib.suppress(OSError):  # as with real-time processes
                _write(group / "cgroup.subtree_control", f"+{_SHARES}")
        if _missing(enabled):
            _write(group / "cgroup.subtree_control", "+memory +pids")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _missing(names: Iterable[str]) -> str:
    return ", ".join(name for name in _CONTROLLERS if name not in names)


def _mounted_at(mounts: Path) -> Path | None:
    for row in mounts.read_text(encoding="utf-8").split("\n"):
        before, _, behind = row.partition(" - ")
        if behind.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
