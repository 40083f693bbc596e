"""A pool of sandboxes that are ready before they are needed."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import attrs

from primerl.sandbox import isolation, launching
from primerl.sandbox.errors import SandboxError, SandboxUnavailable
from primerl.sandbox.proxy import Proxy
from primerl.sandbox.results import Isolation, Limits, Result
from primerl.sandbox.roots import Root, Roots
from primerl.sandbox.sessions import Session, Snapshot
from primerl.sandbox.slots import Order, Slot

HOME = "/sandbox"
_BEATS = 4  # signs of life per lease


class SandboxPool:
    """Runs code that nobody trusts, each piece in a sandbox of its own that was made beforehand.

        async with SandboxPool() as pool:
            result = await pool.run("print(6 * 7)", timeout_s=5)

    Args:
        min_isolation: the weakest tier that will do; ``namespaces`` is the only one built in.
        limits: limits of each sandbox.
        concurrency: how many run at once; others wait in order of arrival. Twice the processors by
            default.
        warm: how many sandboxes are kept ready; as many as run at once by default.
        starting: how many may be starting at once.
        start_timeout_s: time in which the pool, and each sandbox, must start.
        lease_s: everything ends if the owner's event loop gives no sign of life for this long. A
            crash of the owner ends everything at once.
        readable: further absolute paths that sandboxes may read, such as a folder of packages.
        python: the interpreter for code; the one that runs this, without its virtual environment,
            by default.
        allow_network: ``"host:port"`` of the servers that sandboxes may reach, through a proxy of
            the pool's; none by default.

    Raises:
        SandboxUnavailable: this machine lacks what the tier needs; raised on entering.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        min_isolation: Literal["namespaces"] = "namespaces",
        limits: Limits | None = None,
        concurrency: int | None = None,
        warm: int | None = None,
        starting: int = 4,
        start_timeout_s: float = 30.0,
        lease_s: float = 60.0,
        readable: Sequence[str] = (),
        python: str | None = None,
        allow_network: Sequence[str] = (),
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.limits = limits or Limits()
        self._concurrency = 2 * cores if concurrency is None else concurrency
        self._warm = self._concurrency if warm is None else warm
        if self._concurrency < 1 or starting < 1 or self._warm < 0:
            raise ValueError("concurrency and starting must be positive, warm not negative")
        self._tier = isolation.tier(min_isolation)
        self._starting = starting
        self._start_timeout_s = start_timeout_s
        self._lease_s = lease_s
        self._python = python or launching.default_python()
        self._readable = launching.readable_paths(self._python, tuple(readable))
        self._proxy = Proxy(allow_network) if allow_network else None
        self._launcher: launching.Launcher | None = None
        self._ready: deque[Slot] = deque()
        self._alive: set[Slot] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling = 0

    async def __aenter__(self) -> Self:
        self._turns = asyncio.Semaphore(self._concurrency)
        self._starts = asyncio.Semaphore(self._starting)
        self._launcher = await isolation.start(
            self._tier,
            python=self._python,
            readable=self._readable,
            settings=self._settings(),
            lease_s=self._lease_s,
            start_timeout_s=self._start_timeout_s,
        )
        self._roots = Roots(self._launcher.folder / "roots", user=self._launcher.user)
        try:
            self._ready.append(await self._make())
        except SandboxError as error:
            await self._launcher.close()
            raise SandboxUnavailable(
                f"sandboxes can't be made here: {error}. {isolation.WAY_OUT}",
                await isolation.probe(self._python),
            ) from error
        except BaseException:
            await self._launcher.close()
            raise
        self._spawn(self._give_signs_of_life())
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
        for slot in list(self._alive):
            slot.kill()
        if self._proxy is not None:
            await self._proxy.close()
        if self._launcher is not None:
            await self._launcher.close()

    @property
    def isolation(self) -> Isolation:
        """What keeps code inside: the tier in force, what it stops, and what it doesn't."""
        launcher = self._running()
        return isolation.describe(
            self._tier, landlock=launcher.landlock, user=launcher.user, network=self._proxy
        )

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
            code,
            stdin=stdin,
            files=files,
            environment=environment,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
        )
        async with self._turns:
            slot = await self._take()
            try:
                return await slot.execute(order)
            finally:
                self._end(slot)
                self._refill()

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        root: Root | None = None,
        snapshot: Snapshot | None = None,
        lifetime_s: float = 3600.0,
    ) -> AsyncIterator[Session]:
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
            settings |= self._roots.settings(root)
        slot = await self._make(settings)
        try:
            session = Session(self, slot, root=root)
            if snapshot is not None:
                await session.restore(snapshot)
            yield session
        finally:
            self._end(slot)

    async def prepare_root(self, *layers: str | os.PathLike[str]) -> Root:
        """Make a root filesystem for sessions of one folder, or of an image's unpacked layers.

        The lowest layer comes first. Files are copied once per pool; sessions then share them.

        Raises:
            SandboxError: a layer can't be read, or the pool isn't running.
        """
        self._running()
        return await self._roots.prepare([os.fspath(layer) for layer in layers], make=self._make)

    def order(
        self,
        code: str | Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str = HOME,
        timeout_s: float = 10.0,
        memory_bytes: int | None = None,
        output_bytes: int | None = None,
    ) -> Order:
        """What ``run`` sends to a sandbox.

        Raises:
            ValueError: the command is empty, or a limit isn't positive.
        """
        if not isinstance(code, str) and not code:
            raise ValueError("the command is empty")
        if timeout_s <= 0 or (memory_bytes is not None and memory_bytes <= 0):
            raise ValueError("timeout_s and memory_bytes must be positive")
        header: dict[str, Any] = {"environment": self._environment(environment), "folder": folder}
        if isinstance(code, str):
            header["code"] = code
        else:
            header["argv"] = list(code)
        return Order(
            kind="code" if isinstance(code, str) else "argv",
            header=header,
            files=dict(files or {}),
            stdin=stdin,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes or self.limits.memory_bytes,
            output_bytes=output_bytes or self.limits.output_bytes,
        )

    async def execute(self, slot: Slot, order: Order) -> Result:
        """Carry out a session's order when it is its turn among all that want to run."""
        async with self._turns:
            return await slot.execute(order)

    # ---- sandboxes ----

    def _settings(self) -> dict[str, Any]:
        return {
            **attrs.asdict(self.limits),
            "session": False,
            "lifetime_s": 1e9,
            "root": None,
            "overlay": False,
            "network": self._proxy is not None,
            "readable": self._readable,
        }

    def _environment(self, given: Mapping[str, str] | None) -> dict[str, str]:
        environment = {} if self._proxy is None else dict(self._proxy.environment)
        return environment | dict(given or {})

    def _running(self) -> launching.Launcher:
        if self._launcher is None or not self._launcher.alive:
            raise SandboxError(
                "the pool isn't running: use it as `async with SandboxPool() as pool`"
            )
        return self._launcher

    async def _make(self, settings: dict[str, Any] | None = None) -> Slot:
        """A new sandbox; as many start at once as ``starting`` allows."""
        launcher = self._running()
        async with self._starts:
            async with asyncio.timeout(self._start_timeout_s):
                control, handle = await launcher.make(settings or {})
            slot = Slot(control, handle, self.limits)
            self._alive.add(slot)
            try:
                await slot.ready(self._start_timeout_s)
            except BaseException:
                self._end(slot)
                raise
        if self._proxy is not None and slot.listener is not None:
            self._proxy.serve(slot.listener)
        return slot

    async def _take(self) -> Slot:
        while self._ready:
            slot = self._ready.popleft()
            if slot.alive:
                return slot
            self._end(slot)
        return await self._make()

    def _end(self, slot: Slot) -> None:
        if self._proxy is not None and slot.listener is not None:
            self._proxy.forget(slot.listener)
        slot.kill()
        self._alive.discard(slot)

    def _refill(self) -> None:
        """Make sandboxes until enough are ready, behind the back of whoever runs something."""
        while len(self._ready) + self._refilling < self._warm:
            self._refilling += 1
            self._spawn(self._add_one())

    async def _add_one(self) -> None:
        try:
            slot = await self._make()
            self._ready.append(slot)
        except (SandboxError, TimeoutError):
            pass  # whoever needs one tries again, and is told why it fails
        finally:
            self._refilling -= 1

    async def _give_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _BEATS)
            if self._launcher is not None and self._launcher.alive:
                self._launcher.renew()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
