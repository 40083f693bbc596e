"""Joining the other ranks, and parting from them."""

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
from primerl.parallel.launch.stop_signals import StopSignals
from primerl.parallel.scattering import all_sum

FAILURE = "primerl/failure"
RANK = "primerl/rank/{}"
TOLD = "primerl/told/{}"
DYING_S = 2.0


@attrs.frozen(kw_only=True, eq=False)
class World:
    """The ranks that train together: made by ``process_group``; a context in which they talk.

    Its fields can be read before it is entered.
    """

    rank: int
    world_size: int
    device: torch.device
    """Of this rank."""
    timeout_s: float
    seed: int | None = None
    _signals: StopSignals = attrs.field(repr=False)
    _connection: ExitStack = attrs.field(factory=ExitStack, init=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns whatever there is one of."""
        return self.rank == 0

    def should_stop(self) -> bool:
        """Whether Ctrl-C, SIGTERM or SIGUSR1 came, to any rank; all ask together after each step.

        From the first time on, those signals wait for this question, so that a run can be saved;
        before, they are raised as an error, so that contexts are closed. Ctrl-C and SIGTERM end a
        process at once if one comes again, and, where there are several ranks, if one has failed,
        or if this was not asked within ``grace_s``.
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
            torch.manual_seed(seed)  # of all devices
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
    """The world that torchrun's environment describes; of one rank where there is none.

        world = parallel.process_group()
        if world.is_first:
            ...  # start what only one rank has, before the ranks connect
        with world:
            model = parallel.shard(model)

    Entering connects the ranks, by gloo for CPU tensors and NCCL for those of CUDA; leaving waits
    until every rank leaves. When a rank fails, the others fail too, by an error that names it and
    says what it said. From entering on, SIGTERM, by which torchrun ends them, and SIGUSR1 are
    raised as an error, as Ctrl-C is, so that a run's summary is written and processes are ended. A
    loop that asks ``World.should_stop`` gets to the end of its step first.

    Args:
        timeout_s: how long ranks wait for each other, in seconds: longer than what the first rank
            does while the others wait (rollouts, evaluation).
        grace_s: how long after SIGTERM the next ``World.should_stop`` may come, in seconds, where
            there are several ranks: less than torchrun's ``--shutdown_timeout`` (30), after which
            it kills.
        seed: on entering, the generators of Python, numpy and torch are seeded by
            ``seed + rank``, so that dropout differs between ranks; None leaves them alone.

    Raises:
        ValueError: the environment is incomplete, there are more local ranks than GPUs, or a time
            is not above 0.
        RuntimeError: on entering: a group runs already. On leaving: another rank failed.
    """
    for name, seconds in {"timeout_s": timeout_s, "grace_s": grace_s}.items():
        if seconds <= 0:
            raise ValueError(f"{name} is {seconds}, expected seconds, above 0")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        rank, world_size, local_rank = 0, 1, 0
    else:
        rank, world_size, local_rank = map(_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK is {local_rank}, but there are {torch.cuda.device_count()} GPUs; "
                "start one rank for each GPU, or set CUDA_VISIBLE_DEVICES='' to use the CPU"
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
            f"the environment variable {name} is {value!r}, expected a number; RANK, WORLD_SIZE "
            "and LOCAL_RANK go together: start with torchrun, or with none of them set"
        )
    return int(value)


@contextmanager
def _connected(world: World) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("a process group runs already; enter parallel.process_group() once")
    timeout = timedelta(seconds=world.timeout_s)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # Batches come from the host, so CPU tensors can be sent beside those of CUDA.
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
            leaving = error  # as on all ranks
        dist.all_reduce(torch.zeros(1))  # leave together
    except BaseException as error:
        # This rank is ending; torchrun's SIGTERM must not cut off its clean-up and last words.
        signals.ignore()
        cause = _first_failure(store, world.rank, error, ranks=world.world_size)
        if cause is None and _is_lost_connection(error):  # to a rank that was told to stop
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
    except RuntimeError:  # the store is gone with the process that kept it
        return True


def _first_failure(
    store: dist.Store, rank: int, error: BaseException, *, ranks: int = 0
) -> str | None:
    """What stopped this rank, where that is another rank; None where it is its own error.

    The first rank that fails says so in the store, which under torchrun outlives it. None also
    where the ranks were told to stop from outside, and none has failed.
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
    except RuntimeError:  # the store is gone with the rank that kept it
        first = ""
    if outside or (first == mine and not follows):
        return None
    if killed:
        named = " and ".join(f"rank {one}" for one in killed)
        return f"{named} died without a word, perhaps killed for lack of memory ({error})"
    return first or (
        f"{error}; no rank said why, so one was probably killed, perhaps for lack of memory: "
        "see torchrun's report, or the log of each rank"
    )


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; torch has no class for that."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


def _dead_ranks(store: dist.Store, ranks: int) -> list[int]:
    """The ranks of this host whose processes have ended, and that were not told to.

    Nothing is known of other hosts. A process that is killed loses its connections before it
    counts as ended, so look for a while.
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
    """Whether a rank was told to stop, and all are of this host, where none was killed."""
    told = any(store.check([TOLD.format(rank)]) for rank in range(ranks))
    return told and len(_local_processes(store, ranks)) == ranks


def _local_processes(store: dist.Store, ranks: int) -> dict[int, int]:
    """The process ids of the ranks of this host."""
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
        return Path("/proc/self/stat").exists()  # without /proc, nothing is known
    return state in "ZX"  # a zombie until torchrun waits for it
