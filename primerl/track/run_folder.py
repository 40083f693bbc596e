"""The folder of a run, written by one process at a time and resumed without losing records.

The files in it are JSON, or JSON Lines with one record per line. The per-token arrays of rollouts
are in ``rollouts.bin`` (``token_arrays``), and ``rollouts.index`` locates groups
(``rollout_files``).
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from primerl._common.files import sync_folder, whole_or_nothing
from primerl.track.record_file import RecordFile

ARGS, SUMMARY, METRICS, ROLLOUTS = "args.json", "summary.json", "metrics.jsonl", "rollouts.jsonl"
EVALUATIONS = "evaluations.jsonl"
TOKENS = "tokens.jsonl"  # one line [id, text] per distinct token of the rollouts
ARRAYS, INDEX = "rollouts.bin", "rollouts.index"
REPORT = "report.html"  # can be written from the other files at any time
FINAL, CHECKPOINTS = "final", "checkpoints"  # written by other packages
FILES = (ARGS, SUMMARY, METRICS, EVALUATIONS, ROLLOUTS, TOKENS, ARRAYS, INDEX, FINAL, CHECKPOINTS)
# Records whose tails move when a run is resumed. Blocks of rollouts.bin stay, since the lines that
# move refer to them.
RESUMED = (METRICS, EVALUATIONS, ROLLOUTS, TOKENS, INDEX)


class RunFolder:
    """The files of one run.

    Nothing is written before ``claim``, and nothing of a resumed run before ``resume``. ``ends``
    (``record_ends``) says how many bytes of each file belong to a run that is resumed.
    """

    def __init__(self, path: Path, *, ends: Mapping[str, int] | None) -> None:
        self.path = path
        self._new = ends is None
        self._ends = dict(ends or {})
        self._files: tuple[RecordFile, ...] = ()
        self._values: Mapping[str, Any] | None = None
        if self._new:
            require_new(path)
        elif path.exists() and not path.is_dir():
            raise ValueError(f"{path} is not a folder; choose another name for the run's folder")

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
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.metrics = self._opened(METRICS)
        except FileExistsError:
            require_new(self.path)
            raise
        try:
            lock(self.metrics, self.path)
            self.evaluations = self._opened(EVALUATIONS)
            self.rollouts, self.tokens = self._opened(ROLLOUTS), self._opened(TOKENS)
            self.arrays, self.index = self._opened(ARRAYS), self._opened(INDEX)
        except BaseException:
            self.close()
            raise
        if self._new:
            write_json(self.path / ARGS, values)
            self._values = values

    def _opened(self, name: str) -> RecordFile:
        known = self._ends.get(name)
        file = RecordFile(self.path / name, new=self._new, end=None if name == ARRAYS else known)
        if name == ARRAYS:  # keeps the blocks of later steps; if it was cut, its end says so
            file.end = max(file.end, known or 0)
        self._files += (file,)
        return file

    def resume(self, values: Mapping[str, Any]) -> None:
        """Begin to write a run that is resumed.

        Lines of later steps move to ``before-resume-NNN/``, and the arguments and the summary are
        copied there. If the process is killed meanwhile, the run can still be resumed.
        """
        kept = fresh_folder(self.path / "before-resume")
        for file in self._files:
            file.move_tail(kept / file.path.name)
        for name in (ARGS, SUMMARY):
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, kept / name)
        write_json(self.path / ARGS, values)
        self._values = values

    def restore_missing(self) -> None:
        """Write files anew that were deleted or moved."""
        for file in self._files:
            file.restore_if_missing()
        if self._values is not None and not (self.path / ARGS).exists():
            write_json(self.path / ARGS, self._values)

    def ends(self) -> dict[str, int]:
        """Return how many bytes of each file belong to the run, for its state."""
        now = {file.path.name: file.end for file in self._files}
        return {name: now.get(name, self._ends.get(name, 0)) for name in (*RESUMED, ARRAYS)}

    def sync(self) -> None:
        """Sync the records to disk, so that they survive a power failure."""
        for file in self._files:
            file.sync()
        if self._files:
            sync_folder(self.path)

    def close(self) -> None:
        """Close the files, so that another process can claim the run."""
        for file in reversed(self._files):  # the one with the lock last
            file.close()


def require_new(folder: Path) -> None:
    """Refuse the path of a new run that is a file, or a folder that holds a run."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; choose another name for the run's folder")
    held = [name for name in FILES if os.path.lexists(folder / name)]
    if held:
        raise ValueError(
            f"{folder} holds a run already ({', '.join(held)}); choose another folder, or "
            "resume that run from its last checkpoint (--resume)"
        )


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


def json_line(record: Any) -> bytes:
    """Return a record as a line of JSON; a lone surrogate, which a model may write, becomes "?"."""
    text = json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode(errors="replace")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with whole_or_nothing(path) as file:
        file.write((json.dumps(value, indent=2, default=str) + "\n").encode())


def plain(value: Any) -> Any:
    """Convert a value to JSON's types: NaN and infinity become None, other objects their text.

    A tensor or array with one entry becomes a number; others become lists.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


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


class _Open(Protocol):
    def fileno(self) -> int: ...


def lock(file: _Open, folder: Path) -> None:
    """Lock a file in ``folder`` against other processes, until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{folder} is in use: another process writes its run there. Wait until that ends, or "
            "choose another folder"
        ) from None
    except OSError:
        pass  # some file systems have no locks
