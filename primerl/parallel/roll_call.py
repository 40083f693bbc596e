"""Which ranks are gone, as far as can be told from the host of one that is left."""

import os
import socket
from pathlib import Path

import torch.distributed as dist

RANK = "primerl/rank/{}"


def sign_in(store: dist.Store, rank: int) -> None:
    """Leave word of where this rank runs."""
    store.set(RANK.format(rank), f"{socket.gethostname()} {os.getpid()}")


def gone(store: dist.Store, ranks: int) -> list[int]:
    """The ranks of this host whose processes have ended; of other hosts nothing is known."""
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
    return state in "ZX"  # ended, but not yet waited for by torchrun
