"""The world of ranks: connecting to the other ranks, and handling their failure and exit."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from primerl._common.interrupts import StoppedError
from primerl._common.threads import wait_for_work
from primerl._common.waiting import Waits, wait_for_first
from primerl.parallel.host_values import all_sum
from primerl.parallel.launch.failures import (
    first_failure,
    has_failed,
    is_lost_connection,
    register,
)
from primerl.parallel.launch.stop_signals import StopSignals


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
    wait_timeout_s: float
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
        wait_for_first("the end of rank 0's step")
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
    *,
    device: Literal["auto", "cpu"] = "auto",
    timeout_s: float = 1800.0,
    wait_timeout_s: float = 6 * 3600.0,
    grace_s: float = 25.0,
    seed: int | None = None,
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
        device: "auto" gives each rank of this host one GPU, or the CPU if torch sees no GPU.
            "cpu" uses the CPU even if there are GPUs.
        timeout_s: how long ranks wait for each other in a collective, in seconds, and how long a
            rank may give no sign of life.
        wait_timeout_s: how long the other ranks wait while rank 0 starts servers, takes rollouts,
            evaluates or records, and for the slowest rank to load or save, in seconds. They wait
            outside of collectives (``wait_for_first``, ``wait_for_all``).
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
    limits = {"timeout_s": timeout_s, "wait_timeout_s": wait_timeout_s, "grace_s": grace_s}
    for name, seconds in limits.items():
        if seconds <= 0:
            raise ValueError(f"{name} is {seconds}, expected a number of seconds above 0")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        rank, world_size, local_rank = 0, 1, 0
    else:
        rank, world_size, local_rank = map(_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpus = torch.cuda.device_count() if device == "auto" and torch.cuda.is_available() else 0
    return World(
        rank=rank,
        world_size=world_size,
        device=rank_device(local_rank, gpus=gpus),
        timeout_s=timeout_s,
        wait_timeout_s=wait_timeout_s,
        seed=seed,
        signals=StopSignals(grace_s, says=rank == 0),
    )


def rank_device(local_rank: int, *, gpus: int) -> torch.device:
    """Return the device of a rank on a host with this many GPUs that ranks may use.

    Raises:
        ValueError: there are GPUs, but fewer than ranks on this host.
    """
    if gpus == 0:
        return torch.device("cpu")
    if local_rank >= gpus:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", f"at least {local_rank + 1}")
        raise ValueError(
            f"torchrun started {ranks} ranks on this host, where torch sees {gpus} "
            f"GPU{'s' if gpus > 1 else ''}, and each rank needs its own; pass --nproc-per-node "
            f"{gpus}, or set CUDA_VISIBLE_DEVICES='' to run all ranks on the CPU"
        )
    return torch.device("cuda", local_rank)


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
    with Waits(
        store,
        rank=world.rank,
        ranks=world.world_size,
        silent_s=world.timeout_s,
        timeout_s=world.wait_timeout_s,
    ) as waits:
        yield from _in_group(world, store, timeout, waits)


def _in_group(world: World, store: dist.Store, timeout: timedelta, waits: Waits) -> Iterator[None]:
    """Connect the ranks through the store, and handle the failure and exit of each."""
    wait_for_first("the start of rank 0")
    # Batches are sent from the host, so the group must support CPU tensors as well as CUDA tensors.
    backend = "gloo" if world.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
    )
    register(store, world.rank)
    signals = world._signals
    signals.watch(lambda: has_failed(store))
    leaving: SystemExit | None = None
    try:
        try:
            yield
        except SystemExit as error:
            if not signals.agreed:
                raise
            leaving = error  # all ranks exit, so still wait for them below
        wait_for_first("the end of rank 0's run")
        dist.all_reduce(torch.zeros(1))  # wait for all ranks, so that they leave together
    except BaseException as error:
        # This rank is ending; torchrun's SIGTERM must not interrupt its cleanup and error message.
        signals.ignore()
        cause = first_failure(store, world.rank, error, ranks=world.world_size, waits=waits)
        if cause is None and is_lost_connection(error):  # the other rank was told to stop
            raise StoppedError(signal.SIGTERM) from error
        if cause is None:
            raise
        raise RuntimeError(f"rank {world.rank} stopped: {cause}") from error
    finally:
        wait_for_work()  # threads that use the group
        dist.destroy_process_group()
    if leaving is not None:
        raise leaving
