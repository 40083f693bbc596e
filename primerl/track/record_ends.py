"""Where the records of a run end that is resumed from a state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl.track.group_index import read_index
from primerl.track.run_folder import (
    ARRAYS,
    EVALUATIONS,
    INDEX,
    METRICS,
    RESUMED,
    ROLLOUTS,
    TOKENS,
    complete_lines,
)


def record_ends(folder: Path, state: Mapping[str, Any]) -> dict[str, int]:
    """Return how many bytes of each file in a run's folder belong to a state of the run.

    States of earlier versions do not have the ``ends``; then the files are searched.

    Raises:
        ValueError: a file is missing or damaged, or belongs to another run.
    """
    if "ends" not in state:
        return _ends_of_steps(folder, state["steps"])
    ends = {name: _known_end(folder, name, state) for name in RESUMED}
    return ends | {ARRAYS: state["ends"].get(ARRAYS, 0)}


def _known_end(folder: Path, name: str, state: Mapping[str, Any]) -> int:
    """Return where a file ends according to a run's state, if the file can be that run's."""
    if name == EVALUATIONS and name not in state["ends"]:
        return 0  # a state of 0.1, in whose run metrics.jsonl had the evaluations
    path, end = folder / name, state["ends"].get(name)
    if not isinstance(end, int) or end < 0:
        raise ValueError(f"state has {end!r} as the end of {name}, expected a number of bytes")
    _require_file(path, state["steps"])
    size = path.stat().st_size
    if size < end:
        raise ValueError(
            f"{path} has {size} bytes, but the run's state has {end}: it is not the folder of this "
            "run, or the file was damaged"
        )
    if name.endswith(".jsonl") and end:
        with path.open("rb") as file:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                raise ValueError(
                    f"{path} has no line that ends at byte {end}, as the run's state says: it is "
                    "not the folder of this run, or the file was damaged"
                )
    return end


def _require_file(path: Path, steps: int) -> None:
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing; the run's state has {steps} steps in it")


def _ends_of_steps(folder: Path, steps: int) -> dict[str, int]:
    """Search the files of a run for the end of its first ``steps`` steps, in bytes."""
    ends = {}
    for name in (METRICS, ROLLOUTS):
        ends[name], found = _end_of_steps(folder / name, steps)
        if name == METRICS and found != steps:
            raise ValueError(
                f"{folder / name} has lines of {found} steps, but the run's state has {steps}: it "
                "is not the folder of this run"
            )
    tokens = [start + len(line) for start, line in complete_lines(folder / TOKENS)]
    entries = read_index(folder / INDEX)
    known = entries[entries["offset"] + entries["bytes"] <= ends[ROLLOUTS]]
    return ends | {TOKENS: max(tokens, default=0), INDEX: known.nbytes, EVALUATIONS: 0}


def _end_of_steps(path: Path, steps: int) -> tuple[int, int]:
    """Return where the lines of the first ``steps`` steps end, in bytes, and the step count."""
    _require_file(path, steps)
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
        raise ValueError(f"{path}, line {number}, is not a record of a run: {error!r}") from None
    if not isinstance(step, int):
        raise ValueError(f"{path}, line {number}, is not a record of a run: its step is {step!r}")
    return step
