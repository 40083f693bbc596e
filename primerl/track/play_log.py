"""An evaluation's folder: a line for each play, kept when the process is not."""

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
    lock,
    require_arguments,
    write_json,
    write_line,
)

PLAYS = "plays.jsonl"


class PlayLog:
    """Records the plays of an evaluation in ``folder``; use it as a context manager.

        with track.PlayLog(args.resume or args.run_dir, args=args) as log:
            log.add({"task": "sum 1+2", "reward": 1.0})
            log.finish({"reward": 1.0})

    - ``args.json``: what was asked for.
    - ``plays.jsonl``: a line for each play, written when it has ended.
    - ``summary.json``: the result, when there is one.

    A folder that has plays is gone on with: they are in ``records``.

    Args:
        folder: is made; by default the next free ``runs/NAME-NNN``.
        args: an attrs value or a mapping.
        fixed: names of the ``args`` that must be those that the folder was begun with.
        name: of the script; by default the name of the running one.

    Raises:
        ValueError: the folder holds something else, was begun with other arguments, or has a
            damaged line. On entering: another process writes there.
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
        """The plays so far, in the order in which they ended."""
        begun = (self.folder / PLAYS).is_file()
        if begun:
            require_arguments(self.folder, self._args, fixed)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is not empty, and holds no evaluation; choose another folder"
            )

    def __enter__(self) -> "PlayLog":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / PLAYS).open("a", encoding="utf-8", buffering=1)
        try:
            lock(self._file)
            self.records, end = _read(self.folder / PLAYS)
            self._file.truncate(end)  # what a process was writing when it was killed
            write_json(self.folder / ARGS, self._args)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.records:
            error.add_note(f"what was played is kept: --resume {self.folder} continues")
        self._file.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Record a play, in JSON's types."""
        write_line(self._file, record)
        self.records.append(dict(record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the result."""
        write_json(self.folder / SUMMARY, summary)


def read_plays(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The plays that a ``PlayLog`` recorded in a folder.

    Raises:
        ValueError: there are none, or a line is damaged.
    """
    path = Path(folder) / PLAYS
    if not path.is_file():
        raise ValueError(f"{folder} holds no evaluation: there is no {path}")
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a file, and where the last whole line ends."""
    records = []
    end = 0
    for number, (start, line) in enumerate(complete_lines(path), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}, is no record of a play: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}, is no record of a play: {record!r:.80}")
        records.append(record)
        end = start + len(line)
    return records, end
