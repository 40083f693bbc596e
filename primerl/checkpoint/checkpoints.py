"""The ``Checkpoints`` of a training run: saving in the background, loading on any ranks."""

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

from primerl._common.adapters import adapter_scales
from primerl._common.host_memory import HostMemory
from primerl._common.progress import report
from primerl._common.ranks import exchange, on_every_rank
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl._common.tensor_pieces import TensorPiece, my_pieces
from primerl.checkpoint import folders
from primerl.checkpoint.generators import generator_states
from primerl.checkpoint.loading import load
from primerl.checkpoint.reading import Saved, verify_share
from primerl.checkpoint.training_state import model_tensors, optimizer_state
from primerl.checkpoint.writing import RankCheckpoint, Writer

logger = logging.getLogger(__name__)


class Stopped(SystemExit):
    """Raised by a training loop that received a stop signal and has saved; exit code 143.

    Args:
        step: the number of policy steps taken.
    """

    def __init__(self, step: int) -> None:
        super().__init__(143)  # as for SIGTERM in a shell: the run is not finished
        self.step = step

    def __str__(self) -> str:
        return f"told to stop after step {self.step}, which was saved; resume the run from there"


class Checkpoints:
    """The checkpoints of a run, in ``folder/checkpoints``: a context manager, on all ranks.

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

    Each rank writes its shards to its own file. A checkpoint gets its name only when all files are
    on the disk, so a process that is killed at any time leaves the earlier checkpoints intact.
    Leaving the context waits for a running save.

    Args:
        folder: the folder of the run, on a filesystem that all ranks share; rank 0's is used, and
            other ranks may pass None.
        model: the model, sharded or not.
        optimizer: one optimizer, or several with disjoint parameters.
        schedule: the learning rate schedule; anything with ``state_dict`` and ``load_state_dict``,
            the same on all ranks.
        every: the number of policy steps between checkpoints, for ``due``; 0: never.
        last: the number of policy steps of the whole run. A checkpoint is due after the last step
            in any case, so that the run can be extended. None: not known.
        keep: how many checkpoints are kept; older ones are removed.
        asynchronous: ``save`` returns after copying tensors to host memory, and a thread writes
            them. The host then holds a copy of this rank's share of the state.
        timeout_s: how long ranks wait for each other, and ``close`` for a running save.

    Raises:
        ValueError: a number is out of range, rank 0 has no folder, or the model has adapters other
            than plain LoRA.
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
        refuse_unsupported_adapters(model)
        self._group: dist.ProcessGroup | None = None
        self._rank, self._world_size = 0, 1
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            # A separate group for the saving thread, and for CPU tensors.
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
        self._host_memory = HostMemory()
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
            self._writer.abandon(10.0)  # not for long, because other ranks may have died
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

        Restores the model, optimizers, schedule, and the random number generators of torch, numpy
        and Python. If as many ranks saved as load, each rank gets its own generators' states;
        otherwise generators are seeded from the state of rank 0.

        Nothing in the folder changes before all ranks have loaded. Then checkpoints of later steps,
        which ``last_good`` found damaged, are renamed to ``.skipped``. If ``last_good`` compared
        only sizes, the ranks first verify the digests together. A damaged checkpoint is renamed to
        ``.skipped``, so that the run, started again, resumes from the one before.

        Args:
            saved: the checkpoint that ``last_good`` returned on rank 0; ignored on other ranks.

        Raises:
            ValueError: the checkpoint is of another model or optimizer (the message names a
                tensor), or is damaged; or this is a new run but the folder holds checkpoints.
        """
        self._writer.finish()
        mine = str(saved.folder) if self._rank == 0 and saved and saved.folder else None
        source, verified = exchange([mine, saved is None or saved.verified], self._group)[0]
        if source is None:
            self._claim(resumed=None)
            return 0
        if not verified:
            self._verify(Path(source))

        def load_here() -> int:
            report("loading", Path(source).name)
            into = self._model, self._optimizers, self._schedule
            return load(Path(source), *into, rank=self._rank, world_size=self._world_size)

        step: int = on_every_rank(load_here, self._group)[0]
        here = Path(source).parent.resolve() == self._folder.resolve()
        self._claim(resumed=step if here else None)
        return step

    def _verify(self, source: Path) -> None:
        """Verify a checkpoint's digests, each rank a share of the files."""
        report("verifying", source.name)
        try:
            on_every_rank(
                lambda: verify_share(source, rank=self._rank, world_size=self._world_size),
                self._group,
            )
        except ValueError as error:
            aside = on_every_rank(lambda: self._skip(source), self._group)[0]
            raise ValueError(
                f"{source} is damaged ({error}), and was renamed to {aside}; resume again, which "
                "begins from the checkpoint before it"
            ) from None

    def _skip(self, source: Path) -> str:
        if self._rank:
            return ""
        return folders.skip(source).name

    def _claim(self, *, resumed: int | None) -> None:
        def claim() -> None:
            if self._rank == 0:
                folders.claim(self._folder, resumed=resumed)

        if resumed is not None or not self._claimed:
            on_every_rank(claim, self._group)
        self._claimed = True

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step`` steps, by ``every`` and ``last``."""
        return step == self._last or (self._every > 0 and step % self._every == 0)

    def save(self, step: int, *, wait: bool = False, **values: Any) -> None:
        """Save the run, after waiting for an earlier save that still runs. All ranks call it.

        Args:
            step: the number of policy steps taken, from which a loaded run resumes.
            wait: return only when the checkpoint is on the disk, even if ``asynchronous``.
            values: rank 0's further values, by names for ``Saved.get``: bytes, JSON values, or
                objects with a method ``state()`` that returns such a value. None is left out.

        Raises:
            RuntimeError: this save failed, or the asynchronous one before it, on any rank.
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
        pieces = snapshot.pieces
        copies = self._host_memory.copied(((one.name, one.offsets), one.values) for one in pieces)
        staged = [
            attrs.evolve(piece, values=copy)
            for piece, (_, copy) in zip(pieces, copies, strict=True)
        ]
        self._writer.start(attrs.evolve(snapshot, pieces=staged))

    def close(self) -> None:
        """Wait for a running save.

        Raises:
            RuntimeError: the save failed on any rank, or took longer than ``timeout_s``.
        """
        self._writer.finish()

    def _snapshot(self, step: int, values: Mapping[str, Any]) -> RankCheckpoint:
        of_optimizers, numbers = optimizer_state(self._model, self._optimizers)
        pieces = my_pieces({**model_tensors(self._model), **of_optimizers})
        notes = {}
        for key, value in generator_states().items():
            if isinstance(value, Tensor):
                name, shape = f"rank-{self._rank}/{key}", tuple(value.shape)
                pieces.append(TensorPiece(name=name, shape=shape, offsets=(0,), values=value))
            else:
                notes[key] = value
        schedule = None if self._schedule is None else self._schedule.state_dict()
        state = {"step": step, "optimizer": numbers, "schedule": schedule}
        state["adapter_scales"] = adapter_scales(self._model)
        kept = {name: _state(value) for name, value in values.items() if value is not None}
        return RankCheckpoint(
            step=step,
            pieces=pieces,
            notes=notes,
            files={} if self._rank else folders.encode(state, kept),
        )


def _state(value: Any) -> Any:
    return value.state() if hasattr(value, "state") else value
