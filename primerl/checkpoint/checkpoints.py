"""Saving a training run while it continues, and loading it on any number of ranks."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from primerl._common.progress import report
from primerl._common.ranks import exchange, on_every_rank
from primerl.checkpoint import folders
from primerl.checkpoint.generators import generator_states
from primerl.checkpoint.loading import load
from primerl.checkpoint.pieces import Piece
from primerl.checkpoint.reading import Saved
from primerl.checkpoint.resharding import my_pieces
from primerl.checkpoint.training_state import model_tensors, optimizer_state
from primerl.checkpoint.writing import Staging, TakenSnapshot, Writer

logger = logging.getLogger(__name__)


class Stopped(SystemExit):
    """Raised by a loop that was told to stop, once it has saved: exit code 143.

    Args:
        step: policy steps taken.
    """

    def __init__(self, step: int) -> None:
        super().__init__(143)  # what shells report of SIGTERM: the run is not finished
        self.step = step

    def __str__(self) -> str:
        return f"told to stop after step {self.step}, which was saved; it can be resumed from there"


class Checkpoints:
    """The checkpoints of a run, in ``folder/checkpoints``; a context, on all ranks.

        saved = checkpoint.last_good(resume)                # rank 0, before the ranks connect
        ...
        with checkpoint.Checkpoints(folder, model, optimizer, every=50, last=steps) as saves:
            for step in range(saves.load(saved), steps):
                ...
                stopping = world.should_stop()
                if stopping or saves.due(step + 1):
                    saves.save(step + 1, wait=stopping, worker=rollouts)
                if stopping:
                    raise checkpoint.Stopped(step + 1)

    Each rank writes its shards to a file of its own. A checkpoint appears under its name when all
    files are on the disk, so a process killed at any time leaves the earlier ones. Leaving the
    context waits for a save that runs.

    Args:
        folder: of the run, on a file system of all ranks; None on ranks other than 0, which are
            told.
        model: sharded or not.
        optimizer: one, or several with parameters of their own.
        schedule: of the learning rate; anything with ``state_dict`` and ``load_state_dict``, the
            same on all ranks.
        every: policy steps from one checkpoint to the next, as ``due`` counts them; 0: never.
        last: the policy steps of the whole run, after which one is due in any case, so that the
            run can be extended; None: they are not known.
        keep: how many of the last checkpoints are kept.
        asynchronous: whether ``save`` returns once tensors are copied to the host's memory, which
            then holds this rank's share of the state, and a thread writes them.
        timeout_s: how long ranks wait for each other, and ``close`` for a save that runs.

    Raises:
        ValueError: a number is out of range, or rank 0 has no folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        schedule: Any = None,
        *,
        every: int = 0,
        last: int | None = None,
        keep: int = 2,
        asynchronous: bool = True,
        timeout_s: float = 1800.0,
    ) -> None:
        if every < 0 or keep < 1 or timeout_s <= 0:
            raise ValueError(
                f"every={every}, keep={keep}, timeout_s={timeout_s}: expected every of at least "
                "0, keep of at least 1, and timeout_s above 0"
            )
        self._group: dist.ProcessGroup | None = None
        self._rank, self._world_size = 0, 1
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            # The thread's own, and for CPU tensors.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        name = exchange(None if folder is None else os.fspath(folder), self._group)[0]
        if name is None:
            raise ValueError("folder is None on rank 0; pass the folder of the run")
        self._folder = Path(name).absolute() / folders.SUBFOLDER
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._schedule = schedule
        self._every = every
        self._last = last
        self._asynchronous = asynchronous
        self._staging = Staging()
        self._writer = Writer(
            self._folder, keep=keep, rank=self._rank, group=self._group, timeout_s=timeout_s
        )
        self._claimed = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._writer.abandon(10.0)  # worth a moment, but other ranks may be gone
        saved = folders.steps(self._folder) if self._rank == 0 else []
        if saved and isinstance(error, (Stopped, KeyboardInterrupt)):
            step, run = folders.step_of(saved[-1]), os.path.relpath(self._folder.parent)
            how = f"step {step} is saved. To continue: --resume {run}"
            if isinstance(error, Stopped):
                sys.stderr.write(f"stopped; {how}\n")
            else:
                error.add_note(how)

    def load(self, saved: Saved | None) -> int:
        """Resume from ``saved``, and return its step; 0 for a new run. All ranks call it.

        Model, optimizers, schedule, and the random number generators of torch, numpy and Python:
        each rank's own if as many ranks saved, else seeded anew from those of rank 0.

        Nothing in the folder changes before all ranks have loaded. Then checkpoints of later steps,
        which ``last_good`` found damaged, are renamed to ``.skipped``.

        Args:
            saved: what ``last_good`` returned on rank 0; not looked at on the others.

        Raises:
            ValueError: it is of another model or optimizer; the message names a tensor. Or it is a
                new run, and the folder holds checkpoints.
        """
        self._writer.finish()
        mine = str(saved.folder) if self._rank == 0 and saved and saved.folder else None
        source = exchange(mine, self._group)[0]
        if source is None:
            self._claim(resumed=None)
            return 0

        def load_here() -> int:
            into = self._model, self._optimizers, self._schedule
            return load(Path(source), *into, rank=self._rank, world_size=self._world_size)

        step: int = on_every_rank(load_here, self._group)[0]
        here = Path(source).parent.resolve() == self._folder.resolve()
        self._claim(resumed=step if here else None)
        return step

    def _claim(self, *, resumed: int | None) -> None:
        def claim() -> None:
            if self._rank == 0:
                folders.claim(self._folder, resumed=resumed)

        if resumed is not None or not self._claimed:
            on_every_rank(claim, self._group)
        self._claimed = True

    def due(self, step: int) -> bool:
        """Whether ``step`` policy steps are a multiple of ``every``, or the last."""
        return step == self._last or (self._every > 0 and step % self._every == 0)

    def save(self, step: int, *, wait: bool = False, **values: Any) -> None:
        """Save the run. All ranks call it; an earlier save that still runs is waited for.

        Args:
            step: policy steps taken: where a run that loads it resumes.
            wait: return when it is on the disk, also if ``asynchronous``.
            values: of rank 0, under names for ``Saved.get``: bytes, JSON's types, or what has a
                ``state()`` that is one of them; None is left out.

        Raises:
            RuntimeError: this save failed, or an asynchronous one before it, on any rank.
            ValueError: a value or a tensor can't be saved; or the folder holds checkpoints from
                which this run was not resumed.
        """
        report("saving", f"step {step}")
        self._writer.finish()
        self._claim(resumed=None)
        snapshot = self._snapshot(step, values)
        if wait or not self._asynchronous:
            self._writer.write(snapshot)
            return
        staged = self._staging.copied(snapshot.pieces)
        self._writer.start(attrs.evolve(snapshot, pieces=staged))

    def close(self) -> None:
        """Wait for a save that runs.

        Raises:
            RuntimeError: it failed, on any rank, or took longer than ``timeout_s``.
        """
        self._writer.finish()

    def _snapshot(self, step: int, values: Mapping[str, Any]) -> TakenSnapshot:
        of_optimizers, numbers = optimizer_state(self._model, self._optimizers)
        pieces = my_pieces({**model_tensors(self._model), **of_optimizers})
        notes = {}
        for key, value in generator_states().items():
            if isinstance(value, Tensor):
                name, shape = f"rank-{self._rank}/{key}", tuple(value.shape)
                pieces.append(Piece(name=name, shape=shape, offsets=(0,), values=value))
            else:
                notes[key] = value
        schedule = None if self._schedule is None else self._schedule.state_dict()
        state = {"step": step, "optimizer": numbers, "schedule": schedule}
        kept = {name: _state(value) for name, value in values.items() if value is not None}
        return TakenSnapshot(
            step=step,
            pieces=pieces,
            notes=notes,
            files={} if self._rank else folders.encode(state, kept),
        )


def _state(value: Any) -> Any:
    return value.state() if hasattr(value, "state") else value
