"""Atomic writes of files and folders, and paths that cannot lead out of their folder."""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

_MODEL_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def member(folder: Path, name: object, *, may_be_link: bool = False) -> Path:
    """Return the path of a file directly in ``folder``, by a name read from another file there.

    The check prevents that someone who can write one file of the folder chooses which other files
    of the host are read.

    Args:
        folder: the folder of both files.
        name: the name as it was read.
        may_be_link: accept a symbolic link, as in the cache of ``huggingface_hub``.

    Raises:
        ValueError: the name contains a folder, or the file is a symbolic link.
    """
    plain = isinstance(name, str) and "\0" not in name and name not in ("", "..")
    if not plain or Path(str(name)).name != name:
        raise ValueError(f"{name!r} leads out of the folder; expected the name of a file in it")
    path = folder / str(name)
    if path.is_symlink() and not may_be_link:
        raise ValueError(f"{name} is a symbolic link, expected a regular file")
    return path


@contextmanager
def whole_or_nothing(
    path: Path, *, spare: Path | None = None, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Open a file for writing; it gets the name ``path`` only once all of it is on the disk.

    If a file ``spare`` exists and nobody holds a lock on it, its space is overwritten instead of
    creating a new file; it still has its old content then. ``mode`` has the permissions of a new
    file, of which the process's umask takes some away.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        partial.unlink(missing_ok=True)  # left by a dead process with the same process id
        reused = spare is not None and _take_spare(spare, partial)
        # "x" creates a new file: in a shared folder, the name may be a link to another's file.
        with open(partial, "r+b" if reused else "xb", opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)  # so that the new name survives a power failure


def _take_spare(spare: Path, place: Path) -> bool:
    """Move a file if it exists and nobody holds a lock on it; return whether it was moved."""
    try:
        with spare.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            spare.rename(place)
            return True
    except OSError:  # missing, locked, or a filesystem without locks
        return False


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of its files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def saved_folder(folder: str | os.PathLike[str], *, marker: str) -> Iterator[Path]:
    """Create a folder to write into, which gets its name only at the end.

    An earlier folder of that name is replaced if this function wrote it too. If other files were
    added to the earlier folder, it is renamed to ``NAME.earlier`` instead.

    Args:
        folder: the path that the folder gets.
        marker: name of a file that every such folder holds.

    Raises:
        ValueError: on entering: something else exists under that name.
    """
    target = Path(folder).resolve()
    partial = target.with_name(target.name + ".partial")
    for path in (target, partial):
        _require_own(path, marker)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    if target.exists():
        _remove_saved(target, {path.name for path in partial.iterdir()})
    partial.rename(target)


def _require_own(path: Path, marker: str) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir() or (any(path.iterdir()) and not (path / marker).is_file()):
        raise ValueError(
            f"{path} exists, but was not saved by primerl (it has no {marker}); choose another "
            "folder, or remove this one"
        )


def _remove_saved(target: Path, names: set[str]) -> None:
    others = [
        path.name
        for path in target.iterdir()
        if not path.is_file() or not (path.name in names or _MODEL_SHARD.fullmatch(path.name))
    ]
    if not others:
        shutil.rmtree(target)
        return
    earlier = unused_name(target.with_name(f"{target.name}.earlier"))
    target.rename(earlier)
    logger.warning("%s holds other files (%s); it was renamed to %s", target, others, earlier)


def unused_name(path: Path) -> Path:
    """Return ``path`` if nothing exists there, else the first free ``PATH-2``, ``PATH-3``, ..."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
