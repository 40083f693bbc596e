"""Threads that wait for each other leave their cores."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from primerl._common.processes.brief_spinning import BriefSpinning


def spun_s(operations):
    """Return the CPU time that operations with pauses take, without and with brief spinning."""
    x = torch.ones(2**17)

    def spent():
        start = time.process_time()
        for _ in range(operations):
            x.add_(1)
            time.sleep(0.002)  # less than threads spin
        return time.process_time() - start

    spent()
    with contextlib.closing(BriefSpinning()):
        spent()  # until its pool exists
        brief = spent()
    return spent(), brief


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one thread waits for none")
def test_threads_that_wait_for_each_other_leave_their_cores():
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    path = [str(Path(__file__).parent), *sys.path]
    program = f"import sys; sys.path[:] = {path!r}; import json, test_brief_spinning as tests; "
    program += (
        "print(json.dumps([*tests.spun_s(100), 'libgomp' in open('/proc/self/maps').read()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    usual, brief, has_libgomp = json.loads(done.stdout)
    if not has_libgomp:
        pytest.skip("this torch has another implementation of OpenMP")
    assert brief < 0.5 * usual
