"""The agents of a verifiers environment, sampled by an engine."""

import contextlib
import copy
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from primerl._common.optional import require

vf: Any = require("verifiers.v1", extra="verifiers")
_runtimes: Any = require("verifiers.v1.runtimes", extra="verifiers")
_PORT_FILE = re.compile(r"/tmp/vf-port-[0-9a-f]{32}")


class Workspace(_runtimes.SubprocessRuntime):  # type: ignore[misc]
    """A subprocess runtime that creates its folder on first use, because few rollouts need one."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._port_files: list[str] = []
        super().__init__(vf.SubprocessConfig())

    @property
    def workdir(self) -> Path:
        """The rollout's own folder."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="primerl-rollout-"))
        return self._folder

    @workdir.setter
    def workdir(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def used(self) -> bool:
        """Whether there is anything to clean up."""
        return self._folder is not None or bool(self._background)

    async def start(self) -> None:
        """Create the folder, because tool servers need its name."""
        self.info.id = str(self.workdir)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a tool server, and record the file to which it will write its port."""
        if "MCP_PORT_FILE" in env:
            self._port_files.append(env["MCP_PORT_FILE"])
        await super().run_background(argv, env, log)

    async def teardown(self) -> None:
        """Stop the processes that run in the workspace, and remove its folder and port files."""
        if self.used:
            await super().teardown()
        for path in self._port_files:
            _remove_port_file(path)

    def cleanup(self) -> None:
        """Do the same as ``teardown``, but without an event loop."""
        for process in self._background:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for path in self._port_files:
            _remove_port_file(path)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class EngineAgent(vf.Agent):  # type: ignore[misc]
    """An agent of a verifiers environment, whose replies the engine samples.

    On tasks of ``task_type``, the agent may call the ``shared_tools``. If ``harness`` is None,
    the agent has the harness that ``config`` specifies.
    """

    def __init__(
        self,
        config: Any,
        *,
        name: str,
        harness: Any,
        interception: Any,
        shared_tools: Mapping[str, Any],
        task_type: type,
    ) -> None:
        super().__init__(config, interception=interception)
        if harness is not None:
            self.harness = harness
        self._name = name
        self._shared_tools = shared_tools
        self._task_type = task_type
        self._traces: list[Any] = []

    def for_episode(self, traces: list[Any]) -> "EngineAgent":
        """Return a copy of this agent for one episode; it appends finished traces to ``traces``."""
        agent = copy.copy(self)
        agent._traces = traces
        return agent

    async def run(
        self,
        task: Any,
        *,
        runtime: Any = None,
        tools: Any = None,
        on_trace: Any = None,
        collect_artifacts: bool = False,
    ) -> Any:
        """Play ``task`` once."""
        async with self._workspace(task, runtime) as box:
            trace = await super().run(
                task,
                runtime=box,
                tools=self._tools(task) if tools is None else tools,
                on_trace=self._stamp(on_trace),
                collect_artifacts=collect_artifacts,
            )
        self._traces.append(trace)
        return trace

    @contextlib.asynccontextmanager
    async def interaction(
        self, task: Any, *, runtime: Any = None, tools: Any = None, on_trace: Any = None
    ) -> AsyncIterator[Any]:
        """Play ``task`` turn by turn, with the environment as the user."""
        own_traces: list[Any] = []
        try:
            async with (
                self._workspace(task, runtime) as box,
                super().interaction(
                    task,
                    runtime=box,
                    tools=self._tools(task) if tools is None else tools,
                    on_trace=self._stamp(on_trace, own_traces.append),
                ) as interaction,
            ):
                yield interaction
        finally:
            self._traces.extend(own_traces)

    def _tools(self, task: Any) -> Mapping[str, Any]:
        return self._shared_tools if isinstance(task, self._task_type) else {}

    def _stamp(self, *observers: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def stamp(trace: Any) -> None:
            trace.agent.name = self._name
            trace.agent.trainable = self.trainable
            for observer in observers:
                if observer is not None:
                    observer(trace)

        return stamp

    @contextlib.asynccontextmanager
    async def _workspace(self, task: Any, runtime: Any) -> AsyncIterator[Any]:
        if runtime is not None or not isinstance(self.runtime_config, vf.SubprocessConfig):
            yield runtime  # the environment's own, or None: verifiers starts one
            return
        box = Workspace()
        try:
            if task.toolsets(task.config):
                await box.start()
            yield box
        finally:
            if box.used:
                await box.stop()


def _remove_port_file(path: str) -> None:
    """Remove a port file, unless its path is not of the form that verifiers uses."""
    if _PORT_FILE.fullmatch(path):
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_port_files(runtime: Any) -> None:
    """Remove the files with a runtime's tool servers' ports, which verifiers does not remove.

    Verifiers gives the path only to the server, so it is read from the environment variables with
    which the server was started.
    """
    for process in getattr(runtime, "_background", []):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            for variable in variables:
                name, _, value = variable.partition(b"=")
                if name == b"MCP_PORT_FILE":
                    _remove_port_file(os.fsdecode(value))
