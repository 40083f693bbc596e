# ruff: noqa: E501 - programs for sandboxes
"""The same attacks in the tiers other than the default, and what else each of them promises."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_attacks import FURTHER, LIMITED, LISTED, PRELUDE
from sandboxed import everybodys_python, processes_with

from primerl.sandbox import (
    SandboxError,
    SandboxLimits,
    SandboxNotStarted,
    SandboxPool,
    SandboxUnavailable,
    probe,
)
from primerl.sandbox.guest import messages

ATTACKS = LISTED | FURTHER
# What a tier doesn't stop, as `pool.isolation` and docs/sandbox.md say.
NOT_STOPPED = {"existence of the host's files", "descriptor of a folder above"}
# Where no filesystem has a limit of its own, the watchdog ends what writes too much.
WATCHED = {"disk", "inodes", "fallocate and sparse files"}


def in_tier(tier, work, **arguments):
    """The result of ``work`` with a pool; a skip, with the reasons, where there is none."""

    async def run():
        async with SandboxPool(tier=tier, python=everybodys_python(), **arguments) as pool:
            return await work(pool)

    try:
        return asyncio.run(run())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def attacked(host):
    """Results of all attacks in the tier ``landlock``, each carried out once."""

    async def run_all(pool):
        async def attack(name):
            code = PRELUDE + ATTACKS[name]
            for mark, value in host.items():
                code = code.replace(mark, value)
            limit_s = 1.0 if LIMITED.get(name) == "timeout" else 90.0
            return name, await pool.run(code, timeout_s=limit_s)

        return dict(await asyncio.gather(*map(attack, ATTACKS)))

    # Without namespaces, an ordinary user's sandboxes share one limit of processes.
    together = 2 if os.getuid() == 0 else 1
    return in_tier("landlock", run_all, concurrency=together, limits=SandboxLimits())


BURNS = """
import time
kept = b"x" * (64 << 20)
while time.process_time() < 0.2: pass
"""
BURNS_IN_A_CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURNS + "time.sleep(600)"!r}])
"""


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_what_was_ended_says_what_it_used(tier):
    async def work(pool):
        slow = await pool.run(BURNS_IN_A_CHILD, timeout_s=3.0)
        flood = await pool.run(BURNS + "while True: print('x' * 1000)", timeout_s=60)
        async with pool.session() as session:
            turns = [await session.python(code) for code in ("x = 1", BURNS, "x = 1")]
        return slow, flood, turns

    slow, flood, (_, turn, idle) = in_tier(tier, work, concurrency=1)

    assert slow.limits_hit == ("timeout",)
    assert flood.limits_hit == ("output",)
    for used in (slow, flood, turn):
        assert 0.1 < used.cpu_s < 5.0
        assert 64 << 20 <= used.max_rss_bytes < 512 << 20
    assert turn.exit == 0
    assert idle.cpu_s <= 0.1  # of its own


@pytest.mark.thorough
def test_attacks_are_stopped_by_landlock(attacked, host):
    worked, limits = set(), {}
    for name, result in attacked.items():
        if b"PWNED" in result.stdout:
            worked.add(name)
        if result.limits_hit != ((LIMITED[name],) if name in LIMITED else ()):
            limits[name] = result.limits_hit
    assert worked <= NOT_STOPPED
    assert set(limits) <= WATCHED, limits
    assert set(limits.values()) <= {("disk",)}
    assert not processes_with(host["@MARK@"])


def test_sessions_without_namespaces():
    async def work(pool):
        async with pool.session() as session:
            await session.write("notes/a", bytes(range(256)))
            assert await session.read("notes/a") == bytes(range(256))
            await session.python("x = 20")
            slow = await session.run("import time; time.sleep(60)", timeout_s=0.5)
            assert slow.limits_hit == ("timeout",)
            assert (await session.run(["ls"], folder="notes")).stdout == b"a\n"
            with pytest.raises(SandboxError, match="root filesystems"):
                await pool.prepare_root("/usr")
            return await session.python("x")

    assert in_tier("landlock", work, concurrency=1).exit == 1  # that Python ended with the timeout


def test_nothing_outlives_an_owner():
    """The owner is killed at work; so are all of its sandboxes, daemons too."""
    in_tier("landlock", lambda pool: pool.run("pass"), concurrency=1)
    mark = f"298.{os.getpid()}"
    program = f"""
import asyncio
from primerl.sandbox import SandboxPool
async def main():
    async with SandboxPool(tier='landlock', python={everybodys_python()!r}, concurrency=1) as pool:
        async with pool.session() as session:
            await session.run(["sh", "-c", "setsid sleep {mark} & setsid sh -c 'setsid sleep {mark} &' &"])
            print(pool._tier.launcher.folder, flush=True)
            await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2])),
    )
    with owner:
        folder = owner.stdout.readline().decode().strip()
        worked = bool(processes_with(mark))
        owner.kill()
    assert folder
    assert worked
    deadline = time.monotonic() + 60
    while (processes_with(mark) or os.path.exists(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_with(mark)
    assert not os.path.exists(folder)


# No recursion gets to the end of the first of these folders, of short names, which the watchdog can
# look into; and an ordinary user can't list the last one.
STAYS = """
import os
home = os.getcwd()
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
os.chdir(home)
os.symlink("/usr", "link")
open("x", "w").write("x")
os.mkdir("locked", 0o300)
os.rename("x", "locked/x")
os._exit(0)
"""


@pytest.mark.thorough
def test_folders_of_ended_sandboxes_are_removed():
    async def work(pool):
        for _ in range(5):
            await pool.run(STAYS)  # which the watchdog may end
        folder = Path(pool._tier.launcher.folder) / "sandboxes"
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return len(list(folder.iterdir()))

    assert in_tier("landlock", work, concurrency=1, warm=1) <= 1


def test_landlocked_sandboxes_do_not_see_each_other():
    async def work(pool):
        async with pool.session() as first, pool.session() as second:
            await first.write("secret", b"of the first")
            path = (await first.run(["pwd"])).stdout.decode().strip()
            started = await first.run(["sh", "-c", "sleep 600 & echo $!"])
            pid = started.stdout.decode().strip()
            killed = await second.run(["kill", "-9", pid])
            read = await second.run(["cat", f"{path}/secret"])
            return read, killed, os.path.exists(f"/proc/{pid}")

    read, killed, alive = in_tier("landlock", work, concurrency=1)
    assert read.exit == 1
    assert b"ermission denied" in read.stderr
    assert killed.exit == 1
    assert alive


# ---- tiers that run a program for each job ----

# Takes the place of docker: notes how it was called, and runs the guest here, without isolation, with
# its name in its command line, by which ``rm`` ends all of it.
CONTAINER_ENGINE = """import json, os, signal, sys
with open({log!r}, "a") as file: file.write(json.dumps(sys.argv[1:]) + "\\n")
command = sys.argv[1:]
if command[0] == "info": sys.exit({info})
if command[0] == "image": sys.exit(print(1000) if "--format" in command else 1)
if command[0] in ("pull", "rmi"): sys.exit(0)
if command[0] == "run" and {short} and open({log!r}).read().count('["run"') > 1:
    os.write(1, b"\x06")
    sys.exit(254)
if command[0] == "rm":
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            words = open(f"/proc/{{pid}}/cmdline").read()
            if command[-1] in words and pid != os.getpid(): os.kill(pid, signal.SIGKILL)
        except OSError: pass
    sys.exit(0)
mounts = [command[i + 1].split(":") for i, part in enumerate(command) if part == "--volume"]
folders = {{target: source for source, target, *_ in mounts}}
home = folders.get("/sandbox") or {home!r}
program = command[-1].replace("/.guest", folders["/.guest"])
program = program.replace("single_job.main()", f"from primerl.sandbox.guest.jobs import interpreter as i; i.ENVIRONMENT['HOME'] = {{home!r}}; single_job.main()")
program = f"# {{command[command.index('--name') + 1]}}\\n{{program}}"
os.execv(sys.executable, [sys.executable, "-I", "-c", program])
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A stand-in for Docker on the PATH; returns what it was called with."""
    home = tmp_path / "home"
    home.mkdir()
    log = tmp_path / "calls"
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()

    def write(info=0, short=False):
        script = program.with_suffix(".py")
        script.write_text(
            CONTAINER_ENGINE.format(log=str(log), info=info, home=str(home), short=short),
            encoding="utf-8",
        )
        # No interpreter's path with spaces, nor a long one, can be in a first line with #!.
        command = shlex.join([sys.executable, str(script)])
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        return log

    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return write


def test_container_is_confined_by_its_options(docker):
    log = docker()

    async def work(pool):
        code = "import sys; print(sys.stdin.read(), open('a').read()); sys.exit(3)"
        done = await pool.run(code, stdin=b"in", files={"a": b"file"}, timeout_s=60)
        slow = await pool.run("import time; time.sleep(600)", timeout_s=0.5)
        flood = await pool.run("while True: print('x' * 1000)", output_bytes=5000, timeout_s=60)
        async with pool.session() as session:
            await session.write("kept", b"from job to job")
            kept = await session.read("kept")
            with pytest.raises(SandboxError, match="keeps its state"):
                await session.python("1")
        await asyncio.gather(*pool._tier._cleaning)
        assert not [*pool._tier.folder.glob("session-*")]
        return done, slow, flood, kept

    limits = SandboxLimits(memory_bytes=300 << 20, processes=20)
    done, slow, flood, kept = asyncio.run(used("docker", work, limits=limits, image="an-image"))
    assert (done.stdout, done.exit, done.limits_hit) == (b"in file\n", 3, ())
    assert (slow.exit, slow.limits_hit) == (None, ("timeout",))
    assert flood.limits_hit == ("output",)
    assert len(flood.stdout) == 5000
    assert kept == b"from job to job"
    call = next(row for row in log.read_text().splitlines() if row.startswith('["run"'))
    for options in (
        '"--network", "none"',
        '"--read-only"',
        '"--cap-drop", "ALL"',
        '"--security-opt", "no-new-privileges"',
        '"--pids-limit", "20"',
        f'"--memory", "{300 << 20}"',
        '"an-image", "python3", "-I", "-c"',
    ):
        assert options in call
    assert '"--user", "0' not in call


def test_containers_of_a_session_have_its_image(docker):
    log = docker()

    async def work(pool):
        async with pool.session(image="other:1") as session:
            done = await session.run("print(1)", timeout_s=60)
            stats = pool.stats()
        with pytest.raises(SandboxError, match="can't use the path /image.tar as an image"):
            async with pool.session(image="/image.tar"):
                pass
        return done, stats

    done, stats = asyncio.run(used("docker", work, image="an-image"))
    assert done.stdout == b"1\n"
    assert stats["images"] == {"other:1": {"bytes": 1000, "sessions": 1}}
    calls = [json.loads(row) for row in log.read_text().splitlines()]
    assert ["pull", "other:1"] in calls
    assert [call[call.index("python3") - 1] for call in calls if call[0] == "run"] == [
        "an-image",  # the test of the tier
        "other:1",
    ]
    assert calls[-1] == ["rmi", "other:1"]


def test_container_that_can_not_start_its_job(docker):
    log = docker(short=True)
    with pytest.raises(SandboxNotStarted):
        asyncio.run(used("docker", lambda pool: pool.run("pass")))
    assert log.read_text().count('["run"') == 4  # when the pool starts, and three attempts


SINGLE_JOB = """
import os, signal
from primerl.sandbox.guest import single_job
single_job.interpreter.ENVIRONMENT["HOME"] = "/"
if {short}:
    def chdir(path): raise OSError(12, "no memory")
    os.chdir = chdir
single_job.main()
"""
CLAIM = """
import os
for number in range(3, 64):
    try: os.write(number, b"!")
    except OSError: pass
os._exit({code})
"""


@pytest.mark.parametrize(
    ("short", "code", "exits"),
    [(True, 0, 254), (False, 3, 3), (False, 254, 255), (False, 126, 126)],
)
def test_only_the_guest_says_that_a_job_did_not_start(short, code, exits):
    header = {"kind": "code", "code": CLAIM.format(code=code), "files": [], "sizes": []}
    header |= {"environment": {}, "folder": ".", "rlimits": {}, "ends_in_s": 60}
    done = subprocess.run(
        [sys.executable, "-c", SINGLE_JOB.format(short=short)],
        input=messages.packed(header, []),
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (exits, b"\x06"), done.stderr


async def used(tier, work, **arguments):
    async with SandboxPool(tier=tier, concurrency=1, warm=0, **arguments) as pool:
        return await work(pool)


def test_engine_that_does_not_answer_is_refused(docker):
    docker(info=1)
    with pytest.raises(SandboxUnavailable, match=r"docker info: exit code 1"):
        asyncio.run(used("docker", lambda pool: pool.run("pass")))


def test_programs_that_are_not_installed_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for tier, program in {"gvisor": "runsc", "podman": "podman"}.items():
        failed = [found for found in asyncio.run(probe(tier)) if not found.ok]
        assert f"{program} is not installed" in failed[0].message


def test_network_is_refused_where_a_tier_has_none():
    with pytest.raises(ValueError, match="can't let sandboxes reach"):
        SandboxPool(tier="landlock", allow_network=["pypi.org:443"])


@pytest.mark.slow
def test_gvisor():
    """Also under gVisor's own kernel; a start takes about a second."""

    async def work(pool):
        names = ("shadow", "files of the host", "signal to the host", "daemon", "mount")
        done = [await pool.run(PRELUDE + ATTACKS[name], timeout_s=60) for name in names]
        async with pool.session() as session:
            await session.write("a", b"kept")
            return done, await session.read("a")

    done, kept = in_tier("gvisor", work, concurrency=1, warm=0)
    assert not any(b"PWNED" in result.stdout for result in done)
    assert kept == b"kept"


def test_a_tier_that_is_weaker_than_asked_for_is_refused():
    with pytest.raises(ValueError, match="'landlock' isolates less than min_isola"):
        SandboxPool(tier="landlock", min_isolation="namespaces")
    for accepted in ({"min_isolation": "namespaces"}, {"tier": "landlock"}, {}):
        SandboxPool(**accepted)
