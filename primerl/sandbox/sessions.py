"""Sessions: sandboxes that keep files and Python state over hundreds of commands."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from primerl.sandbox.errors import SandboxError
from primerl.sandbox.results import Result, Root
from primerl.sandbox.tiers.interface import Job, Sandbox, asked, attempted

if TYPE_CHECKING:
    from primerl.sandbox.pool import SandboxPool

_HOME = "/sandbox"
_HEADER_BYTES = 2048  # of one file in an archive


@attrs.frozen(kw_only=True, eq=False)
class SandboxSnapshot:
    """A copy of a session's files, from which other sessions can start.

    The archive is untrusted: it is only ever unpacked inside a sandbox.
    """

    root: Root | None
    image: str | None = None
    archive: bytes = attrs.field(repr=False)


class SandboxSession:
    """A sandbox for many commands, from ``SandboxPool.session``; its calls run one at a time.

    A command's background processes keep running until the session ends. If a command exceeds its
    time or memory limit, all processes of the session are killed; if it exceeds its output limit,
    it gets SIGPIPE. Files survive both.
    """

    def __init__(
        self,
        pool: "SandboxPool",
        sandbox: Sandbox,
        *,
        root: Root | None,
        image: str | None = None,
    ) -> None:
        self._pool = pool
        self._sandbox = sandbox
        self._root = root
        self._image = image
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

        Relative paths are resolved against the sandbox's home, ``/sandbox`` in most tiers.
        """
        job = self._pool.job(
            *asked(code),
            stdin=stdin,
            files=files,
            environment=environment,
            folder=folder,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
        )
        return await self._execute(job)

    async def python(self, code: str, *, timeout_s: float = 60.0) -> Result:
        """Run code in the session's persistent Python, which keeps what earlier turns defined.

        If the code ends with an expression, its value is printed. A turn that exceeds its time or
        memory limit ends this Python, and the next turn starts a new one. Standard input is empty.

        Raises:
            SandboxError: the sandbox has ended, or its tier has no persistent Python.
        """
        self._pool.check_able("turns", "Python that keeps its state: use `run` instead")
        return await self._do("turn", {"code": code}, timeout_s=timeout_s, output_bytes=None)

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: the file can't be read, isn't regular, or is larger than ``max_bytes``.
        """
        done = await self._do("read", {"path": path}, output_bytes=max_bytes)
        if "output" in done.limits_hit:
            raise OSError(
                f"{path} in the sandbox has more than {max_bytes} bytes; raise max_bytes to read it"
            )
        return self._checked(done, path)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, creating its parent folders.

        Raises:
            OSError: the file can't be written.
        """
        self._checked(await self._do("write", {"path": path}, stdin=content), path)

    async def snapshot(self, *paths: str, timeout_s: float = 60.0) -> SandboxSnapshot:
        """Take a snapshot of the files under ``paths``: by default ``/sandbox`` and ``/tmp``.

        Raises:
            SandboxError: the sandbox has ended, or its tier does not support snapshots.
            OSError: the files can't be packed, or their archive is larger than the files of a
                sandbox may be. Holes in files count like bytes.
        """
        self._pool.check_able("snapshots", "snapshots")
        names = list(paths) or [_HOME, "/tmp"]
        limits = self._pool.limits
        most = limits.disk_bytes + limits.files * _HEADER_BYTES
        done = await self._do("pack", {"paths": names}, output_bytes=most, timeout_s=timeout_s)
        if "output" in done.limits_hit:
            raise OSError(f"the snapshot has more than {most} bytes, holes in files included")
        archive = self._checked(done, ", ".join(names))
        return SandboxSnapshot(root=self._root, image=self._image, archive=archive)

    async def restore(self, snapshot: SandboxSnapshot, *, timeout_s: float = 60.0) -> None:
        """Unpack a snapshot over the session's files.

        Raises:
            OSError: the snapshot can't be unpacked.
        """
        done = await self._do("unpack", {}, stdin=snapshot.archive, timeout_s=timeout_s)
        self._checked(done, "snapshot")

    async def _do(
        self,
        kind: str,
        header: dict[str, Any],
        *,
        stdin: bytes = b"",
        output_bytes: int | None = 1 << 16,
        timeout_s: float = 60.0,
    ) -> Result:
        job = self._pool.job(
            kind, header, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes
        )
        return await self._execute(job)

    async def _execute(self, job: Job) -> Result:
        async with self._one_at_a_time:
            if not self._sandbox.alive:
                where = f" on {self._sandbox.host}" if self._sandbox.host else ""
                raise SandboxError(f"the session's sandbox{where} has ended; its files are gone")
            kept = attrs.evolve(job, keeps=True)
            async with self._pool.turn():
                return await attempted(lambda: self._sandbox.execute(kept))

    @staticmethod
    def _checked(done: Result, what: str) -> bytes:
        if not done.ok:
            said = done.stderr.decode(errors="replace").strip()
            raise OSError(f"{what} in the sandbox: {said[-500:] or done.limits_hit or done.exit}")
        return done.stdout
