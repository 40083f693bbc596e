"""The clock that stands still while the process is suspended, and what is blamed for lag."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from waiting import until

from primerl.rollout.processes import loop_lag
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.rollout.processes.loop_lag import LoopLag
from primerl.rollout.processes.running_clock import CLOCK, running_time

PROGRAM = """
import asyncio, logging, sys, time
from primerl.rollout.processes.running_clock import CLOCK, RunningLoop, running_time
logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def main():
    began = time.monotonic(), running_time(), asyncio.get_running_loop().time()
    print("ready", flush=True)
    outcome = "in time"
    try:
        async with asyncio.timeout(2.0):
            await asyncio.sleep(1.0)
    except TimeoutError:
        outcome = "timed out"
    wall = time.monotonic() - began[0]
    print(outcome, round(wall, 1), round(running_time() - began[1], 1),
          round(asyncio.get_running_loop().time() - began[2], 1), round(CLOCK.suspended_s, 1))

with asyncio.Runner(loop_factory=RunningLoop) as runner:
    runner.run(main())
"""


def test_a_suspended_process_keeps_its_time_limits_and_says_so():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(process.pid, signal.SIGCONT)
        message, result = process.stdout.read().decode().splitlines()
    assert "was suspended for 4 s (by SIGSTOP" in message
    *outcome, wall, clock, loop, suspended = result.split()
    assert outcome == ["in", "time"]
    assert float(wall) > 4.9
    assert float(clock) < 2.0
    assert float(loop) < 2.0
    assert float(suspended) == pytest.approx(4.0, abs=0.5)


def test_a_computation_that_lets_no_other_thread_run_counts():
    """One operation on large integers keeps the interpreter's lock; a busy computer takes time."""
    cpu_s, began, clock = time.process_time(), time.monotonic(), running_time()
    number = 3**3_000_000
    while time.monotonic() - began < 3.0:
        number * number
    assert running_time() - clock >= 0.95 * (time.process_time() - cpu_s)


def test_waiting_counts():
    before, clock = CLOCK.suspended_s, running_time()
    time.sleep(1.5)
    assert running_time() - clock >= 1.4
    assert CLOCK.suspended_s == before


def test_the_clock_never_decreases():
    seen = []

    def read():
        last = running_time()
        for _ in range(20_000):
            now = running_time()
            assert now >= last
            last = now
        seen.append(last)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_clock_of_a_fork_goes_on():
    running_time()
    pid = os.fork()
    if pid == 0:
        first = running_time()
        time.sleep(1.6)
        os._exit(0 if running_time() - first >= 1.5 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def holds_the_loop():
    time.sleep(0.8)


def test_the_code_that_holds_the_loop_is_named(monkeypatch, caplog):
    monkeypatch.setattr(loop_lag, "HELD_S", 0.2)
    lag, loop = LoopLag(), BackgroundLoop("test")
    measuring = loop.submit(lag.run())

    async def hold():
        holds_the_loop()

    loop.submit(hold()).result(10)
    until(lambda: lag.held_by)
    assert lag.held_by.endswith("in holds_the_loop")
    assert __file__ in lag.held_by
    (record,) = [one for one in caplog.records if "has been held" in one.message]
    assert "in holds_the_loop" in record.message
    measuring.cancel()
    loop.stop()


def test_a_loop_that_idles_is_not_blamed(monkeypatch, caplog):
    monkeypatch.setattr(loop_lag, "HELD_S", 0.2)
    lag, loop = LoopLag(), BackgroundLoop("test")
    measuring = loop.submit(lag.run())
    loop.submit(asyncio.sleep(1.0)).result(10)
    measuring.cancel()
    loop.stop()
    assert lag.held_by == ""
    assert not caplog.records
