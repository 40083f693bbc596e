"""Processes that give way to the trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from primerl._common.processes import launch, priority, supervisor

LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
COMPUTES = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
PROGRAM = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {COMPUTES!r}])
time.sleep(60)
"""


def autogroup(pid):
    """The niceness of a process's session; None where the kernel does not share by sessions."""
    file = Path(f"/proc/{pid}/autogroup")
    text = file.read_text("utf-8") if file.exists() else ""
    return int(text.rpartition(" ")[2]) if text else None


def niceness(pid):
    return [os.getpriority(os.PRIO_PROCESS, int(one)) for one in os.listdir(f"/proc/{pid}/task")]


@LINUX
def test_processes_of_a_server_give_way_with_all_threads_and_its_session():
    folder = launch.make_folder("priority-")
    before = niceness(os.getpid())
    group_before = autogroup(os.getpid())
    process = launch.start([sys.executable, "-c", PROGRAM], folder=folder, grace_s=0.0)
    try:
        # The inner supervisor, the program, and the process that computes, with two threads.
        until(lambda: len(supervisor.descendants(process.pid)) == 3)
        tree = {process.pid, *supervisor.descendants(process.pid)}
        [computes] = [pid for pid in tree if os.getsid(pid) != pid]
        until(lambda: len(niceness(computes)) == 2)

        priority.lower_priority(process.pid)

        assert niceness(computes) == [before[0] + priority.NICENESS] * 2
        assert {value for pid in tree - {computes} for value in niceness(pid)} == {before[0]}
        if group_before is not None:  # sessions begin with 0
            assert autogroup(computes) == priority.NICENESS
            assert autogroup(os.getpid()) == group_before
    finally:
        process.terminate()
        launch.wait_until_over(process, folder, timeout_s=60.0)
        supervisor.remove_folder(folder)
    assert niceness(os.getpid()) == before
    priority.lower_priority(process.pid)  # a process that has ended is none to wait for


@LINUX
def test_the_session_of_this_process_keeps_its_share():
    child = subprocess.Popen(["sleep", "60"])
    before, group_before = niceness(os.getpid()), autogroup(os.getpid())
    try:
        priority.lower_priority(os.getpid())
        assert niceness(child.pid) == [before[0] + priority.NICENESS]
        assert (niceness(os.getpid()), autogroup(os.getpid())) == (before, group_before)
    finally:
        child.kill()
        child.wait()
