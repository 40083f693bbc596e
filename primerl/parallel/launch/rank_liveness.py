"""Which ranks have died, as far as another rank of the same host can tell."""

import os
import socket
from pathlib import Path

import torch.distributed as dist

RANK = "primerl/rank/{}"


def register_rank(store: dist.Store, rank: int) -> None:
    """Record the host and process of this rank."""
    store.set(RANK.format(rank), f"{socket.gethostname()} {os.getpid()}")


def dead_ranks(store: dist.Store, ranks: int) -> list[int]:
    """The ranks of this host whose processes have ended; nothing is known of other hosts."""
    found = []
    for rank in range(ranks):
        if store.check([RANK.format(rank)]):
            host, pid = store.get(RANK.format(rank)).decode().split()
            if host == socket.gethostname() and _has_ended(int(pid)):
                found.append(rank)
    return found


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()  # without /proc, nothing is known
    return state in "ZX"  # a zombie until torchrun waits for it
