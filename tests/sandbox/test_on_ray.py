"""Pools whose sandboxes are on fake Ray nodes: results, hosts that die, ends, and bad input."""

import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from fake_ray import two_nodes
from sandboxed import needed, processes_with
from waiting import until

from primerl.sandbox import (
    RayHosts,
    SandboxError,
    SandboxLimits,
    SandboxLost,
    SandboxPool,
    SandboxUnavailable,
    grade_repository,
)
from primerl.sandbox.tiers.interface import Options
from primerl.sandbox.tiers.on_ray import actor

needed()

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)
PACKAGES = str(Path(pytest.__file__).parents[1])
HOST = socket.gethostname()
FOLDER = """
import re
print(re.search("primerl-sandbox-[^/ ]+", open("/proc/self/mountinfo").read())[0])
"""
JOBS = [
    {"code": "import sys\nprint(sys.stdin.read(), open('a/b').read())", "files": {"a/b": b"c"}},
    {"code": "import sys\nsys.stderr.write('e')\nsys.exit(3)", "stdin": b"in"},
    {"code": ["sh", "-c", "echo $X; kill -9 $$"], "environment": {"X": "y"}},
    {"code": ["no-such-program"]},
    {"code": "import time\nprint('a', flush=True)\ntime.sleep(60)", "timeout_s": 0.5},
    {"code": "b'x' * (1 << 30)", "memory_bytes": 64 << 20},
    {"code": "while True: print('x' * 1000)", "output_bytes": 50_000},
    {"code": "import sys\nprint(len(sys.stdin.buffer.read()))", "stdin": b"z" * 5_000_000},
]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as fake:
        yield fake


@contextlib.asynccontextmanager
async def opened(cluster, *, actors=2, hosts=None, **arguments):
    """A pool on the nodes of the cluster, with all its actors, one for each node."""
    resources = {"environments": 2.0}
    hosts = RayHosts(
        **{"actors": actors, "resources": resources, "address": cluster.address, **(hosts or {})}
    )
    async with SandboxPool(hosts=hosts, **{"concurrency": 8, "warm": 2, **arguments}) as pool:
        await all_started(pool, actors)
        yield pool


async def all_started(pool, actors):
    async with asyncio.timeout(60):
        while len([host for host in pool._tier._hosts if not host.lost]) < actors:
            await asyncio.sleep(0.05)


def elsewhere(node):
    """The process ids of actors on other nodes."""
    return [pid for name, pids in actors_by_node().items() if name != node for pid in pids]


async def until_stats(pool, sessions):
    """Wait until the hosts have reported that so many sessions use an image."""

    def count():
        images = [image for host in pool.stats()["hosts"] for image in host["images"].values()]
        return sum(one["sessions"] for one in images)

    async with asyncio.timeout(60):
        while count() < sessions:
            await asyncio.sleep(0.05)


def actors_by_node():
    """The process ids of the actors with sandboxes in this cluster, by the name of their node."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if not (process.info["cmdline"] or [""])[0].startswith("ray::SandboxActor"):
            continue
        with contextlib.suppress(psutil.Error, AttributeError):  # it, or its raylet, has ended
            raylet = process.parent().environ()
            if raylet.get("RAY_AUTH_TOKEN") == os.environ["RAY_AUTH_TOKEN"]:
                found.setdefault(raylet["NODE"], []).append(process.pid)
    return found


def folders(names):
    """The folders of pools that exist, of those with the given names."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp", *Path("/tmp").glob("r*")]
    return {name for name in names for place in places if os.path.exists(f"{place}/{name}")}


def outcome(result):
    return result.stdout, result.stderr, result.exit, result.limits_hit


# ---- bad input ----


@NEEDS_RAY
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"actors": 0}, "actors is 0, expected at least 1"),
        ({"resources": {}}, "resources are {}, expected names with positive amounts"),
        ({"address": "head"}, "address is 'head', expected 'auto' or 'host:port'"),
        ({"start_timeout_s": 0.0}, "start_timeout_s is 0.0, expected a positive time"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RayHosts(**arguments)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ImportError, match=r"ray is not installed.*pip install '.\[ray\]'"):
        RayHosts()


@NEEDS_RAY
def test_an_address_at_which_nothing_answers_is_named():
    async def run():
        async with SandboxPool(hosts=RayHosts(address="127.0.0.1:1")):
            pass

    with pytest.raises(SandboxUnavailable, match="no Ray cluster answers at 127.0.0.1:1"):
        asyncio.run(run())


@NEEDS_RAY
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hosts", "arguments", "message"),
    [
        (
            {"resources": {"nothing": 1.0}, "start_timeout_s": 1.0},
            {},
            "no node of the Ray cluster had room for an actor with {'nothing': 1.0}",
        ),
        ({}, {"readable": ["/no/such"]}, f"on the host {HOST}: readable path '/no/such'"),
        ({}, {"python": "/no/python"}, f"on the host {HOST}: .*/no/python"),
    ],
)
def test_a_cluster_without_room_or_paths_is_refused_in_one_line(cluster, hosts, arguments, message):
    async def run():
        async with opened(cluster, actors=1, hosts=hosts, **arguments):
            pass

    with pytest.raises(SandboxUnavailable, match=message):
        asyncio.run(run())


# ---- the actor, in this process ----


def own_actor(test, **changed):
    """Run ``test`` with an actor that has started its tier."""
    defaults = {"limits": SandboxLimits(), "python": "", "readable": (), "allow_network": ()}
    options = Options(
        **defaults, **{"lease_s": 60.0, "start_timeout_s": 30.0, "image": None, **changed}
    )

    async def run():
        holder = actor.SandboxActor()
        assert (await holder.start("namespaces", options)).tier == "namespaces"
        try:
            return await test(holder)
        finally:
            await holder.close()

    return asyncio.run(run())


def test_a_sandbox_that_is_killed_while_it_is_created_is_gone():
    async def test(holder):
        making = asyncio.create_task(holder.make(1, {}, None))
        await asyncio.sleep(0)
        await holder.kill(1)
        assert await making is None
        return await holder.execute(1, None)

    error, alive = own_actor(test)

    assert str(error) == "the sandbox has ended"
    assert not alive


def test_sandboxes_that_end_by_themselves_are_reported_once():
    async def test(holder):
        for number in (1, 2):
            await holder.make(
                number, {"session": True, "lifetime_s": 1.0 if number == 1 else 60}, None
            )
        return (await holder.ended(60.0))[0], (await holder.ended(0.2))[0]

    assert own_actor(test) == ([1], [])


@pytest.mark.parametrize(
    "reason", ["the driver was silent", "the tier's helper processes have ended"]
)
def test_the_actor_ends_with_its_tier_or_when_the_driver_is_silent(monkeypatch, reason):
    ends = []
    monkeypatch.setattr(actor, "_end", ends.append)

    async def test(holder):
        if reason != "the driver was silent":
            os.kill(holder._tier.launcher._process.pid, signal.SIGKILL)
        while not ends:
            await asyncio.sleep(0.05)

    own_actor(test, lease_s=0.5 if reason == "the driver was silent" else 60.0)

    assert ends[0] == reason


# ---- results ----


@NEEDS_RAY
@pytest.mark.thorough
def test_runs_on_both_nodes_have_the_results_of_a_local_pool(cluster):
    async def run():
        async with opened(cluster) as pool, SandboxPool(concurrency=4, warm=0) as local:
            nodes = actors_by_node()
            programs = [f"print({number} ** 2)\n{FOLDER}" for number in range(40)]
            done = await asyncio.gather(*(pool.run(code, timeout_s=60) for code in programs))
            here = [outcome(await local.run(**job)) for job in JOBS]
            there = [outcome(one) for one in await asyncio.gather(*(pool.run(**j) for j in JOBS))]
            assert pool.isolation.tier == local.isolation.tier
            names = {one.stdout.decode().split()[1] for one in done}
            assert folders(names) == names
            helpers = [
                helper
                for pids in nodes.values()
                for pid in pids
                for helper in psutil.Process(pid).children(recursive=True)
            ]
        return nodes, done, here, there, names, helpers

    nodes, done, here, there, names, helpers = asyncio.run(run())

    assert {node: len(pids) for node, pids in nodes.items()} == {"1": 1, "2": 1}
    assert [int(one.stdout.split()[0]) for one in done] == [number**2 for number in range(40)]
    assert len(names) == 2  # a folder for each actor's tier
    assert there == here
    until(lambda: not actors_by_node())
    assert len(helpers) >= 2
    until(lambda: not any(one.is_running() for one in helpers))
    assert not folders(names)


@NEEDS_RAY
@pytest.mark.thorough
def test_sessions_keep_files_and_state_also_on_a_root(cluster, tmp_path):
    (tmp_path / "given").write_text("from the root")

    async def run():
        async with opened(cluster, warm=0, readable=[PACKAGES]) as pool:
            async with pool.session() as session:
                await session.write("f", b"x" * 3_000_000)
                await session.run("open('f', 'ab').write(b'y')")
                await session.python("n = 2")
                state = (await session.python("n + 1")).stdout
                size = len(await session.read("f"))
                with pytest.raises(OSError, match="no-such-file"):
                    await session.read("no-such-file")
                late = await session.run("while True: pass", timeout_s=0.3)
                kept = await session.snapshot("/sandbox")
            async with pool.session(snapshot=kept) as again:
                restored = len(await again.read("f"))
            root = await pool.prepare_root(tmp_path)
            async with contextlib.AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(pool.session(root=root)) for _ in range(4)
                ]
                given = [await one.read("/given") for one in sessions]
                hosts = {id(one._sandbox._host) for one in sessions}
            (tmp_path / "given").write_text("from the image")
            async with contextlib.AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(pool.session(image=str(tmp_path)))
                    for _ in range(10)
                ]
                given += [await one.read("/given") for one in sessions]
                await until_stats(pool, 10)
                images = [one["images_fetched"] for one in pool.stats()["hosts"]]
            with pytest.raises(SandboxError, match=f"on the host {HOST}: the image /no/image"):
                async with pool.session(image="/no/image"):
                    pass
            suite = {"test_a.py": b"import a\ndef test_two(): assert a.double(2) == 4\n"}
            passed = [
                (
                    await grade_repository(
                        pool, {"a.py": code}, suite, modules=["a"], packages=[PACKAGES]
                    )
                ).passed
                for code in (b"double = lambda n: 2 * n", b"double = lambda n: n", b"1 / 0")
            ]
            assert passed == [True, False, False]
            async with asyncio.timeout(60):
                while any(host.sandboxes for host in pool._tier._hosts):
                    await asyncio.sleep(0.05)
        return state, size, late, restored, given, hosts, images

    state, size, late, restored, given, hosts, images = asyncio.run(run())

    assert (state, size, restored) == (b"3\n", 3_000_001, 3_000_001)
    assert late.limits_hit == ("timeout",)
    assert given == [b"from the root"] * 4 + [b"from the image"] * 10
    assert len(hosts) == 2
    assert images == [1, 1]  # both have it, once


@NEEDS_RAY
@pytest.mark.thorough
def test_listed_servers_are_reached_from_the_actors_host(cluster):
    async def answer(request):
        return web.Response(text="answered")

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with opened(cluster, actors=1, allow_network=[server]) as pool:
                code = f"import urllib.request as r\nprint(r.urlopen('http://{server}').read())"
                return await pool.run(code, timeout_s=60)
        finally:
            await runner.cleanup()

    assert asyncio.run(run()).stdout == b"b'answered'\n"


# ---- ends ----


@NEEDS_RAY
@pytest.mark.thorough
def test_what_is_cancelled_or_ends_by_itself_is_dead_on_its_host(cluster):
    mark = f"mark-{secrets.token_hex(8)}"
    command = ["sh", "-c", f"sleep 600; echo {mark}"]

    async def ended(condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.05)

    async def run():
        async with opened(cluster, warm=0) as pool:
            running = asyncio.create_task(pool.run(command, timeout_s=600))
            await ended(lambda: processes_with(mark))
            running.cancel()
            await ended(lambda: not processes_with(mark))
            async with pool.session() as session:
                running = asyncio.create_task(session.run(command, timeout_s=600))
                await ended(lambda: processes_with(mark))
                running.cancel()
                await ended(lambda: not processes_with(mark) and not session.alive)
                with pytest.raises(SandboxError, match=f"sandbox on {HOST} has ended"):
                    await session.run("print(1)")
            async with pool.session(lifetime_s=1.0) as session:
                await ended(lambda: not session.alive)

    asyncio.run(run())


@NEEDS_RAY
@pytest.mark.thorough
def test_a_call_of_a_session_whose_actor_dies_names_the_host(cluster):
    mark = f"mark-{secrets.token_hex(8)}"

    async def run():
        async with opened(cluster, actors=1, warm=0) as pool:
            async with pool.session() as session:
                command = ["sh", "-c", f"sleep 600; echo {mark}"]
                running = asyncio.create_task(session.run(command, timeout_s=600))
                while not processes_with(mark):
                    await asyncio.sleep(0.05)
                for pid in [pid for pids in actors_by_node().values() for pid in pids]:
                    os.kill(pid, signal.SIGKILL)
                with pytest.raises(SandboxLost, match=f"the host {HOST} of sandboxes is lost"):
                    await running
                assert not session.alive
                with pytest.raises(SandboxError, match=f"sandbox on {HOST} has ended"):
                    await session.run("print(1)")
            return (await pool.run("print(2)", timeout_s=60)).stdout

    assert asyncio.run(run()) == b"2\n"
    until(lambda: not processes_with(mark))


DRIVER = """
import asyncio
from primerl.sandbox import RayHosts, SandboxPool

async def main():
    hosts = RayHosts(actors=2, resources={{"environments": 1}}, address={address!r})
    async with SandboxPool(hosts=hosts, concurrency=2, warm=2) as pool:
        await pool.run(["sh", "-c", "sleep 600; echo {mark}"], timeout_s=600)

asyncio.run(main())
"""


@NEEDS_RAY
@pytest.mark.thorough
def test_a_driver_that_is_killed_leaves_nothing_behind(cluster):
    mark = f"mark-{secrets.token_hex(8)}"
    script = DRIVER.format(address=cluster.address, mark=mark)
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE) as driver:
        driver.stdin.write(script.encode())
        driver.stdin.close()
        until(lambda: processes_with(mark))
        driver.kill()
    until(lambda: not processes_with(mark) and not actors_by_node())


@NEEDS_RAY
@pytest.mark.thorough
def test_runs_of_actors_and_nodes_that_die_are_done_on_others(cluster):
    """The last test: it leaves one node only."""
    mark = f"mark-{secrets.token_hex(8)}"

    async def runs(pool, kill):
        """Start runs on all hosts, kill something while they sleep, and return what they print."""
        programs = [["sh", "-c", f"sleep 1; echo {number} # {mark}"] for number in range(8)]
        running = [asyncio.create_task(pool.run(one, timeout_s=120)) for one in programs]
        while len(processes_with(mark)) < 4 and not any(one.done() for one in running):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(kill)
        return [int((await one).stdout) for one in running]

    async def run():
        async with opened(cluster, warm=2) as pool:
            [victim] = actors_by_node()["1"]
            first = await runs(pool, lambda: os.kill(victim, signal.SIGKILL))
            await all_started(pool, 2)
            second = await runs(pool, lambda: cluster.kill("1"))
            cluster.remove("1")
            cluster.add("3")
            await all_started(pool, 2)
            third = await runs(pool, lambda: None)
            return first, second, third, actors_by_node(), victim

    first, second, third, nodes, victim = asyncio.run(run())

    assert first == second == third == list(range(8))
    assert {node: len(pids) for node, pids in nodes.items()} == {"2": 1, "3": 1}
    assert victim not in [pid for pids in nodes.values() for pid in pids]
    until(lambda: not actors_by_node())
    cluster.remove("3")


@NEEDS_RAY
@pytest.mark.thorough
def test_sessions_of_a_node_that_drains_go_on_and_others_begin_elsewhere(cluster):
    cluster.add("4")

    async def run():
        hosts = {"resources": {"environments": 1.0}}
        async with (
            opened(cluster, warm=2, hosts=hosts) as pool,
            contextlib.AsyncExitStack() as stack,
        ):
            session = await stack.enter_async_context(pool.session())
            old = session._sandbox._host
            nodes = actors_by_node()
            await session.write("kept", b"until the end")
            node = cluster.name_of(old.node)
            cluster.drain(node)
            async with asyncio.timeout(60):
                while not old.draining or len(elsewhere(node)) < 2:
                    await asyncio.sleep(0.05)
            others = [await stack.enter_async_context(pool.session()) for _ in range(3)]
            runs = await asyncio.gather(*(pool.run(f"print({n})") for n in range(6)))
            kept = await session.read("kept")
            assert old not in {one._sandbox._host for one in others}
            assert old.sandboxes == {session._sandbox._number}
            await stack.aclose()
            async with asyncio.timeout(60):
                while not cluster.left(node):
                    await asyncio.sleep(0.05)
            return node, nodes, kept, [int(one.stdout) for one in runs]

    node, nodes, kept, runs = asyncio.run(run())

    assert node in nodes
    assert (kept, runs) == (b"until the end", list(range(6)))
    cluster.remove(node)
    if node != "4":
        cluster.remove("4")
