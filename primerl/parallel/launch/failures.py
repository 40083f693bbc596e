"""The cause, when a rank stops because of another: the rank that failed, was killed, or hangs."""

import os
import socket
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from primerl._common.waiting import (
    FAILURE,
    LateRankError,
    OtherRankFailedError,
    Waits,
    place_of,
)

RANK = "primerl/rank/{}"
TOLD = "primerl/told/{}"
GAVE_UP = "primerl/gave-up/{}"
DYING_S = 2.0


def register(store: dist.Store, rank: int) -> None:
    """Record the host and process of this rank, for ``first_failure`` on the other ranks."""
    store.set(RANK.format(rank), f"{socket.gethostname()} {os.getpid()}")


def has_failed(store: dist.Store) -> bool:
    """Return whether a rank has failed."""
    try:
        return bool(store.check([FAILURE]))
    except RuntimeError:  # the process that hosts the store has ended
        return True


def first_failure(
    store: dist.Store,
    rank: int,
    error: BaseException,
    *,
    ranks: int = 0,
    waits: Waits | None = None,
) -> str | None:
    """Describe the failure of another rank that stopped this rank.

    Return None if this rank failed first, or if the ranks were told to stop from outside and none
    has failed. The first rank that fails, or finds a late one, records this in the store, which
    outlives the rank under torchrun.
    """
    told = isinstance(error, KeyboardInterrupt)
    follows = told or is_lost_connection(error) or isinstance(error, OtherRankFailedError)
    mine = "" if follows else f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, LateRankError):
        mine = str(error)
    killed: list[int] = []
    outside = False
    try:
        store.set(GAVE_UP.format(rank), "")
        if told:
            store.set(TOLD.format(rank), "")
        first = store.compare_set(FAILURE, "", mine).decode()
        if follows and not first:
            killed = _dead_ranks(store, ranks)
            first = store.compare_set(FAILURE, "", "").decode()  # a rank may have found the cause
            outside = not (first or killed) and _told_from_outside(store, ranks)
        if follows and not (first or killed or outside) and waits is not None:
            first = _stuck(store, rank, error, ranks=ranks, waits=waits)
    except RuntimeError:  # the rank that hosts the store has ended
        first = ""
    if outside or (first == mine and not follows):
        return None
    if killed and not first:
        named = " and ".join(f"rank {one}" for one in killed)
        return f"{named} died without an error, perhaps killed for lack of memory ({error})"
    return first or (
        f"{error}; no rank reported an error, so one was probably killed, perhaps for lack of "
        "memory: see torchrun's report, or the log of each rank"
    )


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; torch has no error class for this."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


def _stuck(store: dist.Store, rank: int, error: BaseException, *, ranks: int, waits: Waits) -> str:
    """Describe the ranks that have not given up, in contrast to this rank, and record it.

    All ranks that wait in a collective give up in turn. A rank that does not is stuck elsewhere, or
    its host is lost. If another rank has recorded a cause before, return that.
    """

    def suspects() -> list[int]:
        found = store.get(FAILURE)
        return [one for one in range(ranks) if not found and not store.check([GAVE_UP.format(one)])]

    text = waits.describe_stuck(suspects)
    if text:
        place = place_of(traceback.walk_tb(error.__traceback__))
        text += f". Rank {rank} waited for it in a collective, at {place}: {error}"
    first: str = store.compare_set(FAILURE, "", text).decode()
    return first


def _dead_ranks(store: dist.Store, ranks: int) -> list[int]:
    """Return the ranks on this host whose processes have ended without being told to stop.

    Ranks on other hosts cannot be checked. A killed process loses its connections before it counts
    as ended, so poll for up to ``DYING_S`` seconds.
    """
    processes = _local_processes(store, ranks)
    deadline = time.monotonic() + DYING_S
    while True:
        ended = [rank for rank, pid in processes.items() if _has_ended(pid)]
        known = (TOLD, GAVE_UP)  # those have ended by themselves
        dead = [r for r in ended if not any(store.check([key.format(r)]) for key in known)]
        told = store.check([TOLD.format(rank) for rank in range(ranks)]) if ranks else False
        if dead or told or time.monotonic() > deadline:
            return dead
        time.sleep(0.02)


def _told_from_outside(store: dist.Store, ranks: int) -> bool:
    """Whether a rank was told to stop and all ranks are on this host, so that none was killed."""
    told = any(store.check([TOLD.format(rank)]) for rank in range(ranks))
    return told and len(_local_processes(store, ranks)) == ranks


def _local_processes(store: dist.Store, ranks: int) -> dict[int, int]:
    """Return the process ids of the ranks on this host, by rank."""
    processes = {}
    for rank in range(ranks):
        if store.check([RANK.format(rank)]):
            host, pid = store.get(RANK.format(rank)).decode().split()
            if host == socket.gethostname():
                processes[rank] = int(pid)
    return processes


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()  # without /proc, assume that it runs
    return state in "ZX"  # an ended rank is a zombie until torchrun waits for it
