"""SandboxLimits, results and root filesystems: the values that a pool takes and returns."""

from typing import Any

import attrs

_FEWEST_OPEN_FILES = 64
LIMITS = ("timeout", "memory", "output", "files", "disk", "died", "protocol")


@attrs.frozen(kw_only=True)
class Result:
    """The outcome of one run. Untrusted code controls its content: it is data, never a verdict.

    ``exit`` is the exit code, or minus the number of the signal that ended the process, or None if
    a limit ended it. ``limits_hit`` names the limits that were exceeded:

    - ``timeout`` and ``memory``;
    - ``output``: stdout or stderr was truncated;
    - ``files``: too many open files;
    - ``disk``: too many bytes or files were written, in a tier whose filesystem does not refuse
      the write itself;
    - ``died``: the sandbox ended by itself;
    - ``protocol``: the sandbox broke the protocol and was killed.

    ``cpu_s`` is the CPU time of the process and of the children that it waited for. If a limit
    ended the run, or if it was a turn of a REPL, ``cpu_s`` is the CPU time that all its processes
    had used by then. ``max_rss_bytes`` is the peak memory of the largest single process. Both are
    0 in tiers that don't measure them: containers, gVisor and hosted sandboxes.
    """

    stdout: bytes
    stderr: bytes
    exit: int | None
    limits_hit: tuple[str, ...] = ()
    wall_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the process ended by itself with exit code 0, within all limits."""
        return self.exit == 0 and not self.limits_hit


@attrs.frozen(kw_only=True)
class Isolation:
    """A human-readable description of a tier's isolation: what it stops and what it does not."""

    tier: str
    shared_kernel: bool
    memory: str
    user: str
    layers: tuple[str, ...]
    stops: tuple[str, ...]
    does_not_stop: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"tier {self.tier}, {'shared' if self.shared_kernel else 'own'} kernel, {self.user}",
            f"layers: {', '.join(self.layers)}",
            f"memory: {self.memory}",
            f"stops: {'; '.join(self.stops)}",
            f"does not stop: {'; '.join(self.does_not_stop)}",
        ]
        return "\n".join(lines)


@attrs.frozen(kw_only=True)
class SandboxLimits:
    """Resource limits of each sandbox of a pool.

    Attributes:
        memory_bytes: memory of all processes and files of the sandbox together.
        address_space_bytes: address space of each process. None means ``memory_bytes``; runtimes
            that reserve a large address space, such as Node, need more.
        disk_bytes: bytes in the sandbox's writable folders.
        files: number of files in the sandbox's writable folders.
        processes: number of processes and threads.
        open_files: open files of each process.
        all_open_files: open files of all processes together.
        output_bytes: bytes of stdout of one run; the same limit applies to stderr.
    """

    memory_bytes: int = 512 << 20
    address_space_bytes: int | None = None
    disk_bytes: int = 128 << 20
    files: int = 20_000
    processes: int = 64
    open_files: int = 256
    all_open_files: int = 1024
    output_bytes: int = 1 << 20

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(SandboxLimits):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name} of SandboxLimits is {value}; it must be positive")
        if self.open_files < _FEWEST_OPEN_FILES:
            raise ValueError(
                f"open_files of SandboxLimits is {self.open_files}; "
                f"at least {_FEWEST_OPEN_FILES} are needed to start the code"
            )


@attrs.frozen(kw_only=True)
class Root:
    """A prepared root filesystem for sessions.

    ``copy_on_write`` is ``overlay`` if the kernel lets the pool's user mount an overlayfs: sessions
    then share all files that they don't change. Otherwise it is ``copy``: each session copies all
    files, which takes time and memory and counts toward its ``disk_bytes``.
    """

    name: str
    copy_on_write: str

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which a tier creates a sandbox on this root."""
        return {"root": self.name, "overlay": self.copy_on_write == "overlay"}
