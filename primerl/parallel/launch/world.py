"""The world of ranks: connecting to the other ranks, and handling their failure and exit."""

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from primerl._common.interrupts import StoppedError
from primerl.parallel.host_values import all_sum
from primerl.parallel.launch.stop_signals import StopSignals

FAILURE = "primerl/failure"
RANK = "primerl/rank/{}"
TOLD = "primerl/told/{}"
DYING_S = 2.0


@attrs.frozen(kw_only=True, eq=False)
class World:
    """The ranks that train together; a context manager that connects them.

    Create it with ``process_group``. Its fields can be read before it is entered.
    """

    rank: int
    world_size: int
    device: torch.device
    """The device of this rank."""
    timeout_s: float
    seed: int | None = None
    _signals: StopSignals = attrs.field(repr=False)
    _connection: ExitStack = attrs.field(factory=ExitStack, init=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns the singletons (engine, run folder)."""
        return self.rank == 0

    def should_stop(self) -> bool:
        """Check whether any rank has received Ctrl-C, SIGTERM or SIGUSR1.

        Call it on all ranks after each step. Before the first call, these signals raise an error,
        so that contexts are closed. From the first call on, they are only recorded until the next
        call, so that the run can be saved. Ctrl-C and SIGTERM still end a process at once if either
        comes a second time. With several ranks, they also do so if a rank has failed, or if the
        next call does not come within ``grace_s``.
        """
        self._signals.defer()
        if bool(all_sum(int(self._signals.received))):
            self._signals.agree()
        return self._signals.agreed

    def __enter__(self) -> "World":
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.seed is not None:
            seed = self.seed + self.rank
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.manual_seed(seed)  # seeds all devices
        with ExitStack() as entering:
            entering.callback(self._signals.restore)
            self._signals.install()
            if self.world_size > 1:
                entering.enter_context(_connected(self))
            self._connection.push(entering.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        self._connection.__exit__(*error)


def process_group(
    *, timeout_s: float = 1800.0, grace_s: float = 25.0, seed: int | None = None
) -> World:
    """Create the ``World`` of ranks from torchrun's environment, or of one rank without torchrun.

        world = parallel.process_group()
        if world.is_first:
            ...  # start what only rank 0 owns, before the ranks connect
        with world:
            model = parallel.shard(model)

    Entering the world connects the ranks, with gloo for CPU tensors and NCCL for CUDA tensors.
    Leaving it waits until every rank leaves. If a rank fails, the others fail too, with an error
    that names the failed rank and quotes its error. Within the world, SIGTERM (which torchrun sends
    to end ranks) and SIGUSR1 raise an error as Ctrl-C does, so that the run's summary is written
    and child processes are ended. A loop that calls ``World.should_stop`` finishes its step first.

    Args:
        timeout_s: how long ranks wait for each other, in seconds. It must exceed the time that
            rank 0 spends on rollouts or evaluation while the other ranks wait.
        grace_s: with several ranks, how soon after SIGTERM ``World.should_stop`` must be called, in
            seconds. Choose less than torchrun's ``--shutdown_timeout`` (30), after which torchrun
            kills the process.
        seed: on entering, seed the generators of Python, numpy and torch with ``seed + rank``, so
            that dropout differs between ranks; None leaves them unchanged.

    Raises:
        ValueError: the environment is incomplete, there are more local ranks than GPUs, or a time
            is not above 0.
        RuntimeError: on entering, if a process group already exists; on leaving, if another rank
            failed.
    """
    for name, seconds in {"timeout_s": timeout_s, "grace_s": grace_s}.items():
        if seconds <= 0:
            raise ValueError(f"{name} is {seconds}, expected a number of seconds above 0")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        rank, world_size, local_rank = 0, 1, 0
    else:
        rank, world_size, local_rank = map(_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK is {local_rank}, but there are {torch.cuda.device_count()} GPUs; "
                "start one rank per GPU, or set CUDA_VISIBLE_DEVICES='' to use the CPU"
            )
        device = torch.device("cuda", local_rank)
    return World(
        rank=rank,
        world_size=world_size,
        device=device,
        timeout_s=timeout_s,
        seed=seed,
        signals=StopSignals(grace_s, says=rank == 0),
    )


def _variable(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdigit():
        raise ValueError(
            f"the environment variable {name} is {value!r}, expected a number; start with "
            "torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK, or with none of them set"
        )
    return int(value)


@contextmanager
def _connected(world: World) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("a process group already exists; enter parallel.process_group() once")
    timeout = timedelta(seconds=world.timeout_s)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # Batches are sent from the host, so the group must support CPU tensors as well as CUDA tensors.
    backend = "gloo" if world.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
    )
    store.set(RANK.format(world.rank), f"{socket.gethostname()} {os.getpid()}")
    signals = world._signals
    signals.watch(lambda: _has_failed(store))
    leaving: SystemExit | None = None
    try:
        try:
            yield
        except SystemExit as error:
            if not signals.agreed:
                raise
            leaving = error  # all ranks exit, so still wait for them below
        dist.all_reduce(torch.zeros(1))  # wait for all ranks, so that they leave together
    except BaseException as error:
        # This rank is ending; torchrun's SIGTERM must not interrupt its cleanup and error message.
        signals.ignore()
        cause = _first_failure(store, world.rank, error, ranks=world.world_size)
        if cause is None and _is_lost_connection(error):  # the other rank was told to stop
            raise StoppedError(signal.SIGTERM) from error
        if cause is None:
            raise
        raise RuntimeError(f"rank {world.rank} stopped: {cause}") from error
    finally:
        dist.destroy_process_group()
    if leaving is not None:
        raise leaving


def _has_failed(store: dist.Store) -> bool:
    try:
        return bool(store.check([FAILURE]))
    except RuntimeError:  # the process that hosts the store has ended
        return True


def _first_failure(
    store: dist.Store, rank: int, error: BaseException, *, ranks: int = 0
) -> str | None:
    """Describe the failure of another rank that stopped this rank.

    Return None if this rank failed first, or if the ranks were told to stop from outside and none
    has failed. The first rank that fails records its error in the store, which outlives the rank
    under torchrun.
    """
    told = isinstance(error, KeyboardInterrupt)
    follows = told or _is_lost_connection(error)
    mine = "" if follows else f"rank {rank} failed: {type(error).__name__}: {error}"
    killed: list[int] = []
    outside = False
    try:
        if told:
            store.set(TOLD.format(rank), "")
        first = store.compare_set(FAILURE, "", mine).decode()
        if follows and not first:
            killed = _dead_ranks(store, ranks)
            outside = not killed and _told_from_outside(store, ranks)
    except RuntimeError:  # the rank that hosts the store has ended
        first = ""
    if outside or (first == mine and not follows):
        return None
    if killed:
        named = " and ".join(f"rank {one}" for one in killed)
        return f"{named} died without an error, perhaps killed for lack of memory ({error})"
    return first or (
        f"{error}; no rank reported an error, so one was probably killed, perhaps for lack of "
        "memory: see torchrun's report, or the log of each rank"
    )


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; torch has no error class for this."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


def _dead_ranks(store: dist.Store, ranks: int) -> list[int]:
    """Return the ranks on this host whose processes have ended without being told to stop.

    Ranks on other hosts cannot be checked. A killed process loses its connections before it counts
    as ended, so poll for up to ``DYING_S`` seconds.
    """
    processes = _local_processes(store, ranks)
    deadline = time.monotonic() + DYING_S
    while True:
        ended = [rank for rank, pid in processes.items() if _has_ended(pid)]
        dead = [rank for rank in ended if not store.check([TOLD.format(rank)])]
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
