"""A pool of sandboxes that are created before they are needed."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from primerl.sandbox import tiers
from primerl.sandbox.errors import SandboxError, SandboxLost, SandboxNotStarted
from primerl.sandbox.results import Isolation, Result, Root, SandboxLimits
from primerl.sandbox.sessions import SandboxSession, SandboxSnapshot
from primerl.sandbox.tiers.images.engines import reference
from primerl.sandbox.tiers.interface import Ability, Job, Options, Sandbox, Tier, asked, attempted
from primerl.sandbox.tiers.on_ray.hosts import RayHosts
from primerl.sandbox.tiers.on_ray.tier import RayTier


class SandboxPool:
    """A pool that runs each piece of untrusted code in a separate sandbox, created in advance.

        async with SandboxPool() as pool:
            result = await pool.run("print(6 * 7)", timeout_s=5)

    Args:
        tier: the isolation tier; see ``docs/sandbox.md``. The pool never falls back to another
            tier. Defaults to ``min_isolation``, or to ``"namespaces"`` if that is None, too.
        min_isolation: reject a ``tier`` with weaker isolation than this tier. From weak to strong:
            ``landlock``; the tiers that share the host's kernel (``namespaces``, ``docker``,
            ``podman``); ``gvisor``; hosted virtual machines (``prime``).
        limits: resource limits of each sandbox.
        concurrency: how many runs execute at once; further calls wait in order of arrival.
            Defaults to twice the number of CPUs.
        warm: how many sandboxes are kept ready. Defaults to ``concurrency``.
        starting: how many sandboxes may be starting at once.
        start_timeout_s: timeout for starting the pool, and for starting each sandbox.
        lease_s: end the pool and its sandboxes if the owner's event loop sends no heartbeat for
            this long. If the owner crashes, they end at once.
        readable: additional absolute paths that sandboxes may read, such as a folder of packages.
            Don't list ``/tmp`` and similar places themselves, of which sandboxes in most tiers
            have their own: list the folders below.
        python: the interpreter that runs the code. Defaults to the current interpreter, without
            its virtual environment.
        allow_network: ``"host:port"`` of each server that sandboxes may reach, through a proxy
            of the pool; none by default.
        image: the image of sandboxes in containers (``docker``, ``podman``, ``prime``). It must
            provide Python as ``python3``.
        image_bytes: the most bytes that images of sessions (``session(image=)``) take on a host.
            To make room, the pool removes the image that no session has used for longest.
        image_timeout_s: timeout for pulling and unpacking the image of a session.
        hosts: run the sandboxes on these hosts of a Ray cluster (``docs/ray.md``), where ``python``
            and ``readable`` must exist. By default, they run on this host.

    Raises:
        SandboxUnavailable: this machine lacks a requirement of the tier. Raised on entering.
        ValueError: an argument is out of range, the tier is weaker than ``min_isolation``, or its
            sandboxes can't show a ``readable`` path.
    """

    def __init__(
        self,
        *,
        tier: tiers.TierName | None = None,
        min_isolation: tiers.TierName | None = None,
        limits: SandboxLimits | None = None,
        concurrency: int | None = None,
        warm: int | None = None,
        starting: int = 4,
        start_timeout_s: float = 30.0,
        lease_s: float = 60.0,
        readable: Sequence[str] = (),
        python: str | None = None,
        allow_network: Sequence[str] = (),
        image: str | None = None,
        image_bytes: int = 64 << 30,
        image_timeout_s: float = 1800.0,
        hosts: RayHosts | None = None,
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.limits = limits or SandboxLimits()
        self._concurrency = 2 * cores if concurrency is None else concurrency
        self._warm = self._concurrency if warm is None else warm
        if self._concurrency < 1 or starting < 1 or self._warm < 0:
            raise ValueError(
                "concurrency and starting must be positive, and warm must not be negative"
            )
        if image_bytes < 1 or not image_timeout_s > 0:
            raise ValueError("image_bytes and image_timeout_s must be positive")
        name = tiers.allowed(tier, min_isolation)
        options = Options(
            limits=self.limits,
            python=python or "",
            readable=tuple(readable),
            allow_network=tuple(allow_network),
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
            image=image,
            image_bytes=image_bytes,
            image_timeout_s=image_timeout_s,
        )
        if hosts is None:
            self._tier: Tier = tiers.on_this_host(name, options)
        else:
            self._tier = RayTier(tiers.choose(name, options), hosts)
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
        """A description of the isolation in force: the tier, what it stops and what it does not."""
        self._check_running()
        return self._tier.isolation()

    @property
    def alive(self) -> bool:
        """Whether the pool was entered and its helper processes are still running."""
        return self._running and self._tier.alive

    def stats(self) -> dict[str, Any]:
        """Return what the pool holds: sandboxes, and the images of sessions with their bytes.

        ``images`` has the ``bytes`` of each image and the number of ``sessions`` that use it. With
        ``hosts``, ``hosts`` has the images of each host.
        """
        sandboxes = {"sandboxes": len(self._alive), "ready": len(self._ready)}
        return sandboxes | self._tier.stats()

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
        """Run Python code (a string) or a command (a list) in a new sandbox, then end the sandbox.

        ``files`` are written first; relative paths are below ``/sandbox``, the working folder.
        ``timeout_s`` starts when the sandbox begins to work; time in the queue does not count.

        A run that could not be started, for a shortage on this machine, is tried again; so is one
        whose host is lost.

        Raises:
            SandboxNotStarted: no attempt could be started.
            SandboxLost: the hosts of all attempts were lost.
            SandboxError: the pool isn't running, or it was closed meanwhile.
        """
        job = self.job(
            *asked(code),
            stdin=stdin,
            files=files,
            environment=environment,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
        )
        async with self.turn():
            return await attempted(
                lambda: self._run_once(job), errors=(SandboxNotStarted, SandboxLost)
            )

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        root: Root | None = None,
        image: str | None = None,
        snapshot: SandboxSnapshot | None = None,
        lifetime_s: float = 3600.0,
    ) -> AsyncIterator[SandboxSession]:
        """Open a session: one sandbox for many commands.

        The sandbox ends when the ``async with`` block is left, or after ``lifetime_s``. ``root``
        is a root filesystem from ``prepare_root``; no other session sees this session's changes.
        ``snapshot`` comes from another session's ``snapshot()``: this session starts with that
        snapshot's root or image, and files.

        ``image`` is a container image whose files are the root: a reference such as
        ``registry/name:tag``, which docker or podman pulls, or the absolute path of an archive
        (``docker save``, ``docker export``, an OCI layout) or of a folder. A host fetches an image
        once and keeps it for later sessions, within ``image_bytes``. The image's variables are set
        in each command.

        Raises:
            SandboxError: no sandbox could be created, or the image can't be had. The message names
                the image.
            ValueError: both ``root`` and ``image`` are given.
        """
        if root is not None and image is not None:
            raise ValueError("a session has a root or an image, not both")
        if snapshot is not None:
            root, image = snapshot.root, snapshot.image
        settings: dict[str, Any] = {"session": True, "lifetime_s": lifetime_s}
        if root is not None:
            settings |= root.settings
        if image is not None:
            self._check_running()
            self.check_able("images", "images of sessions")
            if not os.path.isabs(image):
                reference(image)  # before anything logs it: it may have a password
            settings["image"] = image
            await self._tier.fetch(image)  # before a start is permitted: it may take minutes
        sandbox = await self._make(settings)
        try:
            session = SandboxSession(self, sandbox, root=root, image=image)
            if snapshot is not None:
                await session.restore(snapshot)
            yield session
        finally:
            self._end(sandbox)

    async def prepare_root(self, *layers: str | os.PathLike[str]) -> Root:
        """Build a root filesystem for sessions from a folder, or from an image's unpacked layers.

        The lowest layer comes first. Files are copied once per pool; sessions then share the copy.

        Raises:
            SandboxError: a layer can't be read, or the pool isn't running.
        """
        self._check_running()
        self.check_able("roots", "other root filesystems")
        return await self._tier.prepare_root([os.fspath(layer) for layer in layers])

    def check_able(self, ability: Ability, what: str) -> None:
        """Raise SandboxError if the pool's tier lacks an ability, described by ``what``."""
        if ability in self._tier.lacks:
            raise SandboxError(f"sandboxes of the tier {self._tier.name!r} don't support {what}")

    def job(
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
    ) -> Job:
        """Build a job for a sandbox; limits that are None default to the pool's.

        Raises:
            ValueError: a limit isn't positive.
        """
        if timeout_s <= 0 or (memory_bytes is not None and memory_bytes <= 0):
            raise ValueError("timeout_s and memory_bytes must be positive")
        environment = {**self._tier.environment, **(environment or {})}
        return Job(
            kind=kind,
            header=header | {"environment": environment, "folder": folder},
            files=dict(files or {}),
            stdin=stdin,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes or self.limits.memory_bytes,
            output_bytes=output_bytes or self.limits.output_bytes,
        )

    async def run_connected(self, served: Job, suite: Job) -> tuple[Result, Result | None]:
        """Execute two jobs in two new sandboxes whose standard inputs are connected.

        Returns the results of ``suite`` and of ``served``, which is None if ``served`` had to be
        ended after ``suite``. The caller holds a ``turn``.
        """
        return await self._tier.run_connected(served, suite, sandboxes=self._new)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold one of the pool's ``concurrency`` permits, granted in order of arrival.

        A holder that waits for a second permit can deadlock. ``run`` and a session's calls each
        take a permit.

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
        """Create a sandbox, while at most ``starting`` of them start at once."""
        self._check_running()
        async with self._starts:
            sandbox = await self._tier.make(settings or {})
        self._alive.add(sandbox)
        return sandbox

    @contextlib.asynccontextmanager
    async def _new(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._make({"session": True})
        try:
            yield sandbox
        finally:
            self._end(sandbox)

    async def _run_once(self, job: Job) -> Result:
        sandbox = await self._take()
        try:
            result = await sandbox.execute(job)
        finally:
            self._end(sandbox)
            self._refill()
        if "died" in result.limits_hit:
            await asyncio.sleep(0)  # the event loop may not know yet that the pool died, too
            if not self.alive:
                raise SandboxError("the pool's helper processes have ended, with all sandboxes")
        return result

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
        """Start background tasks that create sandboxes until ``warm`` of them are ready."""
        while len(self._ready) + self._refilling < self._warm:
            self._refilling += 1
            task = asyncio.get_running_loop().create_task(self._add_one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _add_one(self) -> None:
        try:
            self._ready.append(await self._make())
        except (SandboxError, TimeoutError):
            pass  # the next caller that needs a sandbox tries again and gets the error
        finally:
            self._refilling -= 1
