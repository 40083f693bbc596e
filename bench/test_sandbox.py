"""Sandbox benchmarks: time per run, runs per second, many sandboxes at once, turns of a session.

    python -m pytest bench/test_sandbox.py -m "" --benchmark-only -s

A run is a function of five lines with three assertions. There is one row for each of our tiers that
this machine supports (a warm pool, a new sandbox for each run), one for ``subprocess`` (an
interpreter without isolation), and, if installed, one each for ``bwrap``, ``nsjail`` and ``runsc``
(gVisor) around the same interpreter.
"""

import asyncio
import io
import os
import resource
import shutil
import statistics
import subprocess
import tarfile
import time

import pytest
from sandbox_saboteurs import SABOTEURS
from swe_folder.repositories import unpacked
from swe_folder.runtimes import reading

from primerl.sandbox import Case, SandboxLimits, SandboxPool, SandboxUnavailable, grade

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


async def watch(lags, *, waited=lambda: 0.0):
    """Record every 2 ms how late the event loop wakes up, less the seconds that it ``waited``."""
    while True:
        started, before = time.perf_counter(), waited()
        await asyncio.sleep(0.002)
        lags.append(time.perf_counter() - started - 0.002 - (waited() - before))


def waited_for_processor():
    """Return the seconds for which this thread waited while other programs had the processors."""
    with open("/proc/thread-self/schedstat", encoding="utf-8") as file:
        return 1e-9 * int(file.read().split()[1])


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


@pytest.mark.parametrize("kind", ["nothing", "values", "archives"])
def test_lag_beside_hostile_outputs(benchmark, kind):
    """Measure how late the event loop wakes up while 50 hostile outputs a second arrive."""
    code = """
def f():
    import os, sys
    job = sys._getframe(1).f_locals["job"]
    numbers = ['{"int":"0x%x"}' % (k * (2**61 - 1)) for k in range(20000)]
    said = '{"list":[' + ','.join(numbers) + ']}'
    os.write(1, ("\\n" + job["mark"] + said + "\\n").encode())
    os._exit(0)
"""
    archive = hostile_archive()

    async def one(pool):
        if kind == "values":
            [verdict] = await grade(pool, code, [Case(expected=1)], function="f", timeout_s=60)
            assert not verdict.passed
        elif kind == "archives":
            with pytest.raises(ValueError):  # noqa: PT011 - the archive's names are too long
                await reading(unpacked, archive)

    async def work():
        lags, own, tasks = [], [], []
        async with SandboxPool(concurrency=4, warm=4) as pool:
            watchers = [asyncio.create_task(watch(lags))]
            watchers.append(asyncio.create_task(watch(own, waited=waited_for_processor)))
            for _ in range(100):
                tasks.append(asyncio.create_task(one(pool)))
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
            for watcher in watchers:
                watcher.cancel()
        return lags, own

    names = ("", ", without waits for a processor")
    found = benchmark.pedantic(lambda: asyncio.run(work()), rounds=1)
    for name, lags in zip(names, found, strict=True):
        late = sorted(lags)[int(0.99 * len(lags))]
        benchmark.extra_info[f"lag of the loop{name}, p99, ms"] = round(1e3 * late, 2)
    print(f"\n{kind}: {benchmark.extra_info}")


def hostile_archive():
    """Return an archive with 3,000 folders, a header of 80,000 digits, and one deep path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(3_000):
            archive.addfile(tarfile.TarInfo(f"a/{number}"))
        about = tarfile.TarInfo("digits")
        about.pax_headers = {"comment": "9" * 80_000}
        archive.addfile(about)
        archive.addfile(tarfile.TarInfo("a/" * 31_000 + "deep"))
    return buffer.getvalue()


def test_neighbours_of_saboteurs(benchmark):
    """Measure 16 runs at once beside a sandbox that takes all it can of one kernel counter."""

    async def timed(pool):
        times = []

        async def one():
            started = time.perf_counter()
            assert (await pool.run(CODE)).ok
            times.append(1e3 * (time.perf_counter() - started))

        for _ in range(8):
            await asyncio.gather(*(one() for _ in range(16)))
            await asyncio.sleep(0.2)
        return statistics.median(times)

    async def work():
        found = {}
        async with SandboxPool(python=PYTHON, concurrency=16, warm=16) as pool:
            for kind, program in SABOTEURS.items():
                alone = await timed(pool)  # again each time: other work on this machine varies
                async with pool.session() as session:
                    await session.write("saboteur.py", program.encode())
                    await session.run(["sh", "-c", "python3 -S saboteur.py > took 2>&1 &"])
                    await asyncio.sleep(1.0)
                    found[kind] = alone, await timed(pool)
        return found

    found = benchmark.pedantic(lambda: asyncio.run(work()), rounds=1)
    for kind, (alone, beside) in found.items():
        print(f"beside {kind}: {beside:.1f} ms (median), {beside / alone:.2f} of {alone:.1f} alone")
