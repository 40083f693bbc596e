"""The process that forks sandboxes has time for its owner, whatever a sandbox leaves behind."""

import asyncio
import errno
import json
import os
import signal
import socket
import time
import traceback

import pytest
from sandboxed import everybodys_python

from primerl.sandbox import SandboxPool, SandboxUnavailable
from primerl.sandbox.guest import messages, processes, removal, zygote
from primerl.sandbox.guest.isolation import landlock
from primerl.sandbox.guest.isolation.landlock_sandbox import LandlockSandbox

SANDBOXES = 10


def in_a_fork(work):
    """Do work that changes what its process is, in a process that ends before long."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(
    landlock.version() < landlock.SCOPED_VERSION, reason="the kernel's Landlock is too old"
)
def test_removals_do_not_keep_the_zygote_waiting(monkeypatch, tmp_path):
    """They wait here until they are told to go on, and no more than a few at once."""
    gate, opening = os.pipe()
    remove = removal.remove

    def when_told(path):
        os.read(gate, 1)
        remove(path)

    monkeypatch.setattr(removal, "remove", when_told)
    folder = tmp_path / "sandboxes"

    def work():
        way = LandlockSandbox({"folder": str(tmp_path)})
        for number in range(SANDBOXES):
            (folder / str(number)).mkdir()
            (folder / str(number) / "file").touch()
            if way.fork(number, {}) == 0:
                os._exit(0)
        while way._alive:
            way.reap()
        removers = processes.children(str(os.getpid()))
        assert 0 < len(removers) < SANDBOXES
        assert len(os.listdir(folder)) == SANDBOXES
        os.write(opening, bytes(SANDBOXES))
        while os.listdir(folder) or processes.children(str(os.getpid())):
            way.reap()

    in_a_fork(work)
    os.close(gate)
    os.close(opening)


@pytest.mark.parametrize("closed", [False, True], ids=["while it runs", "when it ends"])
def test_files_of_ended_sandboxes_go_from_a_pool(closed):
    leave_files = "for number in range(500): open(str(number), 'x').close()"

    async def run():
        async with SandboxPool(
            tier="landlock", python=everybodys_python(), concurrency=2, warm=0
        ) as pool:
            folder = pool._tier.launcher.folder
            await asyncio.gather(*(pool.run(leave_files, timeout_s=60) for _ in range(3)))
            deadline = time.monotonic() + 60
            while not closed and os.listdir(folder / "sandboxes") and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            left = os.listdir(folder / "sandboxes")
        return closed or not left, folder.exists()

    try:
        assert asyncio.run(run()) == (True, False)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


class SlowWay:
    """Sandboxes that can't be forked, which takes longer than the lease."""

    user = 0
    separate = False

    def fork(self, number, settings):
        del number, settings
        time.sleep(0.2)
        raise OSError(errno.EAGAIN, "too many processes")


def test_heartbeats_that_wait_to_be_read_renew_the_lease():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for message in ({"sandbox": 1}, {"beat": True}, {"sandbox": 2}):
        ours.send(json.dumps({"settings": {}} | message).encode())
    keeper = os.getpid()

    def work():
        ours.close()
        owner = os.pidfd_open(keeper)
        zygote.Zygote(theirs, {}, owner, keeper, SlowWay(), 0.1).serve()

    in_a_fork(work)
    theirs.close()
    with ours:
        ready, *answers = [json.loads(messages.receive(ours)[0] or b"null") for _ in range(3)]
    assert ready["ready"]
    assert [answer and answer["sandbox"] for answer in answers] == [1, 2]
