"""Sandbox benchmarks: time per run, runs per second, many sandboxes at once, turns of a session.

    python -m pytest bench/test_sandbox.py -m "" --benchmark-only -s

A run is a function of five lines with three assertions. There is one row for each of our tiers that
this machine supports (a warm pool, a new sandbox for each run), one for ``subprocess`` (an
interpreter without isolation), and, if installed, one each for ``bwrap``, ``nsjail`` and ``runsc``
(gVisor) around the same interpreter.
"""

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import time

import pytest

from primerl.sandbox import SandboxLimits, SandboxPool, SandboxUnavailable

CODE = """
def add(a, b):
    return a + b
assert add(1, 2) == 3
assert add(0, 0) == 0
assert add(-1, 1) == 0
"""
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else "python3"
INTERPRETER = [PYTHON, "-I", "-S", "-c", CODE]
READ_ONLY = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64"]
COMMANDS = {
    "subprocess": INTERPRETER,
    "bwrap": [
        *("bwrap", "--unshare-all", "--die-with-parent", *READ_ONLY, "/lib64"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *INTERPRETER),
    ],
    "nsjail": ["nsjail", "-Mo", "-Q", "--chroot", "/", "--", *INTERPRETER],
    "runsc": ["runsc", "--network=none", "--ignore-cgroups", "do", *INTERPRETER],
}


TIERS = ["namespaces", "landlock", "gvisor"]


@pytest.mark.parametrize("name", [*TIERS, *COMMANDS])
def test_one_run(benchmark, name):
    """Measure one run at a time, from its start to its result."""
    if name not in TIERS:
        command = COMMANDS[name]
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{command[0]} doesn't work here")
        benchmark.pedantic(subprocess.run, args=(command,), rounds=60, warmup_rounds=3)
        return
    with asyncio.Runner() as runner:
        try:
            pool = runner.run(SandboxPool(tier=name, python=PYTHON, warm=8).__aenter__())
        except SandboxUnavailable as error:
            pytest.skip(str(error))

        def run():
            assert runner.run(pool.run(CODE)).ok

        def refill():
            runner.run(asyncio.sleep(0.03))  # the pause between two replies of a model

        rounds = 20 if name == "gvisor" else 200
        benchmark.pedantic(run, setup=refill, rounds=rounds, warmup_rounds=5)
        runner.run(pool.__aexit__(None, None, None))


@pytest.mark.parametrize("at_once", [1, 16, 50])
def test_throughput(benchmark, at_once):
    """Measure runs per second, and the CPU time per run, including helper processes."""
    runs = 200

    async def work():
        async with SandboxPool(concurrency=4) as pool:
            await asyncio.gather(*(pool.run(CODE) for _ in range(20)))
            lags = []
            watcher = asyncio.create_task(watch(lags))
            left = iter(range(runs))

            async def one():
                for _ in left:
                    assert (await pool.run(CODE)).ok

            started = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(at_once)))
            watcher.cancel()
            return runs / (time.perf_counter() - started), sorted(lags)

    rate, lags = benchmark.pedantic(lambda: asyncio.run(work()), rounds=1)
    benchmark.extra_info["runs per second"] = round(rate, 1)
    benchmark.extra_info["lag of the loop, p99, ms"] = round(1e3 * lags[int(0.99 * len(lags))], 2)
    print(f"\n{at_once} at once: {benchmark.extra_info}")


async def watch(lags):
    """Record every 2 ms how late the event loop wakes up."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.002)
        lags.append(time.perf_counter() - started - 0.002)


def test_three_hundred_alive(benchmark):
    """Open 300 sessions that are alive at once, then run a command in each."""

    async def work():
        async with SandboxPool(concurrency=8, warm=0, starting=8) as pool:
            started = time.perf_counter()
            sessions = [pool.session() for _ in range(300)]
            alive = await asyncio.gather(*(session.__aenter__() for session in sessions))
            made = time.perf_counter() - started
            results = await asyncio.gather(*(session.run("print(1)") for session in alive))
            assert all(result.ok for result in results)
            executed = time.perf_counter() - started - made
            await asyncio.gather(*(session.__aexit__(None, None, None) for session in sessions))
            return made, executed

    # Each session needs two file descriptors, and two pipes while it runs a command.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    made, executed = benchmark.pedantic(lambda: asyncio.run(work()), rounds=1)
    print(f"\n300 made in {made:.2f} s, all ran in {executed:.2f} s")


@pytest.mark.parametrize("kind", ["command", "forked Python", "stateful Python", "write and read"])
def test_session_of_200_turns(benchmark, kind):
    """Measure the turns of one session. ``command`` executes ``true``."""

    async def work():
        times = []
        async with SandboxPool(limits=SandboxLimits()) as pool, pool.session() as session:
            for turn in range(200):
                started = time.perf_counter()
                if kind == "command":
                    assert (await session.run(["true"])).ok
                elif kind == "forked Python":
                    assert (await session.run(f"x = {turn}")).ok
                elif kind == "stateful Python":
                    assert (await session.python(f"x = {turn}")).ok
                else:
                    await session.write("file", b"x")
                    assert await session.read("file") == b"x"
                times.append(1e3 * (time.perf_counter() - started))
        return times

    times = benchmark.pedantic(lambda: asyncio.run(work()), rounds=1)
    low, middle = min(times), statistics.median(times)
    print(f"\n{kind}: {middle:.2f} ms a turn (median), {low:.2f} at least")
