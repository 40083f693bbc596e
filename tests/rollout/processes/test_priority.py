"""Processes that give way to the trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from primerl._common.processes import launch, priority, supervisor

PROGRAM = """
import subprocess, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
subprocess.Popen(["sleep", "60"], start_new_session=True)
time.sleep(60)
"""


def niceness(pid):
    return [os.getpriority(os.PRIO_PROCESS, int(one)) for one in os.listdir(f"/proc/{pid}/task")]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_a_tree_of_processes_gives_way_with_all_threads_and_sessions():
    folder = launch.make_folder("priority-")
    before = niceness(os.getpid())
    process = launch.start([sys.executable, "-c", PROGRAM], folder=folder, grace_s=0.0)
    try:
        # Two supervisors, the program with two threads, and its child in a session of its own.
        until(lambda: len(supervisor.descendants(process.pid)) == 3)
        tree = {process.pid, *supervisor.descendants(process.pid)}
        until(lambda: sum(len(niceness(pid)) for pid in tree) == 5)

        priority.lower_priority(process.pid)

        assert {value for pid in tree for value in niceness(pid)} == {priority.NICENESS}
        for pid in tree:
            group = Path(f"/proc/{pid}/autogroup")
            if group.exists() and (text := group.read_text("utf-8")):
                assert text.endswith(f"nice {priority.NICENESS}\n")
    finally:
        process.terminate()
        launch.wait_until_over(process, folder, timeout_s=60.0)
        supervisor.remove_folder(folder)
    assert niceness(os.getpid()) == before
    priority.lower_priority(process.pid)  # a process that has ended is none to wait for


def test_a_session_of_this_process_keeps_its_share():
    child = subprocess.Popen(["sleep", "60"])
    own = Path("/proc/self/autogroup")
    before = own.read_text("utf-8") if own.exists() else None
    try:
        priority.lower_priority(child.pid)
        assert niceness(child.pid) == [priority.NICENESS]
        assert (own.read_text("utf-8") if own.exists() else None) == before
    finally:
        child.kill()
        child.wait()
