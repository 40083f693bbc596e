"""What the machine can't start is an error of the sandbox, and never a result of the code."""

import asyncio
import errno
import gc
import json
import logging
import os
import platform
import resource
import signal
import socket

import pytest
from sandboxed import everybodys_python, needed, with_pool

from primerl.sandbox import (
    Case,
    SandboxError,
    SandboxNotStarted,
    SandboxPool,
    grade,
    grade_repository,
)
from primerl.sandbox.guest import child, init
from primerl.sandbox.guest.jobs import kinds
from primerl.sandbox.tiers.local import zygote_process
from primerl.sandbox.tiers.local.slots import Slot

needed()


def test_run_for_which_the_owner_has_no_descriptors():
    async def run(pool):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            with pytest.raises(SandboxNotStarted, match="open files"):
                await grade(pool, "def f(): return 1", [Case(expected=1)], function="f")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        return await pool.run("print(1)", timeout_s=60)

    result = with_pool(run, concurrency=1)
    assert result.stdout == b"1\n", result


@pytest.fixture
def refusals(monkeypatch):
    """Let the next jobs be refused: the number of refusals that are left."""
    left = [0]
    execute = Slot.execute

    async def refused(self, job):
        if left[0]:
            left[0] -= 1
            raise SandboxNotStarted("no memory")
        return await execute(self, job)

    monkeypatch.setattr(Slot, "execute", refused)
    return left


def test_run_is_tried_again(refusals):
    async def run(pool):
        refusals[0] = 2
        assert (await pool.run("print(1)")).stdout == b"1\n"
        refusals[0] = 3
        with pytest.raises(SandboxNotStarted, match="no memory"):
            await pool.run("print(1)")

    with_pool(run, concurrency=1)


def test_session_keeps_its_files_when_a_command_is_tried_again(monkeypatch):
    send, left = Slot._send, [0]

    async def short(self, job, descriptors):
        if left[0]:
            left[0] -= 1
            raise SandboxNotStarted("no memory")
        await send(self, job, descriptors)

    monkeypatch.setattr(Slot, "_send", short)

    async def run(pool):
        async with pool.session() as session:
            await session.write("file", b"x")
            left[0] = 2
            assert await session.read("file") == b"x"
            left[0] = 3
            with pytest.raises(SandboxNotStarted, match="no memory"):
                await session.run(["true"])
            return await session.read("file")

    assert with_pool(run, concurrency=1) == b"x"


# A link to what can't be read, and a program whose interpreter's name is beyond its end.
UNREADABLE = """
import os, struct
os.symlink("/proc/self/mem", "link")
head = b"\\x7fELF\\x02\\x01\\x01" + bytes(9)
head += struct.pack("<HHIQQQIHHHHHH", 2, MACHINE, 1, 0x400000, 64, 0, 0, 64, 56, 1, 0, 0, 0)
head += struct.pack("<IIQQQQQQ", 3, 4, 1 << 20, 0, 0, 20, 20, 1)
with open(os.open("program", os.O_CREAT | os.O_WRONLY, 0o755), "wb") as file: file.write(head)
""".replace("MACHINE", "62" if platform.machine() == "x86_64" else "183")


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_files_of_the_code_are_not_faults_of_the_machine(tier):
    async def run(pool):
        async with pool.session() as session:
            assert (await session.run(UNREADABLE)).ok
            with pytest.raises(OSError, match="link"):
                await session.read("link")
            assert (await session.run(["./program"])).exit == kinds.REFUSED
            return await session.run("print(1)")

    assert with_pool(run, tier=tier, python=everybodys_python(), concurrency=1).stdout == b"1\n"


def test_grading_of_a_repository_is_an_error(refusals):
    async def run(pool):
        refusals[0] = 100
        tests = {"test_it.py": b"import it\ndef test(): assert it"}
        with pytest.raises(SandboxNotStarted):
            await grade_repository(pool, {"it.py": b""}, tests, modules=["it"])

    with_pool(run, concurrency=1)


def test_command_that_the_machine_can_not_start(monkeypatch):
    def refuse(*_):
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(os, "execvp", refuse)
    with pytest.raises(BlockingIOError):
        kinds._execute(["true"])


def test_reason_is_told_by_the_process_that_could_not_begin():
    """The child's whole way, with a payload that can't be read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        child.seccomp.install = lambda *_: None

        def short(*_, **__):
            raise OSError(errno.ENOMEM, "no memory")

        child._carry_out = short
        child.main(
            theirs.detach(),
            filter_program=b"",
            confine=None,
            environment={},
            shared=False,
            open_files=64,
        )
    theirs.close()
    job = {"kind": "job", "cpu_s": 1, "address_space_bytes": 1 << 40, "disk_bytes": 1 << 20}
    ours.send(json.dumps(job | {"id": 1, "timeout_s": 1.0}).encode())
    running = init._RunningJob({"id": 1, "timeout_s": 1.0}, pid, ours)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == kinds.REFUSED
    assert "no memory" in running.reason_not_begun()
    running.close()


def test_code_can_not_claim_that_it_was_not_started():
    """It finds no descriptor over which the reason would be sent."""
    code = """
import os
for number in range(3, 256):
    try:
        os.write(number, b"no memory")
        print(number)
    except OSError: pass
os._exit(126)
"""
    result = with_pool(lambda pool: pool.run(code), concurrency=1)
    assert (result.exit, result.stdout) == (126, b"")


def test_pool_that_is_closed_meanwhile():
    async def run(pool):
        running = asyncio.ensure_future(pool.run("import time; time.sleep(60)", timeout_s=60))
        await asyncio.sleep(0.3)
        return running

    running_after = with_pool(run, concurrency=1)
    assert isinstance(running_after.exception(), SandboxError)


def test_zygote_that_is_killed_meanwhile():
    async def run(pool):
        running = asyncio.ensure_future(pool.run("import time; time.sleep(60)", timeout_s=60))
        await asyncio.sleep(0.3)
        keeper = pool._tier.launcher._process.pid
        with open(f"/proc/{keeper}/task/{keeper}/children", encoding="utf-8") as file:
            os.kill(int(file.read().split()[0]), 9)
        with pytest.raises(SandboxError, match="helper processes"):
            await running

    with_pool(run, concurrency=1)


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_cancelled_starts_say_nothing(tier, capfd, caplog):
    """Neither the owner nor a process of a sandbox that nobody wants any more."""

    async def opened(pool):
        async with pool.session():
            await asyncio.sleep(60)

    async def run(pool):
        for number in range(30):
            start = asyncio.ensure_future(opened(pool))
            await asyncio.sleep(0.0003 * number)
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        starts = [asyncio.ensure_future(opened(pool)) for _ in range(8)]
        await asyncio.sleep(0.003)
        return starts  # they start while the pool closes

    async def cancelled():
        async with SandboxPool(tier=tier, python=everybodys_python(), concurrency=4) as pool:
            starts = await run(pool)
        await asyncio.gather(*starts, return_exceptions=True)

    asyncio.run(cancelled(), debug=True)
    gc.collect()  # futures whose errors nobody has retrieved say so when they are freed
    assert capfd.readouterr().err == ""
    assert [row for row in caplog.records if row.levelno >= logging.ERROR] == []


def test_pool_closes_although_its_owner_was_forked(monkeypatch):
    """The fork has a copy of the connection whose end tells the zygote to end."""
    ends = []
    monkeypatch.setattr(zygote_process, "_END_S", 600.0)  # else the zygote is killed

    async def run(pool):
        ends.append(os.fork())
        if ends[0] == 0:
            while True:
                signal.pause()

    try:
        with_pool(run, concurrency=1, warm=0)
    finally:
        os.kill(ends[0], signal.SIGKILL)
        os.waitpid(ends[0], 0)
