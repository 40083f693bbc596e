"""A pool of sandboxes that are ready before they are needed."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from primerl.sandbox import tiers
from primerl.sandbox.errors import SandboxError
from primerl.sandbox.results import Isolation, Limits, Result, Root
from primerl.sandbox.sessions import SandboxSession, SandboxSnapshot
from primerl.sandbox.tiers import host
from primerl.sandbox.tiers.interface import Ability, Options, Order, Sandbox, asked


class SandboxPool:
    """Runs code that nobody trusts, each piece in a sandbox of its own that was made beforehand.

        async with SandboxPool() as pool:
            result = await pool.run("print(6 * 7)", timeout_s=5)

    Args:
        tier: how code is kept inside; see ``docs/sandbox.md``. No other is ever taken instead. By
            default ``min_isolation``, and ``"namespaces"`` without either.
        min_isolation: refuses a ``tier`` that keeps code inside less well than this one: Landlock
            alone is the weakest, then come those that share the host's kernel, then gVisor, then
            hosted virtual machines.
        limits: limits of each sandbox.
        concurrency: how many run at once; others wait in order of arrival. Twice the processors by
            default.
        warm: how many sandboxes are kept ready; as many as run at once by default.
        starting: how many may be starting at once.
        start_timeout_s: time in which the pool, and each sandbox, must start.
        lease_s: everything ends if the owner's event loop gives no sign of life for this long. A
            crash of the owner ends everything at once.
        readable: further absolute paths that sandboxes may read, such as a folder of packages. Of
            ``/tmp`` and its like, which most tiers' sandboxes have of their own, name the folders
            below.
        python: the interpreter for code; the one that runs this, without its virtual environment,
            by default.
        allow_network: ``"host:port"`` of the servers that sandboxes may reach, through a proxy of
            the pool's; none by default.
        image: the image of sandboxes in containers (``docker``, ``podman``, ``prime``); it needs
            Python as ``python3``.

    Raises:
        SandboxUnavailable: this machine lacks what the tier needs; raised on entering.
        ValueError: an argument is out of range, the tier is weaker than ``min_isolation``, or its
            sandboxes can't show a ``readable`` path.
    """

    def __init__(
        self,
        *,
        tier: tiers.TierName | None = None,
        min_isolation: tiers.TierName | None = None,
        limits: Limits | None = None,
        concurrency: int | None = None,
        warm: int | None = None,
        starting: int = 4,
        start_timeout_s: float = 30.0,
        lease_s: float = 60.0,
        readable: Sequence[str] = (),
        python: str | None = None,
        allow_network: Sequence[str] = (),
        image: str | None = None,
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.limits = limits or Limits()
        self._concurrency = 2 * cores if concurrency is None else concurrency
        self._warm = self._concurrency if warm is None else warm
        if self._concurrency < 1 or starting < 1 or self._warm < 0:
            raise ValueError("concurrency and starting must be positive, warm not negative")
        self._python = python or host.default_python()
        paths = host.readable_paths(self._python, tuple(readable))
        self._tier = tiers.choose(
            tiers.allowed(tier, min_isolation),
            Options(
                limits=self.limits,
                python=self._python,
                readable=paths,
                allow_network=tuple(allow_network),
                lease_s=lease_s,
                start_timeout_s=start_timeout_s,
                image=image,
            ),
        )
        tiers.require_visible(paths, self._tier)
        self._starting = starting
        self._running = False
        self._ready: deque[Sandbox] = deque()
        self._alive: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling = 0

    async def __aenter__(self) -> Self:
        self._turns = asyncio.Semaphore(self._concurrency)
        self._starts = asyncio.Semaphore(self._starting)
        await self._tier.start()
        self._running = True
        self._refill()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._running = False
        for sandbox in list(self._alive):
            self._end(sandbox)
        await self._tier.close()

    @property
    def isolation(self) -> Isolation:
        """What keeps code inside: the tier in force, what it stops, and what it doesn't."""
        self._check_running()
        return self._tier.isolation()

    @property
    def alive(self) -> bool:
        """Whether the pool is running: it was entered, and its helpers have not been killed."""
        return self._running and self._tier.alive

    async def run(
        self,
        code: str | Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        memory_bytes: int | None = None,
        output_bytes: int | None = None,
    ) -> Result:
        """Run Python code (a string) or a command (a list) in a new sandbox, and end it.

        ``files`` are written first; relative paths are below ``/sandbox``, the working folder.
        ``timeout_s`` counts from when the sandbox starts to work, not the wait in the queue.

        Raises:
            SandboxError: no sandbox could be made.
        """
        order = self.order(
            *asked(code),
            stdin=stdin,
            files=files,
            environment=environment,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
        )
        async with self.turn():
            sandbox = await self._take()
            try:
                return await sandbox.execute(order)
            finally:
                self._end(sandbox)
                self._refill()

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        root: Root | None = None,
        snapshot: SandboxSnapshot | None = None,
        lifetime_s: float = 3600.0,
    ) -> AsyncIterator[SandboxSession]:
        """A sandbox that stays for many commands, and ends with the block or after ``lifetime_s``.

        ``root`` is a root filesystem that ``prepare_root`` made; the session's changes are its own.
        ``snapshot`` is what another session's ``snapshot()`` returned: this one goes on from there.

        Raises:
            SandboxError: no sandbox could be made.
        """
        if snapshot is not None:
            root = snapshot.root
        settings: dict[str, Any] = {"session": True, "lifetime_s": lifetime_s}
        if root is not None:
            settings |= root.settings
        sandbox = await self._make(settings)
        try:
            session = SandboxSession(self, sandbox, root=root)
            if snapshot is not None:
                await session.restore(snapshot)
            yield session
        finally:
            self._end(sandbox)

    async def prepare_root(self, *layers: str | os.PathLike[str]) -> Root:
        """Make a root filesystem for sessions of one folder, or of an image's unpacked layers.

        The lowest layer comes first. Files are copied once per pool; sessions then share them.

        Raises:
            SandboxError: a layer can't be read, or the pool isn't running.
        """
        self._check_running()
        self.check_able("roots", "root filesystems of their own")
        return await self._tier.prepare_root([os.fspath(layer) for layer in layers])

    def check_able(self, ability: Ability, what: str) -> None:
        """Raise SandboxError if the pool's tier lacks an ability."""
        if ability in self._tier.lacks:
            raise SandboxError(f"sandboxes of the tier {self._tier.name!r} have no {what}")

    def order(
        self,
        kind: str,
        header: dict[str, Any],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str = ".",
        timeout_s: float = 10.0,
        memory_bytes: int | None = None,
        output_bytes: int | None = None,
    ) -> Order:
        """What goes to a sandbox, with the pool's limits unless others are given.

        Raises:
            ValueError: a limit isn't positive.
        """
        if timeout_s <= 0 or (memory_bytes is not None and memory_bytes <= 0):
            raise ValueError("timeout_s and memory_bytes must be positive")
        environment = {**self._tier.environment, **(environment or {})}
        return Order(
            kind=kind,
            header=header | {"environment": environment, "folder": folder},
            files=dict(files or {}),
            stdin=stdin,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes or self.limits.memory_bytes,
            output_bytes=output_bytes or self.limits.output_bytes,
        )

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for one of the ``concurrency`` turns, in order of arrival.

        Whoever has one must not wait for a second one, which ``run`` and a session's calls do, but
        not ``SandboxSession.execute_at_once``.

        Raises:
            SandboxError: the pool isn't running.
        """
        self._check_running()
        async with self._turns:
            yield

    # ---- sandboxes ----

    def _check_running(self) -> None:
        if not self._running:
            raise SandboxError(
                "the pool isn't running: use it as `async with SandboxPool() as pool`"
            )

    async def _make(self, settings: Mapping[str, Any] | None = None) -> Sandbox:
        """A new sandbox; as many start at once as ``starting`` allows."""
        self._check_running()
        async with self._starts:
            sandbox = await self._tier.make(settings or {})
        self._alive.add(sandbox)
        return sandbox

    async def _take(self) -> Sandbox:
        while self._ready:
            sandbox = self._ready.popleft()
            if sandbox.alive:
                return sandbox
            self._end(sandbox)
        return await self._make()

    def _end(self, sandbox: Sandbox) -> None:
        sandbox.kill()
        self._alive.discard(sandbox)

    def _refill(self) -> None:
        """Make sandboxes until enough are ready, behind the back of whoever runs something."""
        while len(self._ready) + self._refilling < self._warm:
            self._refilling += 1
            task = asyncio.get_running_loop().create_task(self._add_one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _add_one(self) -> None:
        try:
            self._ready.append(await self._make())
        except (SandboxError, TimeoutError):
            pass  # whoever needs one tries again, and is told why it fails
        finally:
            self._refilling -= 1
