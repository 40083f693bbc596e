"""A sandbox that stays: commands, files, and a Python that keeps its state, for hundreds of
turns.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from primerl.sandbox.errors import SandboxError
from primerl.sandbox.results import Result, Root
from primerl.sandbox.tiers.interface import Order, Sandbox, asked

if TYPE_CHECKING:
    from primerl.sandbox.pool import SandboxPool

_HOME = "/sandbox"
_MOST_SNAPSHOT_BYTES = 1 << 30


@attrs.frozen(kw_only=True, eq=False)
class SandboxSnapshot:
    """Files of a session, to go on from in others. What it holds is untrusted, and stays packed."""

    root: Root | None
    archive: bytes = attrs.field(repr=False)


class SandboxSession:
    """One sandbox, made by ``SandboxPool.session``. Its calls are carried out one at a time.

    A command's background processes go on until the session ends; a command that exceeds its time
    or memory ends all processes of the session, one that exceeds its output gets SIGPIPE. Files
    stay in any case.
    """

    def __init__(self, pool: "SandboxPool", sandbox: Sandbox, *, root: Root | None) -> None:
        self._pool = pool
        self._sandbox = sandbox
        self._root = root
        self._one_at_a_time = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the sandbox can still be used."""
        return self._sandbox.alive

    async def run(
        self,
        code: str | Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str = ".",
        timeout_s: float = 60.0,
        memory_bytes: int | None = None,
        output_bytes: int | None = None,
    ) -> Result:
        """Run Python code (a string) in a new process, or a command (a list), in ``folder``.

        Relative paths are below the sandbox's home, which is ``/sandbox`` in most tiers.
        """
        order = self._pool.order(
            *asked(code),
            stdin=stdin,
            files=files,
            environment=environment,
            folder=folder,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
        )
        return await self._execute(order)

    async def python(self, code: str, *, timeout_s: float = 60.0) -> Result:
        """Run code in the session's own Python, which remembers what earlier turns defined.

        The value of a last expression is printed. A turn that exceeds its time or memory ends that
        Python; the next turn starts anew. Standard input is empty.

        Raises:
            SandboxError: the sandbox has ended, or its tier keeps no Python.
        """
        self._pool.check_able("turns", "Python that keeps its state; use `run`")
        return await self._do("turn", {"code": code}, timeout_s=timeout_s, output_bytes=None)

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """The content of a file.

        Raises:
            OSError: it can't be read, isn't a regular file, or has more than ``max_bytes``.
        """
        done = await self._do("read", {"path": path}, output_bytes=max_bytes)
        if "output" in done.limits_hit:
            raise OSError(f"{path} in the sandbox has more than {max_bytes} bytes")
        return self._checked(done, path)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file; folders above it are made.

        Raises:
            OSError: it can't be written.
        """
        self._checked(await self._do("write", {"path": path}, stdin=content), path)

    async def snapshot(self, *paths: str, timeout_s: float = 60.0) -> SandboxSnapshot:
        """A copy of the files under ``paths``: ``/sandbox`` and ``/tmp`` by default.

        Raises:
            SandboxError: the sandbox has ended, or its tier has no snapshots.
            OSError: they can't be packed, or have more than 1 GiB.
        """
        self._pool.check_able("snapshots", "snapshots")
        names = list(paths) or [_HOME, "/tmp"]
        done = await self._do(
            "pack", {"paths": names}, output_bytes=_MOST_SNAPSHOT_BYTES, timeout_s=timeout_s
        )
        return SandboxSnapshot(root=self._root, archive=self._checked(done, ", ".join(names)))

    async def restore(self, snapshot: SandboxSnapshot, *, timeout_s: float = 60.0) -> None:
        """Unpack a snapshot over the session's files.

        Raises:
            OSError: it can't be unpacked.
        """
        done = await self._do("unpack", {}, stdin=snapshot.archive, timeout_s=timeout_s)
        self._checked(done, "snapshot")

    async def execute_at_once(self, order: Order) -> Result:
        """Carry out an order within ``SandboxPool.turn``: for two sessions that talk."""
        return await self._sandbox.execute(order)

    async def _do(
        self,
        kind: str,
        header: dict[str, Any],
        *,
        stdin: bytes = b"",
        output_bytes: int | None = 1 << 16,
        timeout_s: float = 60.0,
    ) -> Result:
        order = self._pool.order(
            kind, header, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes
        )
        return await self._execute(order)

    async def _execute(self, order: Order) -> Result:
        async with self._one_at_a_time:
            if not self._sandbox.alive:
                raise SandboxError("the session's sandbox has ended; its files are gone")
            async with self._pool.turn():
                return await self._sandbox.execute(attrs.evolve(order, keeps=True))

    @staticmethod
    def _checked(done: Result, what: str) -> bytes:
        if not done.ok:
            said = done.stderr.decode(errors="replace").strip()
            raise OSError(f"{what} in the sandbox: {said[-500:] or done.limits_hit or done.exit}")
        return done.stdout
