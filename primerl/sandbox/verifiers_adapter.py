"""A ``Runtime`` and an ``Env`` of `verifiers` (0.4) that run code in sandboxes.

From its configuration, verifiers creates only its own runtimes. Any other one is passed as an
instance: ``await agents.agent.run(task, runtime=runtime)`` in an environment's ``run``.
"""

import asyncio
import contextlib
import posixpath
import weakref
from typing import Any

from primerl._common.optional import require
from primerl.sandbox import untrusted
from primerl.sandbox.errors import SandboxError, SandboxNotStarted, SandboxUnavailable
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Root, SandboxLimits
from primerl.sandbox.sessions import SandboxSession

vf: Any = require("verifiers.v1", extra="verifiers")
_configs: Any = require("pydantic_config", extra="verifiers")
_runtimes: Any = require("verifiers.v1.runtimes.base", extra="verifiers")
_docker: Any = require("verifiers.v1.runtimes.docker", extra="verifiers")
_subprocess: Any = require("verifiers.v1.runtimes.subprocess", extra="verifiers")


class SandboxRuntime(_runtimes.Runtime):  # type: ignore[misc]  # a class known at run time only
    """A verifiers ``Runtime`` backed by one session of a pool; see ``verifiers_runtime``.

    Errors of the session become verifiers' own, which count as the agent's: it can end its own
    sandbox. A ``SandboxNotStarted`` stays one, because it is never the agent's.
    """

    def __init__(
        self,
        pool: SandboxPool,
        *,
        root: Root | None,
        image: str | None,
        workdir: str,
        timeout_s: float,
        lifetime_s: float,
    ) -> None:
        super().__init__()
        self.pool = pool
        self._root = root
        self._image = image
        self._workdir = workdir
        self._timeout_s = timeout_s
        self._lifetime_s = lifetime_s
        # Traces can only record one of verifiers' own configurations; these are the closest, and
        # verifiers refuses a task with an image in a subprocess.
        if image is None:
            self.config: Any = _subprocess.SubprocessConfig()
            self.info: Any = _subprocess.SubprocessRuntimeInfo(id=self.name)
        else:
            self.config = vf.DockerConfig(image=image, workdir=workdir)
            self.info = _docker.DockerRuntimeInfo(id=self.name, image=image, workdir=workdir)
        self._stack = contextlib.AsyncExitStack()
        self._session: SandboxSession | None = None

    async def start(self) -> None:
        """Open a session of the pool (``Runtime.start``)."""
        context = self.pool.session(root=self._root, image=self._image, lifetime_s=self._lifetime_s)
        self._session = await self._stack.enter_async_context(context)

    def fresh(self, *, timeout_s: float) -> "SandboxRuntime":
        """Return a runtime for another sandbox of the same kind, not yet started."""
        return SandboxRuntime(
            self.pool,
            root=self._root,
            image=self._image,
            workdir=self._workdir,
            timeout_s=timeout_s,
            lifetime_s=self._lifetime_s,
        )

    async def teardown(self) -> None:
        """Close the session, which ends its sandbox (``Runtime.teardown``)."""
        self._session = None
        await self._stack.aclose()

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        """Run a command in the sandbox (``Runtime.run``)."""
        environment = self.process_env(env)
        try:
            done = await self._running().run(
                argv,
                environment=environment,
                folder=self._workdir,
                timeout_s=self._timeout_s,
            )
        except SandboxNotStarted:
            raise
        except SandboxError as error:
            raise vf.SandboxError(str(error)) from error
        said = await untrusted.text(done.stderr)
        if done.limits_hit:
            said += f"\n[sandbox: ended by its limit of {', '.join(done.limits_hit)}]"
        if not self._running().alive:
            raise vf.SandboxError(
                f"the sandbox has ended; limits hit: {', '.join(done.limits_hit)}"
            )
        # A shell's convention: 128 plus the number of the signal, so 137 for a limit's SIGKILL.
        code = 137 if done.exit is None else done.exit
        return _runtimes.ProgramResult(
            exit_code=code if code >= 0 else 128 - code,
            stdout=await untrusted.text(done.stdout),
            stderr=said,
        )

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a background command with output to ``log`` (``Runtime.run_background``)."""
        command = 'exec > "$0" 2>&1 < /dev/null; "$@" &'
        result = await self.run(["sh", "-c", command, log, *argv], env)
        if result.exit_code:
            raise vf.SandboxError(f"{argv[0]} could not be started: {result.stderr}")

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        path = posixpath.join(self._workdir, path)
        try:
            if max_bytes is None:
                return await self._running().read(path)
            command = ["head", "-c", str(max_bytes), "--", path]
            done = await self._running().run(
                command, output_bytes=max_bytes + 1, timeout_s=self._timeout_s
            )
            if not done.ok:
                raise OSError(done.stderr.decode(errors="replace").strip())
            return done.stdout
        except SandboxNotStarted:
            raise
        except (OSError, SandboxError) as error:
            raise vf.SandboxError(f"read {path!r}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the sandbox (``Runtime.write``)."""
        try:
            await self._running().write(posixpath.join(self._workdir, path), data)
        except SandboxNotStarted:
            raise
        except (OSError, SandboxError) as error:
            raise vf.SandboxError(f"write {path!r}: {error}") from error

    def _running(self) -> SandboxSession:
        if self._session is None:
            raise vf.SandboxError("the runtime is not started: await start() first")
        return self._session


def verifiers_runtime(
    pool: SandboxPool,
    *,
    root: Root | None = None,
    image: str | None = None,
    workdir: str = ".",
    timeout_s: float = 600.0,
    lifetime_s: float = 3600.0,
) -> SandboxRuntime:
    """Return a verifiers ``Runtime`` that runs commands in one sandbox, created by ``start()``.

    ``root`` or ``image`` is that of the session, as for ``SandboxPool.session``; commands run in
    ``workdir``, to which relative paths refer. The runtime's ``pool`` attribute is the given pool,
    from which a grader can take new sandboxes; ``fresh()`` returns a runtime with another one, of
    the same root or image.

    ``timeout_s`` limits each command; the rollout's own deadline may cancel it earlier. Scoring
    uses the sandbox, too, so ``lifetime_s`` should exceed the rollout's deadline by the time that
    scoring takes.
    """
    return SandboxRuntime(
        pool,
        root=root,
        image=image,
        workdir=workdir,
        timeout_s=timeout_s,
        lifetime_s=lifetime_s,
    )


class SandboxConfig(_configs.BaseConfig):  # type: ignore[misc]  # a class known at run time only
    """Configuration of the sandbox pool of a ``SandboxEnv``.

    ``concurrency`` is how many calls execute at once (None: twice the number of CPUs).
    ``command_timeout_s`` limits each command, and ``lifetime_s`` a whole rollout including its
    scoring. ``readable`` lists additional absolute paths that sandboxes may read. ``disk_bytes``
    limits the files that a sandbox writes, and ``image_bytes`` the images of tasks on each host.
    """

    concurrency: int | None = None
    memory_bytes: int = 512 << 20
    disk_bytes: int = 128 << 20
    image_bytes: int = 64 << 30
    image_timeout_s: float = 1800.0
    command_timeout_s: float = 30.0
    lifetime_s: float = 3600.0
    readable: tuple[str, ...] = ()


class SandboxEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """Configuration of a ``SandboxEnv``: one agent, and the sandboxes it works in.

    The environment does not use the agent's own runtime. It is set to a container so that an agent
    that is run without the environment never runs commands on this machine.
    """

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.DockerConfig())
    sandbox: SandboxConfig = SandboxConfig()


class SandboxEnv(vf.Env[SandboxEnvConfig]):  # type: ignore[misc]
    """A verifiers environment that plays each task in a new sandbox.

    A task with an ``image`` has the files of that image, and begins in its ``workdir``. The
    sandbox lasts until the rollout has been scored. There is one pool per event loop: the first
    rollout opens it, and a later one reopens it if it was killed. If this machine can't create
    sandboxes, rollouts fail with ``SandboxUnavailable``, which lists the reasons.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._pools: weakref.WeakKeyDictionary[Any, SandboxPool] = weakref.WeakKeyDictionary()
        self._opening: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()

    async def run(self, task: Any, agents: Any) -> None:
        """Run the agent on the task, and score the rollout, in a new sandbox."""
        sandbox = self.config.sandbox
        runtime = verifiers_runtime(
            await self._pool(),
            image=task.data.image,
            workdir=(task.data.image and task.data.workdir) or ".",
            timeout_s=sandbox.command_timeout_s,
            lifetime_s=sandbox.lifetime_s,
        )
        runtime.env = dict(task.runtime_env())
        await runtime.start()
        try:
            await agents.agent.run(task, runtime=runtime)
        finally:
            await runtime.stop()

    async def stop(self) -> None:
        """Close the pool of the current event loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.__aexit__(None, None, None)

    async def _pool(self) -> SandboxPool:
        loop = asyncio.get_running_loop()
        async with self._opening.setdefault(loop, asyncio.Lock()):
            pool = self._pools.get(loop)
            if pool is not None and not pool.alive:
                await self.stop()
                pool = None
            if pool is None:
                pool = await self._open()
                self._pools[loop] = pool
            return pool

    async def _open(self) -> SandboxPool:
        sandbox = self.config.sandbox
        pool = SandboxPool(
            limits=SandboxLimits(memory_bytes=sandbox.memory_bytes, disk_bytes=sandbox.disk_bytes),
            image_bytes=sandbox.image_bytes,
            image_timeout_s=sandbox.image_timeout_s,
            concurrency=sandbox.concurrency,
            readable=sandbox.readable,
        )
        try:
            return await pool.__aenter__()
        except SandboxUnavailable as error:
            error.add_note(f"raised by the sandbox pool of the environment {self.config.env_id}")
            raise
