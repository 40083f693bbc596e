"""The folder of a run, written by one process at a time and resumed without losing records.

The files in it are JSON, or JSON Lines with one record per line.
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from primerl._common.files import sync_folder, whole_or_nothing

ARGS, SUMMARY, METRICS, ROLLOUTS = "args.json", "summary.json", "metrics.jsonl", "rollouts.jsonl"
TOKENS = "tokens.jsonl"  # one line [id, text] per distinct token of the rollouts
REPORT = "report.html"  # can be written from the other files at any time
FINAL, CHECKPOINTS = "final", "checkpoints"  # written by other packages
FILES = (ARGS, SUMMARY, METRICS, ROLLOUTS, TOKENS, FINAL, CHECKPOINTS)


class RunFolder:
    """The files of one run.

    Nothing is written before ``claim``, and nothing of a resumed run before ``resume``. ``state``
    is what ``Run.state`` returned, if the run is resumed.
    """

    def __init__(self, path: Path, *, state: Mapping[str, Any] | None) -> None:
        self.path = path
        self._ends: dict[str, int] = {}
        self._open: tuple[TextIO, ...] = ()
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is not a folder; choose another name for the run's folder")
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
            self._ends[name], found = _end_of_steps(self.path / name, steps)
            if name == METRICS and found != steps:
                raise ValueError(
                    f"{self.path / name} has lines of {found} steps, but the run's state has "
                    f"{steps}: it is not the folder of this run"
                )

    def require_steps_left(self, resumed: int, planned: int) -> None:
        """Refuse a run that is finished, or that is past the number of planned steps."""
        require_unfinished(self.path, planned)
        if resumed > planned:
            raise ValueError(
                f"{self.path} is resumed after step {resumed}, but only {planned} steps are "
                "planned; give a larger --steps"
            )

    def claim(self, values: Mapping[str, Any]) -> None:
        """Lock the run for this process, and create the files of a new run."""
        new = not self._ends
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.metrics = _open_lines(self.path / METRICS, new=new)
        except FileExistsError:
            self._require_new()
            raise
        try:
            lock(self.metrics)
            self.rollouts = _open_lines(self.path / ROLLOUTS, new=new)
            self.tokens = _open_lines(self.path / TOKENS, new=new)
        except BaseException:
            self.metrics.close()
            raise
        self._open = (self.metrics, self.rollouts, self.tokens)
        if new:
            write_json(self.path / ARGS, values)

    def resume(self, values: Mapping[str, Any]) -> None:
        """Begin to write a run that is resumed.

        Lines of later steps move to ``before-resume-NNN/``, and the arguments and the summary are
        copied there. If the process is killed meanwhile, the run can still be resumed.
        """
        kept = fresh_folder(self.path / "before-resume")
        for name, end in self._ends.items():
            _move_tail(self.path / name, end, kept / name)
        for name in (ARGS, SUMMARY):
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, kept / name)
        write_json(self.path / ARGS, values)

    def sync(self) -> None:
        """Sync the records to disk, so that they survive a power failure."""
        for file in self._open:
            file.flush()
            os.fsync(file.fileno())
        if self._open:
            sync_folder(self.path)

    def close(self) -> None:
        """Close the files, so that another process can claim the run."""
        self._open = ()
        self.tokens.close()
        self.rollouts.close()
        self.metrics.close()


def require_unfinished(folder: Path, planned: int) -> None:
    """Refuse to resume a finished run, unless more steps are ``planned`` than it took."""
    path = folder / SUMMARY
    summary = read_json(path) if path.exists() else {}
    taken = summary.get("steps")
    if summary.get("finished") and isinstance(taken, int) and planned <= taken:
        raise ValueError(
            f"{folder} is finished: it took its {taken} steps, and {planned} are planned. To train "
            f"it further, resume it with more steps, such as --steps {2 * taken}; to train anew, "
            "choose another folder"
        )


def require_arguments(folder: Path, values: Mapping[str, Any], fixed: Iterable[str]) -> None:
    """Refuse to resume a run with other ``fixed`` arguments than it was started with."""
    begun = read_json(folder / ARGS)
    for name in fixed:
        if name not in begun or name not in values:
            raise ValueError(
                f"{folder} is not a run of this script: the argument {name} is missing "
                f"either in {folder / ARGS} or among the arguments given now"
            )
        now = json.loads(json.dumps(values[name], default=str))
        if now != begun[name]:
            raise ValueError(
                f"{folder} was started with {name}={begun[name]!r}, and is resumed with "
                f"{name}={now!r}; a resumed run keeps its {', '.join(fixed)}"
            )


def fresh_folder(prefix: Path) -> Path:
    """Create the next free folder ``PREFIX-NNN`` and return its path."""
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


def write_line(file: TextIO, record: Any) -> None:
    """Append a record as a line of JSON to a file."""
    file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with whole_or_nothing(path) as file:
        file.write((json.dumps(value, indent=2, default=str) + "\n").encode())


def plain(value: Any) -> Any:
    """Convert a tensor or numpy number to Python's; replace NaN and infinity by None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the start of each line and the line, except a last one that is incomplete."""
    if not path.is_file():
        return
    start = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield start, line
            start += len(line)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; raise a ValueError that names the file if it has none."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a mapping")
    return value


def _open_lines(path: Path, *, new: bool) -> TextIO:
    # Line buffering writes whole lines. A lone surrogate, which a model may write, becomes "?".
    return path.open("x" if new else "a", encoding="utf-8", errors="replace", buffering=1)


def lock(file: TextIO) -> None:
    """Lock a file against other processes, until it is closed or this process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{Path(file.name).parent} is in use: another process writes its run there. Wait until "
            "that ends, or choose another folder"
        ) from None
    except OSError:
        pass  # some file systems have no locks


def _end_of_steps(path: Path, steps: int) -> tuple[int, int]:
    """Return where the lines of the first ``steps`` steps end, in bytes, and the step count."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing; the run's state has {steps} steps in it")
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


def _move_tail(path: Path, end: int, target: Path) -> None:
    """Move everything after a file's first ``end`` bytes into a new file."""
    if path.stat().st_size <= end:
        return
    with path.open("rb+") as file:
        file.seek(end)
        with target.open("xb") as kept:
            shutil.copyfileobj(file, kept)
            kept.flush()
            os.fsync(kept.fileno())
        file.truncate(end)
