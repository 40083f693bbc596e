"""Files of conversations, JSONL and Parquet, and the folders that hold them."""

import codecs
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from primerl._common import optional
from primerl.data.errors import ConversationError
from primerl.data.json_text import decoded_json, without_nulls

_SUFFIXES = (".jsonl", ".parquet")
_HINTS = {
    ".json": "write one conversation per line, such as by: jq -c '.[]' chats.json > chats.jsonl",
    ".gz": "decompress it: gunzip chats.jsonl.gz",
    ".zst": "decompress it: unzstd chats.jsonl.zst",
}


class LinesOfJSON:
    """The lines of a JSONL file; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("Q")
        self._lines = array("Q")
        offset = 0
        self._stamp = _stamp(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    offset = _after_byte_order_mark(line, path)
                    line = line[offset:]
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> Any:
        """Return a row."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            row = decoded_json(line, self.place(index))
        except ConversationError as error:
            raise ConversationError(f"{error}{_hint(line)}") from None
        if isinstance(row, list):
            place = self.place(index)
            raise ConversationError(
                f"{place}: expected an object with 'messages', found a list{_hint(line)}"
            )
        return without_nulls(row) if b"null" in line else row

    def place(self, index: int) -> str:
        """Return the file and line of a row."""
        return f"{self.path}:{self._lines[index]}"

    def keep(self, indices: Sequence[int]) -> None:
        """Leave out all rows but these."""
        self._offsets = array("Q", (self._offsets[index] for index in indices))
        self._lines = array("Q", (self._lines[index] for index in indices))

    def has_changed(self) -> bool:
        """Return whether the file has another size or time than when it was opened, or is gone."""
        return _stamp(self.path) != self._stamp


class RowsOfParquet:
    """The rows of a Parquet file, read from the memory-mapped copy of ``datasets``."""

    def __init__(self, path: Path) -> None:
        datasets = optional.require("datasets", extra="data")
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        if not _can_be_written(cache):
            raise ValueError(
                f"{path}: datasets copies the Parquet file to {cache}, which is not writable: set "
                "HF_HOME to a writable folder"
            )
        self.path = path
        self._stamp = _stamp(path)
        self._rows = _parquet(path, datasets)
        self._kept: Sequence[int] = range(len(self._rows))

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, index: int) -> Any:
        """Return a row."""
        return without_nulls(self._rows[self._kept[index]])

    def place(self, index: int) -> str:
        """Return the file and number of a row."""
        return f"{self.path}, row {self._kept[index]}"

    def keep(self, indices: Sequence[int]) -> None:
        """Leave out all rows but these."""
        self._kept = indices

    def has_changed(self) -> bool:
        """Return whether the file has another size or time than when it was opened, or is gone."""
        return _stamp(self.path) != self._stamp


def open_rows(path: Path) -> LinesOfJSON | RowsOfParquet:
    """Open a file.

    Raises:
        ValueError: the file is empty, can't be read, or is not what its suffix says.
        ImportError: it is a Parquet file, but ``datasets`` is not installed.
    """
    kind = LinesOfJSON if path.suffix.lower() == ".jsonl" else RowsOfParquet
    try:
        rows = kind(path)
    except OSError as error:
        raise ValueError(f"{path}: the file can't be read: {error}") from error
    if not len(rows):
        raise ValueError(f"{path}: the file is empty; expected one conversation per line or row")
    return rows


def files_in(path: Path) -> Iterator[Path]:
    """Yield the files of a path: itself, or those in a folder that have the right suffixes.

    Raises:
        ValueError: there are none, or a file is a broken link.
    """
    if path.is_dir():
        inside = [file for file in _visible(path) if _is_read(file)]
        if not inside:
            others = unread_files(path)
            found = f"; it has {', '.join(others[:10])}" if others else ""
            raise ValueError(f"{path}: the folder has no files that end in {_kinds()}{found}")
        for file in inside:
            if not file.exists():
                raise ValueError(f"{file}: a link to a file that does not exist")
            yield file
    elif not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    elif not _is_read(path):
        hint = _HINTS.get(path.suffix.lower(), "")
        raise ValueError(
            f"{path}: expected a file that ends in {_kinds()}, or a folder of them"
            + (f"; {hint}" if hint else "")
        )
    else:
        yield path


def unread_files(path: Path) -> list[str]:
    """Return the names in a folder that are not read; hidden ones, which begin with a dot, apart.

    The names of folders end with a slash.
    """
    if not path.is_dir():
        return []
    others = [file for file in _visible(path) if not _is_read(file)]
    return [f"{file.name}/" if file.is_dir() else file.name for file in others]


def _visible(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _is_read(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES and not file.is_dir()


def _kinds() -> str:
    return " or ".join(_SUFFIXES)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the size and time of a file; None if it can't be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _hint(line: bytes) -> str:
    """Return what to do with a line that begins a file of another kind."""
    start = line.strip()
    if start[:1] == b"[":
        return f". The file looks like a JSON array: {_HINTS['.json']}"
    if start == b"{":
        return ". The file looks like pretty-printed JSON: write each conversation on one line"
    return ""


def _parquet(path: Path, datasets: Any) -> Any:
    parquet = optional.require("pyarrow.parquet", extra="data")
    try:
        if not parquet.read_metadata(path).num_rows:
            return []
        return datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # pyarrow and datasets have many kinds
        raise ValueError(
            f"{path}: the Parquet file can't be read ({type(error).__name__}: {error})"
        ) from error


def _after_byte_order_mark(line: bytes, path: Path) -> int:
    """Return the length of the byte order mark with which a file begins."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path}: the file is encoded in UTF-16 or UTF-32; expected UTF-8")
    return len(codecs.BOM_UTF8) if line.startswith(codecs.BOM_UTF8) else 0


def _can_be_written(folder: Path) -> bool:
    """Create a folder if it is missing, and return whether it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
