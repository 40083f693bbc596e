"""A server that runs rank programs like torchrun, but forks the ranks after importing torch once.

forked_ranks.py starts the server. The server reads jobs from stdin, one JSON object per line: the
program, its arguments, the number of ranks, the working folder, the file for the output, and a time
limit in seconds. It answers each job with a line: 0, or another number if a rank failed.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

LIBRARIES = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "primerl.checkpoint",
    "primerl.loss",
    "primerl.models",
    "primerl.optim",
    "primerl.packing",
    "primerl.parallel",
    "primerl.parity",
    "primerl.testing",
    "primerl.weights",
]
GRACE_S = 30.0  # between SIGTERM and SIGKILL, as in torchrun


def load_libraries():
    for name in LIBRARIES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []) if name.startswith("primerl.") else []:
            getattr(module, public)  # primerl imports its public names lazily
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process of {threads} threads cannot be forked"


def become_rank(job, rank, port_from):
    """Set up this fork like a rank that torchrun starts."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.read(port_from, 16).decode(),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.close(port_from)
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[0] = str(Path(job["program"]).parent)


def supervise(ranks, deadline):
    """Wait for all ranks; return whether one failed. A failure or the deadline ends the others."""
    codes, killing_at = {}, None
    while len(codes) < len(ranks):
        for pid in ranks:
            ended, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if killing_at is None and (any(codes.values()) or now > deadline):
            killing_at = now + GRACE_S
            signal_all(set(ranks) - set(codes), signal.SIGTERM)
        elif killing_at is not None and now > killing_at:
            signal_all(set(ranks) - set(codes), signal.SIGKILL)
        time.sleep(0.02)
    return any(codes.values())


def signal_all(pids, number):
    for pid in pids:
        os.kill(pid, number)


def launch(job):
    """Fork the ranks and wait for them. Returns only in the ranks."""
    os.chdir(job["folder"])
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ranks, pipes = [], []
    for rank in range(job["ranks"]):
        port_from, port_to = os.pipe()
        pid = os.fork()
        if not pid:
            for other in (port_to, *pipes):
                os.close(other)
            return become_rank(job, rank, port_from)
        os.close(port_from)
        ranks.append(pid)
        pipes.append(port_to)
    # Create the store after the forks, since it has threads. The system chooses its port.
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=job["timeout_s"]),
    )
    for pipe in pipes:
        os.write(pipe, str(store.port).encode())
        os.close(pipe)
    failed = supervise(ranks, time.monotonic() + job["timeout_s"])
    os._exit(1 if failed else 0)


def serve():
    """Answer jobs until stdin ends; return whether this process is a rank."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            launch(json.loads(line))
            return True
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return False


if __name__ == "__main__":
    load_libraries()
    if serve():
        runpy.run_path(sys.argv[0], run_name="__main__")
