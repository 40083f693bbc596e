"""A run's files: JSON, and a line of JSON for each record."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


def open_lines(path: Path) -> TextIO:
    """A file to which lines are added."""
    return path.open("a", encoding="utf-8", buffering=1)  # a whole line at a time


def cut(path: Path, steps: int) -> None:
    """Keep the lines of the first ``steps`` steps of a file, if there is one.

    Raises:
        ValueError: there should be lines, but there is no file.
    """
    if not path.exists():
        if steps:
            raise ValueError(f"{path} is missing; the run's state has {steps} steps of it")
        return
    with path.open("rb+") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= steps:
                break
            end += len(line)
        file.truncate(end)


def write_line(file: TextIO, record: Mapping[str, Any]) -> None:
    """Add a line."""
    file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file, all or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)
