"""A verifiers environment that has been set up on an event loop."""

import asyncio
import contextlib
from typing import Any

from primerl._common.optional import require

CLOSE_S = 30.0


class RunningEnvironment:
    """The agents of a verifiers environment on one event loop, with their shared resources."""

    def __init__(self, env: Any, renderer: Any, *, startup_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.renderer = renderer
        self.ready: asyncio.Future[None] = loop.create_future()
        self._env = env
        self._startup_timeout_s = startup_timeout_s
        self._closing = asyncio.Event()
        self._agents: dict[str, Any] = {}
        self._task = loop.create_task(self._hold())

    @property
    def failed(self) -> bool:
        """Whether setting up the environment failed."""
        return self.ready.done() and (self.ready.cancelled() or self.ready.exception() is not None)

    async def play(self, task: Any) -> list[Any]:
        """Play one episode, and return the traces of all agent runs in the order they finished."""
        vf = require("verifiers.v1", extra="verifiers")
        env, traces = self._env, list[Any]()
        agents = vf.Agents(env.config, lambda name, _: self._agents[name].for_episode(traces))
        if type(env) is vf.SingleAgentEnv:
            await agents.agent.run(task)
            return traces
        await env.setup(agents)
        await env.run(task, agents)
        seed = vf.TraceTask(type=type(task).__name__, data=task.data)
        await env.finalize(task, vf.Episode(task=seed, traces=traces))
        return traces

    async def aclose(self) -> None:
        """Close everything that was set up."""
        self._closing.set()
        async with asyncio.timeout(CLOSE_S):
            await self._task

    async def _hold(self) -> None:
        # One asyncio task enters and exits all contexts, because some of them require it.
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._startup_timeout_s):
                    await self._start(stack)
            except asyncio.CancelledError:
                self.ready.cancel()
                raise
            except Exception as error:  # awaiting ``ready`` raises it
                self.ready.set_exception(error)
                return
            self.ready.set_result(None)
            await self._closing.wait()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        from primerl.rollout.environments.verifiers_adapter import agent, harness

        vf = require("verifiers.v1", extra="verifiers")
        env = self._env
        task_type = type(env.taskset).task_type()
        shared = await stack.enter_async_context(env.shared_tools())
        for tool in shared.values():
            agent.remove_port_files(tool.runtime)  # the ports have been read already
        specs = {name: spec for name, spec in env.config if isinstance(spec, vf.AgentConfig)}
        in_process = {
            name: spec.harness is not None and spec.harness.id == "null"
            for name, spec in specs.items()
        }
        tools = bool(shared or task_type.toolsets(env.taskset.config.task))
        # HTTP is needed by agents outside this process, and by tools that use the task's state.
        http = tools or not all(in_process.values()) or type(env) is not vf.SingleAgentEnv
        interception = await stack.enter_async_context(
            harness.EngineInterception(
                http=http,
                state_secrets=[tool.state_secret for tool in shared.values() if tool.state_secret],
            )
        )
        connections = None
        if tools:
            from primerl.rollout.environments.verifiers_adapter import tools as mcp

            connections = await stack.enter_async_context(mcp.connections())
        stack.push_async_callback(env.stop)
        await env.start()
        for name, spec in specs.items():
            ours = harness.EngineHarness(spec.harness, connections) if in_process[name] else None
            self._agents[name] = agent.EngineAgent(
                spec,
                name=name,
                harness=ours,
                interception=interception,
                shared_tools=shared,
                task_type=task_type,
            )
