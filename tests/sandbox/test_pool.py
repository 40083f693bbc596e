# ruff: noqa: E501 - programs for sandboxes
"""Pools and sessions: results, limits, job, ends, and replies that break the protocol."""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import BadReply, SandboxError, SandboxLimits, SandboxPool
from primerl.sandbox.guest import messages
from primerl.sandbox.tiers.interface import Job
from primerl.sandbox.tiers.local.slots import Slot, checked_reply

needed()

REPOSITORY = Path(__file__).parents[2]


def test_results():
    async def run(pool):
        done = await pool.run(
            "import sys\nprint(sys.stdin.read(), open('a/b').read())\nsys.stderr.write('e')\nsys.exit(3)",
            stdin=b"in",
            files={"a/b": b"file"},
        )
        command = await pool.run(["sh", "-c", "echo $X; kill -9 $$"], environment={"X": "y"})
        absent = await pool.run(["no-such-program"])
        large = await pool.run(
            "import sys\nprint(len(sys.stdin.buffer.read()))", stdin=b"z" * 5_000_000
        )
        error = await pool.run("def f():\n    return 1 / 0\nf()")
        return done, command, absent, large, error

    done, command, absent, large, error = with_pool(run)
    assert (done.stdout, done.stderr, done.exit) == (b"in file\n", b"e", 3)
    assert (command.stdout, command.exit) == (b"y\n", -9)
    assert absent.exit == 127
    assert large.stdout == b"5000000\n"
    assert b"return 1 / 0" in error.stderr
    assert error.exit == 1


def test_output_is_cut_and_its_writer_ended():
    async def run(pool):
        return await pool.run("while True: print('x' * 1000)", output_bytes=50_000)

    result = with_pool(run)
    assert result.limits_hit == ("output",)
    assert len(result.stdout) == 50_000


@pytest.mark.parametrize(
    "arguments",
    [{"code": []}, {"code": "", "timeout_s": 0}, {"code": "", "memory_bytes": -1}],
)
def test_bad_arguments(arguments):
    async def run(pool):
        with pytest.raises(ValueError, match=r"empty|positive"):
            await pool.run(**arguments)

    with_pool(run, warm=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tier": "hope"},
        {"concurrency": 0},
        {"readable": ["relative"]},
        {"readable": ["/no/such/folder"]},
        {"allow_network": ["no-port"]},
    ],
)
def test_bad_pools(arguments):
    with pytest.raises(ValueError, match=r"."):
        SandboxPool(**arguments)
    with pytest.raises(ValueError, match="positive"):
        SandboxLimits(processes=0)
    with pytest.raises(ValueError, match="64 are needed"):
        SandboxLimits(open_files=20)


@pytest.mark.parametrize("path", ["/tmp", "/usr/../dev/shm", "/var/tmp/", "//tmp"])
def test_folders_of_a_sandboxs_own_are_refused_as_readable_paths(path):
    with pytest.raises(ValueError, match=r" 'namespaces', which have a .*: name the folders below"):
        SandboxPool(readable=[path])
    SandboxPool(readable=[path], tier="landlock")  # has the host's


def test_smallest_number_of_open_files():
    result = with_pool(lambda pool: pool.run("print(1)"), limits=SandboxLimits(open_files=64))
    assert result.stdout == b"1\n"


def test_runs_start_in_order():
    async def run(pool):
        ended = []

        async def one(number):
            await pool.run("pass")
            ended.append(number)

        await asyncio.gather(*(one(number) for number in range(12)))
        return ended

    assert with_pool(run, concurrency=1) == list(range(12))


def test_cancelled_run_is_ended_and_the_pool_goes_on():
    async def run(pool):
        task = asyncio.create_task(pool.run("while True: pass", timeout_s=600))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pool.run("print(1)")

    assert with_pool(run, concurrency=1).stdout == b"1\n"


def test_closed_pool_says_so():
    async def run(pool):
        return pool

    async def use(pool):
        with pytest.raises(SandboxError, match="isn't running"):
            await pool.run("pass")

    asyncio.run(use(with_pool(run)))
    asyncio.run(use(SandboxPool()))  # not yet entered


# ---- sessions ----


def test_session_keeps_files_python_and_background_processes():
    async def run(pool):
        async with pool.session() as session:
            await session.write("notes/a.txt", b"hello")
            assert await session.read("notes/a.txt") == b"hello"
            assert (await session.run(["cat", "a.txt"], folder="/sandbox/notes")).stdout == b"hello"
            assert (await session.python("x = 20")).ok
            assert (await session.python("x += 1\nx * 2")).stdout == b"42\n"
            assert b"ZeroDivisionError" in (await session.python("1 / 0")).stderr
            assert (await session.python("raise SystemExit")).exit == 1
            assert (await session.python("x")).stdout == b"21\n"
            started = await session.run(["sh", "-c", "sleep 300 & echo $!"])
            assert (await session.run(["kill", "-0", started.stdout.decode().strip()])).ok
            slow = await session.python("while True: pass", timeout_s=0.5)
            assert slow.limits_hit == ("timeout",)
            assert (await session.python("x")).exit == 1  # a new Python
            assert await session.read("notes/a.txt") == b"hello"
            flood = await session.run(["yes"], output_bytes=1000)
            assert flood.limits_hit == ("output",)
            for path in ("/dev/zero", "/sandbox", "/nothing"):
                with pytest.raises(OSError, match=path):
                    await session.read(path)
            with pytest.raises(OSError, match="more than"):
                await session.read("notes/a.txt", max_bytes=2)
            with pytest.raises(OSError, match="/usr/x"):
                await session.write("/usr/x", b"")

    with_pool(run, concurrency=1)


def test_calls_of_a_session_at_once_wait_for_one_another():
    async def run(pool):
        async with pool.session() as session:
            first = session.run(["sh", "-c", "sleep 0.3; echo first"], timeout_s=20)
            second = session.run(["echo", "second"], timeout_s=20)
            done = await asyncio.gather(first, second, session.write("a", b"third"))
            assert await session.read("a") == b"third"
            return done

    first, second, _ = with_pool(run, concurrency=2)
    assert (first.stdout, first.exit) == (b"first\n", 0)
    assert (second.stdout, second.exit) == (b"second\n", 0)


def test_python_that_attacks_its_turns():
    async def run(pool):
        async with pool.session() as session:
            code = """
import os
for number in range(3, 200):
    try: os.write(number, b"x" * 9); os.write(number, bytes(9)); os.close(number)
    except OSError: pass
"""
            await session.python(code, timeout_s=20)
            return await session.python("print('again')", timeout_s=20)

    assert with_pool(run, concurrency=1).stdout == b"again\n"


def test_session_ends_with_its_lifetime():
    async def run(pool):
        async with pool.session(lifetime_s=1.0) as session:
            result = await session.run("import time; time.sleep(600)", timeout_s=600)
            assert result.limits_hit == ("died",)
            with pytest.raises(SandboxError, match="has ended"):
                await session.run(["true"])

    with_pool(run, concurrency=1)


def test_snapshot_is_gone_on_from_twice():
    async def run(pool):
        async with pool.session() as session:
            await session.run(
                ["sh", "-c", "echo one > a; ln -s /etc/passwd link; mkdir d; mkfifo p"]
            )
            snapshot = await session.snapshot()
        found = []
        for _ in range(2):
            async with pool.session(snapshot=snapshot) as session:
                found.append((await session.run(["sh", "-c", "cat a; readlink link; ls"])).stdout)
                await session.write("a", b"other")
        return found

    assert with_pool(run, concurrency=1) == [b"one\n/etc/passwd\na\nd\nlink\n"] * 2


def test_root_filesystem_of_layers(tmp_path):
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for folder in (lower / "data", lower / "gone", upper / "data", upper / "replaced"):
        folder.mkdir(parents=True)
    (lower / "data" / "a").write_text("lower a")
    (lower / "data" / "b").write_text("lower b")
    (lower / "gone" / "x").write_text("x")
    (lower / "trap").symlink_to(tmp_path)  # a layer that tries to lead the next one astray
    (lower / "replaced").symlink_to("/etc")
    (upper / "data" / "b").write_text("upper b")
    (upper / "data" / ".wh.a").touch()
    (upper / ".wh.gone").touch()
    (upper / "trap").mkdir()
    (upper / "trap" / "escaped").write_text("x")

    async def run(pool):
        root = await pool.prepare_root(lower, upper)
        assert root.copy_on_write in ("overlay", "copy")
        async with pool.session(root=root) as session:
            listing = await session.run(["sh", "-c", "cat /data/*; ls /data /trap; ls -d /gone"])
            changed = await session.run(
                ["sh", "-c", "echo new > /data/b && mkdir /more && cat /data/b"]
            )
            python = await session.run("print(open('/data/b').read())")
            assert await session.read("/data/b") == b"new\n"
        async with pool.session(root=root) as session:
            again = await session.run(["cat", "/data/b"])
        return listing, changed, python, again

    listing, changed, python, again = with_pool(run, concurrency=1)
    assert listing.stdout == b"upper b/data:\nb\n\n/trap:\nescaped\n"
    assert b"/gone" in listing.stderr
    assert changed.stdout == b"new\n", changed
    assert python.stdout == b"new\n\n"
    assert again.stdout == b"upper b"
    assert not (tmp_path / "escaped").exists()


def test_race_of_links_against_transfers_stays_inside(tmp_path):
    """A folder flips between real and a link to the host's while the host reads and writes in it."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "f").write_bytes(b"host secret")
    (tmp_path / "target").chmod(0o777)
    tmp_path.chmod(0o755)
    flip = f"""
import os
os.makedirs("/sandbox/real", exist_ok=True); open("/sandbox/real/f", "w").write("inside")
if os.fork(): os._exit(0)
while True:
    try:
        os.symlink("{tmp_path}/target", "/sandbox/t"); os.unlink("/sandbox/t")
        os.symlink("/proc/self/root{tmp_path}/target", "/sandbox/t"); os.unlink("/sandbox/t")
        os.rename("/sandbox/real", "/sandbox/t"); os.rename("/sandbox/t", "/sandbox/real")
    except OSError: pass
"""

    async def run(pool):
        outcomes = set()
        async with pool.session() as session:
            assert (await session.run(flip)).ok
            for number in range(60):
                try:
                    if number % 2:
                        outcomes.add(await session.read("/sandbox/t/f"))
                    else:
                        await session.write("/sandbox/t/f", b"inside")
                except OSError:
                    outcomes.add(b"refused")
        return outcomes

    outcomes = with_pool(run, concurrency=1)
    assert b"host secret" not in b"".join(outcomes)
    assert (tmp_path / "target" / "f").read_bytes() == b"host secret"
    assert os.listdir(tmp_path / "target") == ["f"]


# ---- replies that a sandbox would never send ----


def garbage():
    chance = random.Random(5)
    good = {"id": 1, "exit": 0, "limits": [], "cpu_s": 0.1, "rss_bytes": 5}
    yield from (b"{", b"[]", b"null", b"\xff\xfe", b"[" * 16000, struct.pack("!Q", 1 << 63))
    yield b"x" * (messages.LARGEST + 1000)
    for name, values in {
        "id": [2, -1, "1", None, True, 1.0],
        "exit": ["0", 1 << 70, 256, -66, [], True, 0.0],
        "limits": [None, ["reward"], "timeout", [1], ["timeout"] * 50],
        "cpu_s": ["1", -1, None, float("inf"), float("nan"), True],
        "rss_bytes": [-1, 1.5, 1 << 61, "5"],
    }.items():
        for value in values:
            yield json.dumps(good | {name: value}).encode()
    yield json.dumps(good | {"exit": None}).encode()
    for name in good:
        yield json.dumps({key: value for key, value in good.items() if key != name}).encode()
    for _ in range(40):
        data = bytearray(json.dumps(good).encode())
        data[chance.randrange(len(data))] = chance.randrange(256)
        if bytes(data) != json.dumps(good).encode():
            yield bytes(data)


@pytest.fixture
def slot():
    """A slot whose sandbox is played by the test: the host's end, and ours."""
    made = []

    def make():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        made.append((theirs, victim))
        return Slot(ours, os.pidfd_open(victim.pid), SandboxLimits()), theirs, victim

    yield make
    for theirs, victim in made:
        theirs.close()
        victim.kill()
        victim.wait()


ORDER = Job(
    kind="code",
    header={"code": ""},
    files={},
    stdin=b"",
    timeout_s=60,
    memory_bytes=1 << 20,
    output_bytes=1000,
)


async def played(slot, theirs, act):
    """The result of a job, with ``act`` in the sandbox's place."""
    theirs.setblocking(True)
    theirs.send(b'{"ready": true}')
    await slot.ready(10)
    task = asyncio.create_task(slot.execute(ORDER))
    await asyncio.sleep(0.01)
    _, descriptors = messages.receive(theirs)
    act(theirs, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return await task


def test_malformed_replies_end_the_sandbox(slot):
    async def run():
        for data in garbage():
            one, theirs, victim = slot()
            result = await played(
                one, theirs, lambda connection, _, data=data: connection.send(data)
            )
            mutated = result.exit is not None  # a changed digit may still be a good reply
            assert mutated or result.limits_hit in (("protocol",), ("died",)), data
            assert mutated or not one.alive
            one.kill()
            assert victim.wait(60) == -9

    asyncio.run(run())


@pytest.mark.parametrize("act", ["closes", "sends descriptors", "talks twice", "floods"])
def test_sandbox_that_breaks_the_protocol(slot, act):
    reply = b'{"id": 1, "exit": 0, "limits": [], "cpu_s": 0.0, "rss_bytes": 0}'

    def work(connection, descriptors):
        if act == "closes":
            connection.close()
        elif act == "sends descriptors":
            socket.send_fds(connection, [reply], [0, 1, 2])
        elif act == "talks twice":
            connection.send(reply)
            connection.send(reply)
        else:
            os.set_blocking(descriptors[2], False)
            os.write(descriptors[2], b"x" * 60_000)

    async def run():
        before = len(os.listdir("/proc/self/fd"))
        one, theirs, _ = slot()
        result = await played(one, theirs, work)
        await asyncio.sleep(0.05)
        assert one.alive is False
        theirs.close()
        assert len(os.listdir("/proc/self/fd")) <= before
        return result

    result = asyncio.run(run())
    expected = {"closes": "died", "sends descriptors": "protocol", "floods": "output"}
    if act in expected:
        assert result.limits_hit == (expected[act],)
    else:
        assert result.exit == 0


def test_good_reply_is_taken():
    good = {"id": 1, "exit": 0, "limits": [], "cpu_s": 0.1, "rss_bytes": 5, "more": "ignored"}
    assert checked_reply(good, 1)["exit"] == 0
    with pytest.raises(BadReply, match="malformed"):
        checked_reply(good, 2)


# ---- what stays behind ----

OWNER = """
import asyncio, sys
from primerl.sandbox import SandboxPool

async def main():
    async with SandboxPool(concurrency=2) as pool:
        async with pool.session() as session:
            await session.run(["sh", "-c", "setsid nohup sleep 299.{mark} & setsid sleep 299.{mark} &"])
            task = asyncio.create_task(pool.run(["sleep", "299.{mark}"], timeout_s=600))
            await asyncio.sleep(0.3)
            print(pool._tier.launcher.folder, flush=True)
            await task

asyncio.run(main())
"""


def crash_an_owner(number):
    """Kill a process that owns a pool at work; returns what is left of it after a while."""
    mark = f"{os.getpid()}{number:04d}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(mark=mark)],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
    )
    folder = owner.stdout.readline().decode().strip()
    assert folder
    deadline = time.monotonic() + 60
    while len(sleepers(mark)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(sleepers(mark)) == 3
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    left = None
    while left != [] and time.monotonic() < deadline:
        left = sleepers(mark)
        left += [folder] if os.path.exists(folder) else []
        time.sleep(0.02)
    return left


def sleepers(mark):
    return [name for name in os.listdir("/proc") if name.isdigit() and sleeps(name, mark)]


def sleeps(process, mark):
    try:
        with open(f"/proc/{process}/cmdline", encoding="utf-8") as file:
            command = file.read().split("\0")
            return command[0] == "sleep" and f"299.{mark}" in command
    except OSError:
        return False


def test_nothing_outlives_a_crashed_owner():
    assert crash_an_owner(0) == []


def test_stopped_owner_loses_its_lease():
    async def run(pool):
        launcher = pool._tier.launcher
        pool._tier._beats.cancel()  # no more signs of life
        deadline = time.monotonic() + 60
        while launcher._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert launcher._process.poll() is not None
        with pytest.raises(SandboxError):
            await pool.run("pass")

    with_pool(run, concurrency=1, lease_s=1.0)


def helpers(parent):
    """Direct children of this process."""
    with open(f"/proc/{parent}/task/{parent}/children", encoding="utf-8") as file:
        return file.read().split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where pools keep what they need: here for this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def leftovers(folder):
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(helpers(os.getpid())),
        "mounts": len(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()),
        "shared memory": sorted(Path("/dev/shm").glob("*sandbox*")),
        "folders": os.listdir(folder),
    }


def leak_nothing(runs, folder):
    async def run(pool):
        for start in range(0, runs, 50):
            await asyncio.gather(*(pool.run("print(1)") for _ in range(min(50, runs - start))))

    with_pool(lambda pool: pool.run("pass"))  # what the first use loads stays
    before = leftovers(folder)
    with_pool(run)
    assert leftovers(folder) == before


def test_runs_leave_nothing(folder):
    leak_nothing(60, folder)


@pytest.mark.slow
def test_ten_thousand_runs_leave_nothing(folder):
    leak_nothing(10_000, folder)


@pytest.mark.slow
def test_a_hundred_crashes_leave_nothing(folder):
    before = leftovers(folder)
    for number in range(100):
        assert crash_an_owner(number) == []
    assert leftovers(folder) == before


def test_owner_is_not_forked():
    """The helpers are a new program, with nothing of the owner's environment or memory."""

    async def run(pool):
        command = Path(f"/proc/{pool._tier.launcher._process.pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pool._tier.launcher._process.pid}/environ").read_bytes()
        return command, environment

    command, environment = with_pool(run, concurrency=1)
    assert b"zygote.main" in command
    assert environment.count(b"=") <= 3


def test_interrupt_of_the_terminal_does_not_reach_sandboxes():
    async def run(pool):
        task = asyncio.create_task(pool.run("import time; time.sleep(1); print('end')"))
        await asyncio.sleep(0.2)
        os.kill(pool._tier.launcher._process.pid, signal.SIGINT)
        return await task

    assert with_pool(run, concurrency=1).stdout == b"end\n"
