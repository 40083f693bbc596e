"""An environment of two buggy functions; a scripted agent fixes one, and hidden tests grade."""

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Bugfix", "BugfixEnv", "BugfixHarness"]

SOURCES = {
    "double": (
        "def double(x):\n    return x * 3\n",
        "from src import double\nassert double(4) == 8\n",
    ),
    "half": ("def half(x):\n    return x // 3\n", "from src import half\nassert half(8) == 4\n"),
}
COMMANDS = ("sed -i 's/x \\* 3/x * 2/' src.py", "touch /usr/escaped; id -u; cat src.py")


class BugData(vf.TaskData):
    source: str
    tests: str


class Bug(vf.Task[BugData]):
    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("src.py", self.data.source.encode())

    @vf.reward
    async def tests_pass(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        await runtime.write("hidden.py", self.data.tests.encode())
        done = await runtime.run(["python3", "hidden.py"], {})
        source = await runtime.read("src.py", max_bytes=10_000)
        trace.info["source"] = source.decode()
        return float(done.exit_code == 0)


class Bugfix(vf.Taskset[Bug, vf.TasksetConfig]):
    def load(self):
        return [
            Bug(BugData(name=name, prompt="Mend it.", source=source, tests=tests), self.config.task)
            for name, (source, tests) in SOURCES.items()
        ]


class BugfixHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs):
        for command in COMMANDS:
            done = await runtime.run(["sh", "-c", command], {})
        trace.info["said"] = done.stdout
        return ProgramResult(0, "", "")


class BugfixConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class BugfixEnv(vf.Env[BugfixConfig]):
    """Environment that runs each episode in a runtime from ``make_runtime``."""

    make_runtime = None

    async def run(self, task, agents):
        runtime = type(self).make_runtime()
        await runtime.start()
        try:
            await agents.agent.run(task, runtime=runtime)
        finally:
            await runtime.stop()
