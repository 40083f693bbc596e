"""Writing of a checkpoint by all ranks, immediately or in a background thread on each."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from primerl._common.ranks import on_every_rank
from primerl._common.tensor_pieces import TensorPiece
from primerl._common.waiting import describe_late
from primerl.checkpoint import folders
from primerl.checkpoint.rank_files import write_file, write_pieces

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class RankCheckpoint:
    """One rank's part of a checkpoint."""

    step: int
    pieces: list[TensorPiece]
    notes: Mapping[str, str]
    """Text for the header of the rank's file."""
    files: Mapping[str, bytes]
    """Contents of further files that rank 0 writes, by name."""


class Writer:
    """Writes checkpoints into a folder, one at a time, together with the other ranks."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        rank: int,
        group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._rank = rank
        self._group = group
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, snapshot: RankCheckpoint) -> None:
        """Write a checkpoint in a background thread."""
        self._thread = threading.Thread(
            target=self._write_noting, args=[snapshot], name="primerl-checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save that ``start`` began, and raise its error.

        Raises:
            RuntimeError: the save failed, or took longer than the timeout.
        """
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                late = describe_late(self._group)
                raise RuntimeError(
                    f"saving a checkpoint took longer than {self._timeout_s:.0f} s"
                    + (f": {late}" if late else "")
                )
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"an earlier checkpoint could not be saved: {error}") from error

    def abandon(self, patience_s: float) -> None:
        """Wait at most ``patience_s`` for the save that ``start`` began, ignoring its errors."""
        if self._thread is not None:
            self._thread.join(patience_s)

    def write(self, snapshot: RankCheckpoint) -> None:
        """Write this rank's part of a checkpoint; rank 0 commits it once all ranks have written."""
        began = time.perf_counter()
        target = self._folder / folders.folder_name(snapshot.step)
        partial = target.with_name(f"{target.name}.partial")
        what = f"the end of saving step {snapshot.step} on all ranks"

        def together(work: Callable[[], Any]) -> list[Any]:
            return on_every_rank(work, self._group, what=what)

        together(lambda: self._clear(partial))
        written = together(lambda: self._write_files(partial, snapshot))
        together(lambda: self._publish(partial, target, snapshot.step, written))
        logger.info("saved %s in %.1f s", target, time.perf_counter() - began)

    def _write_noting(self, snapshot: RankCheckpoint) -> None:
        self._error = RuntimeError("the saving thread failed; its traceback was printed")
        try:
            self.write(snapshot)
        except (RuntimeError, ValueError) as error:
            self._error = error
        else:
            self._error = None

    def _clear(self, partial: Path) -> None:
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def _write_files(self, partial: Path, snapshot: RankCheckpoint) -> dict[str, Any]:
        partial.mkdir(exist_ok=True)  # a network filesystem may not show the folder here yet
        name = folders.rank_file(self._rank)
        record = write_pieces(partial / name, snapshot.pieces, snapshot.notes)
        records = {name: attrs.asdict(record)}
        if self._rank == 0:
            for name, content in snapshot.files.items():
                records[name] = attrs.asdict(write_file(partial / name, [content]))
        return records

    def _publish(self, partial: Path, target: Path, step: int, written: list[Any]) -> None:
        if self._rank == 0:
            files = {name: record for records in written for name, record in records.items()}
            folders.publish(partial, target, step=step, world_size=len(written), files=files)
            folders.retain(self._folder, self._keep)
