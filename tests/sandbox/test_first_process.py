"""The first process of a sandbox: what it says, and what keeps it from starting others."""

import asyncio
import json
import os
import socket

import pytest

from primerl.sandbox import SandboxPool, SandboxUnavailable
from primerl.sandbox.guest import init
from primerl.sandbox.guest.processes import OwnNamespace


def test_a_limit_is_named_although_what_is_killed_ends_late(monkeypatch):
    """On a busy machine, processes that hold much memory take seconds to end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = {"memory_bytes": 1 << 20, "disk_bytes": 1 << 20, "lifetime_s": 60.0, "session": True}
    first = init.Init(
        theirs,
        settings,
        start_child=os._exit,
        processes=OwnNamespace(),
        written=lambda: (0, 0),
        sockets=len,
    )
    job = {"id": 1, "timeout_s": -1.0}
    first._job = init._RunningJob(job, os.getpid())
    monkeypatch.setattr(init, "end", lambda *_, **__: False)

    def end_process(code):
        raise SystemExit(code)

    monkeypatch.setattr(init.os, "_exit", end_process)
    with ours, theirs:
        ours.settimeout(5)
        with pytest.raises(SystemExit):
            first._enforce()
        reply = json.loads(ours.recv(4096))

    assert reply["limits"] == ["timeout"]
    assert reply["exit"] is None


def test_a_session_goes_on_though_its_processes_are_used_up():
    """What is left of a bomb keeps further ones from being made, and ends when one is needed."""
    bomb = """
import os, time
if os.fork():
    time.sleep(0.5)
    os._exit(0)
while True:  # also what an ended process leaves is taken
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""

    async def work():
        async with SandboxPool() as pool, pool.session() as session:
            return [await session.run(code) for code in (bomb, "pass", "print(1)")]

    try:
        first, *_, last = asyncio.run(work())
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert first.exit == 0
    assert last.stdout == b"1\n"
