"""Launcher of rank programs that saves each rank's import of torch; see rank_server.py."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import leftovers

SERVER = Path(__file__).with_name("rank_server.py")


@functools.cache
def server():
    """Return the server of ranks that all tests of this process share."""
    path = [str(SERVER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, SERVER],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    leftovers.keep_process(process.pid)
    atexit.register(end, process)
    return process


def end(process):
    process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def forked_ranks(program, *arguments, ranks, cwd, timeout_s=300):
    """Run a program on ranks like ``conftest.torchrun``, for tests that don't test launching."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        job = {
            "program": str(program),
            "arguments": [str(argument) for argument in arguments],
            "ranks": ranks,
            "folder": str(cwd),
            "output": str(output),
            "timeout_s": timeout_s,
        }
        process = server()
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        text = output.read_text() if output.exists() else ""
        assert answer, f"the server of ranks ended: {text}"
    return subprocess.CompletedProcess(job["arguments"], int(answer), stdout="", stderr=text)
