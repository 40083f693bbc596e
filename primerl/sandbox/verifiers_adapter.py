"""A `verifiers` ``Runtime`` on a session of a pool's, so that its environments run code in
sandboxes.

verifiers (0.4) makes only the runtimes that it knows from its configuration, and takes any other as
an instance: ``await agents.agent.run(task, runtime=runtime)`` in an environment's ``run``.
"""

import contextlib
from typing import TYPE_CHECKING, Any

from primerl._common.optional import require
from primerl.sandbox.errors import SandboxError
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Root
from primerl.sandbox.sessions import Session

if TYPE_CHECKING:
    import verifiers.v1 as vf


def verifiers_runtime(
    pool: SandboxPool,
    *,
    root: Root | None = None,
    timeout_s: float = 600.0,
    lifetime_s: float = 3600.0,
) -> "vf.Runtime":
    """A runtime whose commands and files are in one sandbox, made at ``start()``.

    Its ``pool`` is the one given here: what grades a rollout can take new sandboxes from it.
    ``timeout_s`` is for each command; the rollout's own deadline cancels it earlier. ``lifetime_s``
    should exceed the rollout's deadline by the time that scoring takes, which uses the sandbox,
    too.

    Raises:
        ImportError: verifiers is not installed.
    """
    runtimes: Any = require("verifiers.v1.runtimes.base", extra="verifiers")
    errors: Any = require("verifiers.v1.errors", extra="verifiers")
    configs: Any = require("verifiers.v1.runtimes.subprocess", extra="verifiers")

    class SandboxRuntime(runtimes.Runtime):  # type: ignore[misc]  # a class known at run time only
        def __init__(self) -> None:
            super().__init__()
            self.pool = pool
            # Traces record one of verifiers' own configurations: the one nearest to this.
            self.config = configs.SubprocessConfig()
            self.info = configs.SubprocessRuntimeInfo(id=self.name)
            self._stack = contextlib.AsyncExitStack()
            self._session: Session | None = None

        async def start(self) -> None:
            context = pool.session(root=root, lifetime_s=lifetime_s)
            self._session = await self._stack.enter_async_context(context)

        async def teardown(self) -> None:
            self._session = None
            await self._stack.aclose()

        async def run(self, argv: list[str], env: dict[str, str]) -> Any:
            environment = self.process_env(env)
            try:
                done = await self._running().run(argv, environment=environment, timeout_s=timeout_s)
            except SandboxError as error:
                raise errors.SandboxError(str(error)) from error
            said = done.stderr.decode(errors="replace")
            if done.limits_hit:
                said += f"\n[sandbox: ended by its limit of {', '.join(done.limits_hit)}]"
            if not self._running().alive:
                raise errors.SandboxError(f"the sandbox has ended: {', '.join(done.limits_hit)}")
            # As a shell reports the end by a signal; 137 is what a limit's SIGKILL looks like.
            code = 137 if done.exit is None else done.exit
            return runtimes.ProgramResult(
                exit_code=code if code >= 0 else 128 - code,
                stdout=done.stdout.decode(errors="replace"),
                stderr=said,
            )

        async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
            command = 'exec > "$0" 2>&1 < /dev/null; "$@" &'
            result = await self.run(["sh", "-c", command, log, *argv], env)
            if result.exit_code:
                raise errors.SandboxError(f"{argv[0]} could not be started: {result.stderr}")

        async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
            try:
                if max_bytes is None:
                    return await self._running().read(path)
                command = ["head", "-c", str(max_bytes), "--", path]
                done = await self._running().run(
                    command, output_bytes=max_bytes + 1, timeout_s=timeout_s
                )
                if not done.ok:
                    raise OSError(done.stderr.decode(errors="replace").strip())
                return done.stdout
            except (OSError, SandboxError) as error:
                raise errors.SandboxError(f"read {path!r}: {error}") from error

        async def write(self, path: str, data: bytes) -> None:
            try:
                await self._running().write(path, data)
            except (OSError, SandboxError) as error:
                raise errors.SandboxError(f"write {path!r}: {error}") from error

        def _running(self) -> Session:
            if self._session is None:
                raise errors.SandboxError("the runtime is not started")
            return self._session

    runtime: vf.Runtime = SandboxRuntime()
    return runtime
