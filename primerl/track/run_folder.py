"""A run's folder: claimed by one process, resumed without losing what is there."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from primerl.track.json_files import (
    end_of_steps,
    lock,
    move_tail,
    open_lines,
    read_json,
    write_json,
)

ARGS, SUMMARY, METRICS, ROLLOUTS = "args.json", "summary.json", "metrics.jsonl", "rollouts.jsonl"
TOKENS = "tokens.jsonl"  # a line [id, text] for each token of the rollouts
REPORT = "report.html"  # made of the others, at any time
FINAL, CHECKPOINTS = "final", "checkpoints"  # written by other packages
FILES = (ARGS, SUMMARY, METRICS, ROLLOUTS, TOKENS, FINAL, CHECKPOINTS)


class RunFolder:
    """The files of one run.

    Nothing is written before ``claim``; and of a run that is resumed, nothing before ``resume``.

    Args:
        path: is made by ``claim``.
        state: what ``Run.state`` returned, if the run is resumed.

    Raises:
        ValueError: a new run's folder holds files of a run; or a resumed run's holds less than its
            state says.
    """

    def __init__(self, path: Path, *, state: Mapping[str, Any] | None) -> None:
        self.path = path
        self._ends: dict[str, int] = {}
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is no folder; choose another name for the run's")
        if state is None:
            self._require_new()
        else:
            self._require_records(state["steps"])

    def _require_new(self) -> None:
        held = [name for name in FILES if os.path.lexists(self.path / name)]
        if held:
            raise ValueError(
                f"{self.path} holds a run already ({', '.join(held)}); choose another folder, or "
                "resume that run from its last checkpoint (--resume)"
            )

    def _require_records(self, steps: int) -> None:
        for name in (METRICS, ROLLOUTS):
            self._ends[name], found = end_of_steps(self.path / name, steps)
            if name == METRICS and found != steps:
                raise ValueError(
                    f"{self.path / name} has lines of {found} steps, and the run's state is of "
                    f"{steps}: it is not the folder of this run"
                )

    def require_arguments(self, values: Mapping[str, Any], fixed: Iterable[str]) -> None:
        """Compare a resumed run's arguments with those that it was begun with.

        Raises:
            ValueError: one of the ``fixed`` is another now; the message has both values.
        """
        begun = read_json(self.path / ARGS)
        for name in fixed:
            if name not in begun or name not in values:
                raise ValueError(
                    f"{self.path} is no run of this script: {name} is only in one of "
                    f"{self.path / ARGS} and the arguments now"
                )
            now = json.loads(json.dumps(values[name], default=str))
            if now != begun[name]:
                raise ValueError(
                    f"{self.path} was begun with {name}={begun[name]!r}, and is resumed with "
                    f"{name}={now!r}; a resumed run keeps its {', '.join(fixed)}"
                )

    def require_unfinished(self, steps: int) -> None:
        """Refuse a finished run, unless more than the steps that it took are planned now.

        Raises:
            ValueError: it is finished.
        """
        path = self.path / SUMMARY
        summary = read_json(path) if path.exists() else {}
        taken = summary.get("steps")
        if summary.get("finished") and isinstance(taken, int) and steps <= taken:
            raise ValueError(
                f"{self.path} is finished: it took its {taken} steps, and {steps} are "
                f"planned. To train it further, resume it with more steps (--steps); to train "
                "anew, choose another folder"
            )

    def claim(self, values: Mapping[str, Any]) -> None:
        """Make a new run's files, or take hold of those of a run that is resumed.

        Raises:
            ValueError: another process has this run, or another run came between.
        """
        new = not self._ends
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.metrics = open_lines(self.path / METRICS, new=new)
        except FileExistsError:
            self._require_new()
            raise
        try:
            lock(self.metrics)
            self.rollouts = open_lines(self.path / ROLLOUTS, new=new)
            self.tokens = open_lines(self.path / TOKENS, new=new)
        except BaseException:
            self.metrics.close()
            raise
        if new:
            write_json(self.path / ARGS, values)

    def resume(self, values: Mapping[str, Any]) -> None:
        """Begin to write a run that is resumed.

        Lines of later steps are moved to ``before-resume-NNN/``, where the arguments and the
        summary are kept, too. A process that is killed on the way leaves a run that can be resumed.
        """
        kept = fresh_folder(self.path / "before-resume")
        for name, end in self._ends.items():
            move_tail(self.path / name, end, kept / name)
        for name in (ARGS, SUMMARY):
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, kept / name)
        write_json(self.path / ARGS, values)

    def close(self) -> None:
        """Let another process have the run."""
        self.tokens.close()
        self.rollouts.close()
        self.metrics.close()


def fresh_folder(prefix: Path) -> Path:
    """Make the next free folder ``PREFIX-NNN``."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = prefix.with_name(f"{prefix.name}-{number:03d}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
