"""Environments in Ray actors on fake nodes: actors, nodes and drivers that die, and bad input."""

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
import sandboxed
from fake_ray import two_nodes
from scripted_vllm import ScriptedVLLM
from waiting import until

from primerl import rollout, serving, testing
from primerl._common.ray.versions import differences, versions
from primerl.types import NOT_SAMPLED, Rollout, Sample, SamplingParams

HELPERS = Path(__file__).parents[2] / "helpers"
PARAMS = SamplingParams(max_tokens=4)
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)
BAD = [
    ({"actors": 0}, "actors is 0, expected at least 1"),
    ({"actors": (3, 2)}, "actors are (3, 2), expected the least number, then the most"),
    ({"idle_s": 0.0}, "idle_s is 0.0, expected a positive time"),
    ({"drain_timeout_s": -1.0}, "drain_timeout_s is -1.0, expected at least 0"),
    ({"rollouts_per_actor": 0}, "rollouts_per_actor is 0, expected at least 1"),
    ({"timeout_s": 0.0}, "timeout_s is 0.0, expected a positive time"),
    ({"resources": {}}, "resources are {}, expected names with positive amounts"),
    ({"address": "head"}, "address is 'head', expected 'auto' or 'host:port'"),
]


class SandboxTools:
    """Two turns, with a program in a sandbox between them; one pool for each process."""

    def __init__(self):
        self._pool = None
        self._opening = asyncio.Lock()

    async def __call__(self, task, engine, params):
        async with self._opening:
            if self._pool is None:
                from primerl.sandbox import SandboxPool

                self._pool = await SandboxPool(concurrency=2, warm=0).__aenter__()
        first = await engine.generate([2, 3], params, session="a")
        ran = await self._pool.run(f"print(sum({first.token_ids.tolist()}))")
        right = int(ran.stdout) == int(first.token_ids.sum())
        prompt = [2, 3, *first.token_ids.tolist(), 5]
        second = await engine.generate(prompt, params, session="a")
        return Rollout(
            samples=[
                Sample(
                    token_ids=[*prompt, *second.token_ids],
                    loss_mask=[False, False, True, True, True, True, False, True, True, True, True],
                    behavior_logprobs=[0, 0, *first.logprobs, 0, *second.logprobs],
                    versions=[
                        *[NOT_SAMPLED] * 2,
                        *first.versions,
                        NOT_SAMPLED,
                        *second.versions,
                    ],
                )
            ],
            reward=float(right),
            metrics={"node": float(os.environ["NODE"]), "pid": os.getpid()},
        )

    async def aclose(self):
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)

    def __reduce__(self):
        return SandboxTools, ()


def play(environment, tasks=({},), *, engine=None):
    """Play every task once; errors are results."""

    async def run():
        sampler = engine or testing.ScriptedEngine()
        try:
            return await asyncio.gather(
                *(environment(task, sampler, PARAMS) for task in tasks), return_exceptions=True
            )
        finally:
            await environment.aclose()

    return asyncio.run(run())


async def where(task, engine, params):
    """One turn; metrics say where, and a task may fail, wait or block."""
    await engine.generate([2, 3], params)
    assert "RAY_AUTH_TOKEN" not in os.environ
    metrics = {"pid": os.getpid(), "ran_by": os.getppid(), "version": engine.version}
    metrics["node"] = float(os.environ["NODE"])
    match task.get("do"):
        case "fail":
            raise KeyError(task["id"])
        case "begin":
            path = Path(task["path"])
            (path / f"{task['id']}-{os.environ['NODE']}").touch()
            while not (path / "go").exists():
                await asyncio.sleep(0.05)
        case "wait":
            Path(task["path"]).touch()
            try:
                await asyncio.sleep(3600)
            finally:
                Path(task["path"]).unlink()
    return Rollout(samples=[], reward=1.0, metrics=metrics)


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as fake:
        yield fake


# ---- bad input ----


@NEEDS_RAY
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rollout.on_ray(SandboxTools(), **arguments)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ImportError, match=r"ray is not installed.*pip install '.\[ray\]'"):
        rollout.on_ray(SandboxTools())


@NEEDS_RAY
def test_an_environment_that_cannot_be_pickled_is_named():
    with pytest.raises(ValueError, match="the argument 'environment'"):
        rollout.on_ray(threading.Lock())


@NEEDS_RAY
def test_an_address_at_which_nothing_answers_fails_every_rollout_at_once():
    environment = rollout.on_ray(SandboxTools(), address="127.0.0.1:1")

    errors = play(environment, [{}] * 3)

    assert {type(one) for one in errors} == {RuntimeError}
    assert "no Ray cluster answers at 127.0.0.1:1" in str(errors[0])


@NEEDS_RAY
def test_a_server_of_another_kind_fails_every_rollout_in_bounded_time(monkeypatch):
    monkeypatch.setattr("primerl._common.ray.cluster.CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ScriptedVLLM() as other:
        for port in (server.getsockname()[1], other.port):
            (error,) = play(rollout.on_ray(SandboxTools(), address=f"127.0.0.1:{port}"))
            assert f"no Ray cluster answers at 127.0.0.1:{port}" in str(error)


def test_versions_that_differ_are_listed_by_name():
    ours = {"Python": "3.11.7", "numpy": "2.3.5", "verifiers": "0.4.0"}
    theirs = {"Python": "3.11.7", "numpy": "1.26.0", "ray": "2.0"}

    assert differences(ours, ours) == ""
    assert differences(theirs, ours) == (
        "numpy 1.26.0 instead of 2.3.5, verifiers missing instead of 0.4.0"
    )
    assert versions()["Python"].startswith("3.")


# ---- on a cluster ----


@NEEDS_RAY
@pytest.mark.thorough
def test_an_engine_of_this_process_is_called_from_the_actors_and_errors_have_their_names(
    cluster, tmp_path
):
    engine = testing.ScriptedEngine(latency=0.001)
    engine.update_weights({}, version=3)
    environment = rollout.on_ray(where, actors=2, address=cluster.address)
    waits = tmp_path / "waits"

    async def run():
        try:
            playing = [environment({"id": str(n)}, engine, PARAMS) for n in range(20)]
            rollouts = await asyncio.gather(*playing)
            with pytest.raises(KeyError, match="x") as caught:
                await environment({"id": "x", "do": "fail"}, engine, PARAMS)
            late = asyncio.create_task(
                environment({"do": "wait", "path": str(waits)}, engine, PARAMS)
            )
            while not waits.exists():
                await asyncio.sleep(0.01)
            late.cancel()
            while waits.exists():  # it is cancelled in its actor
                await asyncio.sleep(0.01)
            return rollouts, caught.value, environment.members()
        finally:
            await environment.aclose()

    rollouts, error, members = asyncio.run(run())

    assert {one.metrics["version"] for one in rollouts} == {3}
    assert engine.calls == 22
    assert "in where" in "".join(error.__notes__)
    assert any(one["name"].endswith(f" on {socket.gethostname()}") for one in members)


OTHER_MSGSPEC = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "0.0.1" if name == "msgspec" else version(name)
"""
DRIVER = """
import sys
sys.path[:0] = {folders!r}
from test_on_ray import where
from primerl import rollout, testing
from primerl.types import SamplingParams
import asyncio

async def main():
    environment = rollout.on_ray(where, actors=1, address={address!r})
    engine = testing.ScriptedEngine()
    played = await environment({{}}, engine, SamplingParams(max_tokens=4))
    print("process", int(played.metrics["pid"]), flush=True)
    await environment({{"do": "wait", "path": {path!r}}}, engine, SamplingParams(max_tokens=4))

asyncio.run(main())
"""


@NEEDS_RAY
@pytest.mark.thorough
def test_a_driver_that_is_killed_leaves_nothing_behind(cluster, tmp_path):
    folders = [str(Path(__file__).parent), *map(str, (HELPERS, HELPERS.parent))]
    path = tmp_path / "waits"
    script = DRIVER.format(folders=folders, address=cluster.address, path=str(path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as driver:
        line = next(one for one in driver.stdout if one.startswith(b"process"))
        pid = int(line.split()[1])
        until(path.exists)
        actor = actor_of(pid)
        driver.kill()
    until(lambda: not psutil.pid_exists(pid) and not psutil.pid_exists(actor))


@NEEDS_RAY
@pytest.mark.thorough
def test_a_cluster_without_room_or_with_other_versions_is_named(cluster, tmp_path):
    without = rollout.on_ray(
        where,
        actors=1,
        resources={"nothing": 1.0},
        address=cluster.address,
        start_timeout_s=2.0,
    )
    (error,) = play(without)
    assert isinstance(error, RuntimeError)
    assert "no node of the Ray cluster had room for an actor with {'nothing': 1.0}" in str(error)

    (tmp_path / "sitecustomize.py").write_text(OTHER_MSGSPEC)
    cluster.add("other", resource="others", PYTHONPATH=str(tmp_path))
    other = rollout.on_ray(where, actors=1, resources={"others": 1.0}, address=cluster.address)
    (error,) = play(other)
    cluster.remove("other")
    assert f"the host {socket.gethostname()} has msgspec 0.0.1 instead of" in str(error)


@NEEDS_RAY
@pytest.mark.thorough
def test_nodes_and_actors_that_die_lose_no_rollout(cluster):
    """200 rollouts over two nodes; an actor and a raylet are killed, and nodes leave and join."""
    sandboxed.needed()
    trained, seen = [], set()
    with (
        ScriptedVLLM(token_s=0.01) as server,
        serving.VLLMEngine([server.url], down_timeout_s=5.0) as engine,
    ):
        engine.adopt(0)
        with rollout.worker(
            engine,
            rollout.on_ray(SandboxTools(), actors=4, rollouts_per_actor=4, address=cluster.address),
            [{"id": str(number)} for number in range(50)],
            params=PARAMS,
            group_size=4,
            groups_per_step=5,
            max_staleness=1,
            retries=2,
            timeout_s=120.0,
        ) as rollouts:
            for step in range(10):
                trained += rollouts.take(version=step)
                engine.load_weights({}, version=step + 1)
                if step in (1, 3, 6):
                    until(lambda: len(living(rollouts)) == 4)
                actors = living(rollouts)
                seen |= set(actors)
                if step == 1:  # the actor is the owner of the process's supervisors
                    os.kill(actor_of(actors[0]), signal.SIGKILL)
                if step == 3:
                    cluster.add("3")
                    cluster.kill("1")
                if step == 6:
                    cluster.remove("1")
                    cluster.remove("2")
            stats = rollouts.stats()
    cluster.remove("3")

    assert len(trained) == 50
    played = [one for group in trained for one in group.rollouts]
    assert len(played) == 200
    assert all(one.reward == 1.0 for one in played)
    assert {int(one.metrics["node"]) for one in played} == {1, 2, 3}
    assert stats["started"] == stats["trained"] + stats["dropped"] + (
        stats["in_flight"] + stats["buffered"]
    )
    assert stats["trained"] == 50
    assert stats["errors"] == {}
    assert Counter(group.task_id for group in trained).most_common(1)[0][1] <= 2
    assert len(server.bodies) >= 400
    until(lambda: not any(map(psutil.pid_exists, seen)))


class Playing:
    """Rollouts that have begun and wait for ``go``."""

    def __init__(self, environment, folder):
        folder.mkdir()
        self.environment = environment
        self.folder = folder
        self.engine = testing.ScriptedEngine()

    def begin(self, count):
        return [
            asyncio.create_task(
                self.environment(
                    {"id": number, "do": "begin", "path": str(self.folder)}, self.engine, PARAMS
                )
            )
            for number in range(count)
        ]

    async def begun(self, count):
        """Wait until as many rollouts have begun; return the names of their nodes."""
        return await becomes(lambda: self._nodes(count))

    def _nodes(self, count):
        names = [path.name.split("-")[1] for path in self.folder.iterdir() if "-" in path.name]
        return names if len(names) == count else None

    async def quick(self):
        """Play a rollout that does not wait; return its node."""
        played = await self.environment({}, self.engine, PARAMS)
        return int(played.metrics["node"])

    def go(self):
        (self.folder / "go").touch()


async def becomes(condition):
    """Wait until a condition is true; return its value."""
    async with asyncio.timeout(90):
        while not (value := condition()):
            await asyncio.sleep(0.05)
    return value


def pids(environment):
    return {one["pid"] for one in environment.members() if one["alive"]}


@NEEDS_RAY
@pytest.mark.thorough
def test_rollouts_of_a_node_that_drains_end_there_and_no_others_begin(cluster, tmp_path):
    """The rollouts of the first node end there; those of the second have no time, and move."""
    for name in ("7", "8"):
        cluster.add(name, resource="leaving")
    environment = rollout.on_ray(
        where,
        actors=2,
        rollouts_per_actor=2,
        address=cluster.address,
        resources={"leaving": 1.0},
    )

    async def run():
        first, second = (Playing(environment, tmp_path / name) for name in ("first", "second"))
        try:
            playing = first.begin(4)
            nodes = await first.begun(4)
            before = pids(environment)
            cluster.drain("7")
            await becomes(lambda: pids(environment) - before and len(pids(environment)) == 2)
            others = {await first.quick() for _ in range(4)}
            assert not cluster.left("7")
            first.go()
            ended = await asyncio.gather(*playing)
            await becomes(lambda: cluster.left("7"))

            moved = second.begin(1)
            await second.begun(1)
            await asyncio.to_thread(cluster.add, "9", resource="leaving")
            cluster.drain("8", seconds=6)  # too little for a rollout, after the margin
            found = await second.begun(2)  # it has begun again
            second.go()
            [again] = await asyncio.gather(*moved)
            await becomes(lambda: cluster.left("8"))
            return nodes, others, ended, found, again
        finally:
            await environment.aclose()

    nodes, others, ended, found, again = asyncio.run(run())

    assert Counter(nodes) == {"7": 2, "8": 2}
    assert others == {8}
    assert Counter(str(int(one.metrics["node"])) for one in ended) == Counter(nodes)
    assert sorted(found) == ["8", "9"]
    assert again.metrics["node"] == 9
    for name in ("7", "8", "9"):
        cluster.remove(name)


@NEEDS_RAY
@pytest.mark.thorough
def test_actors_are_added_while_rollouts_wait_and_end_when_idle(cluster, tmp_path):
    for name in ("9", "10"):  # earlier tests have killed and drained nodes
        cluster.add(name, resource="growing")
    environment = rollout.on_ray(
        where,
        actors=(1, 3),
        rollouts_per_actor=1,
        resources={"growing": 1},
        idle_s=1.0,
        address=cluster.address,
    )

    async def run():
        playing = Playing(environment, tmp_path / "first")
        try:
            await playing.quick()
            few = len(environment.members())
            rollouts = playing.begin(4)
            await playing.begun(3)
            many = pids(environment)
            playing.go()
            played = await asyncio.gather(*rollouts)
            await becomes(lambda: len(environment.members()) == 1)
            kept = pids(environment)
            await playing.quick()
            return few, many, kept, played
        finally:
            await environment.aclose()

    few, many, kept, played = asyncio.run(run())

    assert (few, len(many), len(kept)) == (1, 3, 1)
    assert kept < many
    assert {one.metrics["pid"] for one in played} == many
    until(lambda: not any(map(psutil.pid_exists, many)))
    for name in ("9", "10"):
        cluster.remove(name)


def living(rollouts):
    """Return the process ids of the environments that are running."""
    return [one["pid"] for one in rollouts.members()[1:] if one["alive"]]


def actor_of(pid):
    """Return the process id of the actor that started a process."""
    return psutil.Process(pid).parent().parent().ppid()
