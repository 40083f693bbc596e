"""Keeps a store's folder within a size: the oldest files make room for new ones."""

import contextlib
import os
import re
import threading
from pathlib import Path

from primerl.replay.server import NAME

_ROUTES = re.compile(r"\.?[0-9a-f]{32}")  # also what a killed process was writing
_COUNTER = ".evicted"  # one byte for each reference removed, so that processes can add to it
_LOOKS = 16  # at least so many times, while max_bytes are written, a process looks at the folder
_PAGE = 4096  # bytes: a file in shared memory takes whole pages


class Eviction:
    """What this process knows of a folder's size, into which others write too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self._written = 0

    def make_room(self, folder: Path, *, written: int, max_bytes: int) -> None:
        """Note what was written; remove the oldest files if there may be more than ``max_bytes``.

        Room is made for a 16th of ``max_bytes``, so that a full store is not looked through for
        each file. What other processes write is noticed once this one has written as much.
        """
        with self._lock:
            self._written += -(-written // _PAGE) * _PAGE
            looks = self._written > max_bytes // _LOOKS
            if looks or self._seen + self._written > max_bytes:
                self._seen = _evict(folder, max_bytes)
                self._written = 0


def evicted(folder: Path) -> int:
    """How many references were removed to make room."""
    try:
        return (folder / _COUNTER).stat().st_size
    except FileNotFoundError:
        return 0


def _evict(folder: Path, max_bytes: int) -> int:
    """If there are too many, remove the oldest files, each with all its names.

    Returns the size of those that are left.
    """
    names: dict[int, list[Path]] = {}
    files: dict[int, os.stat_result] = {}
    for path in list(folder.iterdir()):
        if _ROUTES.match(path.name) is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # discarded in between
            found = path.lstat()
            names.setdefault(found.st_ino, []).append(path)
            files[found.st_ino] = found
    total = sum(_taken(found) for found in files.values())
    if total <= max_bytes:
        return total
    for number in sorted(files, key=lambda number: files[number].st_mtime_ns):
        if total <= max_bytes - max_bytes // _LOOKS:
            break
        total -= _taken(files[number])
        for path in names[number]:
            _remove(folder, path)
    return total


def _taken(found: os.stat_result) -> int:
    """The bytes of a file: at least its content's, where its blocks are not allocated yet."""
    return max(found.st_size, 512 * found.st_blocks)


def _remove(folder: Path, path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        if NAME.fullmatch(path.name):
            counter = os.open(folder / _COUNTER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(counter, b".")
            os.close(counter)
