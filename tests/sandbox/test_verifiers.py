"""A verifiers environment whose commands, files and hidden tests are in sandboxes."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from sandboxed import needed, with_pool

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("verifiers is not installed", allow_module_level=True)
needed()

import verifiers.v1 as vf

from primerl.sandbox import verifiers_runtime

ENVIRONMENTS = Path(__file__).parents[1] / "helpers/verifiers_environments"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    yield
    sys.modules.pop("mending", None)


def test_environment_runs_in_sandboxes():
    client = vf.TrainClientConfig(base_url="http://127.0.0.1:1", api_key_var="NONE")
    context = vf.ModelContext(model="none", client=client)
    agent = {"harness": {"id": "mending"}, "runtime": {"type": "subprocess"}}
    config = vf.resolve_env_config({"taskset": {"id": "mending"}, "agent": agent})
    env = vf.load_environment(config)

    async def play(pool):
        type(env).make_runtime = staticmethod(lambda: verifiers_runtime(pool, timeout_s=60))
        async with env.serving():
            return await asyncio.gather(*(env.run_episode(task, context) for task in env.taskset))

    episodes = with_pool(play)
    traces = [episode.traces[0] for episode in episodes]
    assert [trace.errors for trace in traces] == [[], []]
    assert [trace.reward for trace in traces] == [1.0, 0.0]
    assert traces[0].info["source"] == "def double(x):\n    return x * 2\n"
    assert traces[0].info["said"].startswith("1000\n")
    assert not os.path.exists("/usr/escaped")


def test_runtime_keeps_verifiers_contract():
    async def use(pool):
        runtime = verifiers_runtime(pool)
        with pytest.raises(vf.SandboxError, match="not started"):
            await runtime.run(["true"], {})
        await runtime.start()
        try:
            done = await runtime.run(["sh", "-c", "echo $A; echo e >&2; exit 3"], {"A": "b"})
            assert (done.exit_code, done.stdout, done.stderr) == (3, "b\n", "e\n")
            await runtime.write("a/b", b"\x00\xff")
            assert await runtime.read("a/b") == b"\x00\xff"
            assert await runtime.read("a/b", max_bytes=2) == b"\x00\xff"
            with pytest.raises(vf.SandboxError, match="limit"):
                await runtime.read("a/b", max_bytes=1)
            with pytest.raises(vf.SandboxError, match="nothing"):
                await runtime.read("nothing", max_bytes=5)
            with pytest.raises(vf.SandboxError, match="nothing"):
                await runtime.read("nothing")
            with pytest.raises(vf.SandboxError, match="/usr/a"):
                await runtime.write("/usr/a", b"")
            await runtime.run_background(["sh", "-c", "echo up; sleep 100"], {}, "log")
            while await runtime.read("log") != b"up\n":
                await asyncio.sleep(0.01)
            assert await runtime.alive()
        finally:
            await runtime.stop()
        assert not await runtime.alive()

    with_pool(use, concurrency=1)
