"""Files of a run that only grow, and that a full disk leaves whole."""

import contextlib
import errno
import fcntl
import io
import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)


class RecordFile:
    """A file that is appended to; a write that fails, such as on a full disk, is undone.

    If the file was deleted or moved, the next write creates it anew, with all of its records,
    because other files refer to its bytes. If it was cut, the next write raises an error.

    Attributes:
        path: the path of the file.
        end: where the records end, in bytes; the file is longer if a write was cut off.

    Args:
        path: the path of the file.
        new: create the file, which must not exist; otherwise append to it.
        end: where the records end in the file; by default at its end.
    """

    def __init__(self, path: Path, *, new: bool, end: int | None = None) -> None:
        self.path = path
        # Append mode writes at the end also after a truncation. A buffer would repeat what failed.
        self._file = io.FileIO(path, "a+", opener=_created if new else None)
        size = os.fstat(self._file.fileno()).st_size
        self.end = size if end is None else end
        self._torn = False

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def append(self, data: bytes) -> None:
        """Append all of the data.

        Raises:
            OSError: the data could not be written, or the file was replaced. It names the file.
        """
        try:
            self.restore_if_missing()
            if self._torn:
                os.ftruncate(self._file.fileno(), self.end)
            self._torn = True
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            self._torn = False
        except OSError as error:
            self.undo(self.end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.end += len(data)

    def restore_if_missing(self) -> None:
        """Create the file anew, with all of its records, if it was deleted or moved.

        Raises:
            OSError: that failed, another file took the place of the deleted one, or another program
                has cut the file.
        """
        if self.path.exists():
            if os.fstat(self._file.fileno()).st_nlink == 0:
                text = "another file took the place of the run's, which was deleted"
                raise FileExistsError(errno.EEXIST, text, str(self.path))
            self._require_whole()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        copy = self.path.with_name(f"{self.path.name}.restored")
        self._file.seek(0)
        with copy.open("wb") as kept:
            shutil.copyfileobj(self._file, kept)
        file = io.FileIO(copy, "a+")
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            copy.rename(self.path)
        except OSError:
            file.close()
            raise
        self._file.close()
        self._file = file
        logger.warning("%s was deleted or moved; it is written anew, with all records", self.path)

    def _require_whole(self) -> None:
        """Raise once if another program has cut the file, and fill the lost part with zeros.

        So further records have the places that other files name, and readers find the damage.
        """
        size = os.fstat(self._file.fileno()).st_size
        if size >= self.end:
            return
        os.ftruncate(self._file.fileno(), self.end)
        if self.path.suffix == ".jsonl":  # the next record begins a line
            with self.path.open("r+b") as file:
                file.seek(self.end - 1)
                file.write(b"\n")
        text = f"another program cut it to {size} of {self.end} bytes, and these records are lost"
        raise OSError(errno.EIO, text, str(self.path))

    def undo(self, end: int) -> None:
        """Drop all data after ``end``: now, or with the next write if that fails."""
        self.end = end
        try:
            os.ftruncate(self._file.fileno(), end)
        except OSError:
            self._torn = True
        else:
            self._torn = False

    def move_tail(self, target: Path) -> None:
        """Move all data after ``end`` into a new file, if there is any."""
        if os.fstat(self._file.fileno()).st_size <= self.end:
            return
        self._file.seek(self.end)
        with target.open("xb") as kept:
            shutil.copyfileobj(self._file, kept)
            kept.flush()
            os.fsync(kept.fileno())
        os.ftruncate(self._file.fileno(), self.end)

    def sync(self) -> None:
        """Sync the file to disk.

        Raises:
            OSError: the file could not be synced. It names the file.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _created(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o666)
