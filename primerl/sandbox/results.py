"""The values that cross between a caller and its sandboxes."""

from typing import Any

import attrs

_FEWEST_OPEN_FILES = 64
LIMITS = ("timeout", "memory", "output", "files", "disk", "died", "protocol")


@attrs.frozen(kw_only=True)
class Result:
    """How one run ended. Everything in it comes from untrusted code: it is data, never a verdict.

    ``exit`` is the exit code, negative for the number of the signal that ended the process, or
    None if a limit ended it. ``limits_hit`` has ``timeout``, ``memory``, ``output`` (stdout or
    stderr was cut), ``files`` (too many open ones), ``disk`` (too much or too many written,
    where no filesystem says so at once), ``died`` (the sandbox ended by itself) or
    ``protocol`` (it broke the protocol, and was ended).

    ``cpu_s`` is what the process and the children that it waited for used; of a run that was ended,
    and of a turn of a REPL, what all its processes had used by then. ``max_rss_bytes`` is the most
    that one of them held. Both are 0 in tiers that don't say: containers, gVisor and hosted ones.
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
        """Whether it ended by itself with exit code 0."""
        return self.exit == 0 and not self.limits_hit


@attrs.frozen(kw_only=True)
class Isolation:
    """What keeps code inside, for logs and for people: what it stops, and what it doesn't."""

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
class Limits:
    """Limits of each sandbox of a pool.

    ``memory_bytes`` is for all its processes and files together, ``address_space_bytes`` for the
    address space of each process (None: as ``memory_bytes``; runtimes that reserve much of it, such
    as Node's, need more). ``disk_bytes`` and ``files`` limit its writable folders, ``processes``
    its processes and threads, ``open_files`` those of each process and ``all_open_files`` those of
    all, ``output_bytes`` stdout and stderr of one run each.
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
        for field in attrs.fields(Limits):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name} is {value}; it must be positive")
        if self.open_files < _FEWEST_OPEN_FILES:
            raise ValueError(
                f"open_files is {self.open_files}; {_FEWEST_OPEN_FILES} are needed to start code"
            )


@attrs.frozen(kw_only=True)
class Root:
    """A prepared root filesystem.

    ``copy_on_write`` is ``overlay`` where the kernel lets the pool's user mount one: sessions share
    all files that they don't change. Else it is ``copy``: each session copies all files, which
    takes time, memory and its ``disk_bytes``.
    """

    name: str
    copy_on_write: str

    @property
    def settings(self) -> dict[str, Any]:
        """What a sandbox with this root is asked for."""
        return {"root": self.name, "overlay": self.copy_on_write == "overlay"}
