"""A run's files: JSON, and a line of JSON for each record."""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from primerl._files import whole_or_nothing


def open_lines(path: Path, *, new: bool = False) -> TextIO:
    """A file to which lines are added.

    Raises:
        FileExistsError: it is there, although it should be ``new``.
    """
    return path.open("x" if new else "a", encoding="utf-8", buffering=1)  # a whole line at a time


def lock(file: TextIO) -> None:
    """Keep other processes from locking a file, until it is closed or this process ends.

    Raises:
        ValueError: another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{Path(file.name).parent} is in use: another process writes its run there. Wait until "
            "that ends, or choose another folder"
        ) from None
    except OSError:
        pass  # some file systems have no locks


def end_of_steps(path: Path, steps: int) -> tuple[int, int]:
    """Where the lines of the first ``steps`` steps end, in bytes, and how many steps they are of.

    Raises:
        ValueError: the file is missing, or one of these lines is not of a run.
    """
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing; the run's state has {steps} steps of it")
    end = 0
    seen = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # the process was killed while it wrote
            step = _step_of(path, number, line)
            if step >= steps:
                break
            seen.add(step)
            end += len(line)
    return end, len(seen)


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}, is no record of a run: {error!r}") from None
    if not isinstance(step, int):
        raise ValueError(f"{path}, line {number}, is no record of a run: its step is {step!r}")
    return step


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and the line; not the last one, if a process died while it wrote."""
    if not path.is_file():
        return
    start = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield start, line
            start += len(line)


def move_tail(path: Path, end: int, target: Path) -> None:
    """Move what a file holds after its first ``end`` bytes into a new file, if it holds more."""
    if path.stat().st_size <= end:
        return
    with path.open("rb+") as file:
        file.seek(end)
        with target.open("xb") as kept:
            shutil.copyfileobj(file, kept)
            kept.flush()
            os.fsync(kept.fileno())
        file.truncate(end)


def read_json(path: Path) -> dict[str, Any]:
    """A file's mapping.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a mapping")
    return value


def write_line(file: TextIO, record: Any) -> None:
    """Add a line."""
    file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file, all or nothing."""
    with whole_or_nothing(path) as file:
        file.write((json.dumps(value, indent=2, default=str) + "\n").encode())


def plain(value: Any) -> Any:
    """A tensor or numpy number as Python's own; a number that JSON lacks as null."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
