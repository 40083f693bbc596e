"""The log of an evaluation: a folder to which each rollout is written as soon as it has ended.

An evaluation whose process was killed can therefore continue from its folder.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from primerl.track.run_folder import (
    ARGS,
    SUMMARY,
    complete_lines,
    fresh_folder,
    json_line,
    lock,
    plain,
    require_arguments,
    write_json,
)

ROLLOUTS = "rollouts.jsonl"


class EvaluationLog:
    """Records the rollouts of an evaluation in ``folder``; use it as a context manager.

        with track.EvaluationLog(args.resume or args.run_dir, args=args) as log:
            log.add({"task": "sum 1+2", "reward": 1.0})
            log.finish({"reward": 1.0})

    - ``args.json``: the arguments.
    - ``rollouts.jsonl``: one line per rollout, written when the rollout has ended.
    - ``summary.json``: the result, when there is one.

    If the folder already has rollouts, the evaluation continues: they are in ``records``.

    Args:
        folder: the folder, which is created; by default the next free ``runs/NAME-NNN``.
        args: the arguments, an attrs value or a mapping.
        fixed: names of the ``args`` that must be the same as when the evaluation was started.
        name: the script's name; by default, that of the running script.

    Raises:
        ValueError: the folder holds other files, was started with other arguments, or has a damaged
            line. On entering: another process writes there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        args: Any = None,
        fixed: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        prefix = Path("runs") / (name or Path(sys.argv[0]).stem or "evaluation")
        self.folder = fresh_folder(prefix) if folder is None else Path(folder)
        self._args = attrs.asdict(args) if attrs.has(type(args)) else dict(args or {})
        self.records: list[dict[str, Any]] = []
        """The rollouts so far, in the order in which they ended."""
        begun = (self.folder / ROLLOUTS).is_file()
        if begun:
            require_arguments(self.folder, self._args, fixed)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is not empty, and does not contain an evaluation; choose another "
                "folder"
            )

    def __enter__(self) -> "EvaluationLog":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / ROLLOUTS).open("ab")
        try:
            lock(self._file, self.folder)
            self.records, end = _read(self.folder / ROLLOUTS)
            self._file.truncate(end)  # removes an incomplete line of a killed process
            write_json(self.folder / ARGS, self._args)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.records:
            error.add_note(f"finished rollouts are kept: --resume {self.folder} continues")
        self._file.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Record a rollout; NaN and infinity, which JSON lacks, become null."""
        recorded = plain(record)
        self._file.write(json_line(recorded))
        self._file.flush()
        self.records.append(recorded)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the result of the evaluation; NaN and infinity, which JSON lacks, become null."""
        write_json(self.folder / SUMMARY, plain(summary))


def read_evaluation(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rollouts that an ``EvaluationLog`` recorded in a folder.

    Raises:
        ValueError: there are none, or a line is damaged.
    """
    path = Path(folder) / ROLLOUTS
    if not path.is_file():
        raise ValueError(f"{folder} does not contain an evaluation: there is no {path}")
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file, and where its last complete line ends, in bytes."""
    records = []
    end = 0
    for number, (start, line) in enumerate(complete_lines(path), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}, is not a record of a rollout: {error}"
            ) from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}, is not a record of a rollout: {record!r:.80}")
        records.append(record)
        end = start + len(line)
    return records, end
