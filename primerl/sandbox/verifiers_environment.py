"""A verifiers environment whose agent acts in a sandbox of a pool's."""

import asyncio
import weakref
from typing import Any

from primerl._common.optional import require
from primerl.sandbox.errors import SandboxUnavailable
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Limits
from primerl.sandbox.verifiers_adapter import verifiers_runtime

vf: Any = require("verifiers.v1", extra="verifiers")
_configs: Any = require("pydantic_config", extra="verifiers")


class SandboxConfig(_configs.BaseConfig):  # type: ignore[misc]  # a class known at run time only
    """The pool of sandboxes.

    ``concurrency`` is how many run at once (None: twice the processors), ``command_timeout_s``
    bounds each command, ``lifetime_s`` a whole rollout with its scoring. ``readable`` are further
    absolute paths that sandboxes may read.
    """

    concurrency: int | None = None
    memory_bytes: int = 512 << 20
    command_timeout_s: float = 30.0
    lifetime_s: float = 3600.0
    readable: tuple[str, ...] = ()


class SandboxEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """One agent, and its sandbox.

    The agent's own runtime is not used. It is declared so that an agent that is run without the
    environment gets a container, and never this machine.
    """

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.DockerConfig())
    sandbox: SandboxConfig = SandboxConfig()


class SandboxEnv(vf.Env[SandboxEnvConfig]):  # type: ignore[misc]
    """Plays each task in a new sandbox, which ends with its scoring.

    There is one pool for each event loop, opened by the first rollout and again if it was killed.
    Where no sandbox can be made, rollouts fail with ``SandboxUnavailable``, which says why.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._pools: weakref.WeakKeyDictionary[Any, SandboxPool] = weakref.WeakKeyDictionary()
        self._opening: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()

    async def run(self, task: Any, agents: Any) -> None:
        """One episode: the agent in its sandbox, then the scoring."""
        sandbox = self.config.sandbox
        runtime = verifiers_runtime(
            await self._pool(), timeout_s=sandbox.command_timeout_s, lifetime_s=sandbox.lifetime_s
        )
        runtime.env = dict(task.runtime_env())
        await runtime.start()
        try:
            await agents.agent.run(task, runtime=runtime)
        finally:
            await runtime.stop()

    async def stop(self) -> None:
        """Close the event loop's pool."""
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
            limits=Limits(memory_bytes=sandbox.memory_bytes),
            concurrency=sandbox.concurrency,
            readable=sandbox.readable,
        )
        try:
            return await pool.__aenter__()
        except SandboxUnavailable as error:
            error.add_note(f"wanted by the environment {self.config.env_id}")
            raise
