"""Folders of root filesystems: merging unpacked layers, and changes that follow no link."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from typing import BinaryIO

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
ENTRY_BYTES = 4096  # what an entry takes of the disk, besides its content
DEEPEST = 256
_CHUNK = 1 << 20


def merge(
    layers: list[str],
    target: str | os.PathLike[str],
    *,
    owner: int,
    grow: Callable[[int], None] = lambda size: None,  # noqa: ARG005
) -> None:
    """Merge the layers of an OCI image into ``target``, the lowest layer first.

    A file ``.wh.NAME`` removes ``NAME`` from the layers below, and ``.wh..wh..opq`` empties its
    folder. Links are never followed, neither in a layer nor in ``target``. Devices, pipes and
    sockets are left out, and files lose their setuid bits. If ``owner`` is not 0, it owns the
    copied files. ``grow`` is called with numbers of bytes before they are written.

    Raises:
        OSError: a file can't be read or written, or a folder is more than ``DEEPEST`` deep.
    """
    os.mkdir(target)
    into = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for layer in layers:
            source = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _merge_folder(source, into, owner, grow, depth=1)
            finally:
                os.close(source)
        own(b".", into, owner)
        os.fchmod(into, 0o755)
    finally:
        os.close(into)


def _merge_folder(
    source: int, into: int, owner: int, grow: Callable[[int], None], *, depth: int
) -> None:
    if depth > DEEPEST + 1:  # each level takes two descriptors
        raise OSError(errno.ENAMETOOLONG, f"a folder is more than {DEEPEST} deep")
    names = [os.fsencode(name) for name in os.listdir(source)]
    if OPAQUE in names:
        for below in os.listdir(into):
            remove(os.fsencode(below), into)
    for name in names:
        if name.startswith(WHITEOUT) and name != OPAQUE:
            remove(name.removeprefix(WHITEOUT), into)
    for name in names:
        if not name.startswith(WHITEOUT):
            _merge_entry(name, source, into, owner, grow, depth)


def _merge_entry(
    name: bytes, source: int, into: int, owner: int, grow: Callable[[int], None], depth: int
) -> None:
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    grow(ENTRY_BYTES)
    if stat.S_ISDIR(status.st_mode):
        if not is_folder(name, into):
            remove(name, into)
            os.mkdir(name, 0o700, dir_fd=into)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        below, target = os.open(name, flags, dir_fd=source), os.open(name, flags, dir_fd=into)
        try:
            _merge_folder(below, target, owner, grow, depth=depth + 1)
            # The pool's user must be able to write to its own folders.
            os.fchmod(target, (status.st_mode & 0o777) | 0o700)
        finally:
            os.close(below)
            os.close(target)
    elif stat.S_ISLNK(status.st_mode):
        remove(name, into)
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=into)
    elif stat.S_ISREG(status.st_mode):
        remove(name, into)
        _copy_file(name, source, into, status, grow)
    else:
        return
    own(name, into, owner)


def _copy_file(
    name: bytes, source: int, into: int, status: os.stat_result, grow: Callable[[int], None]
) -> None:
    reading = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it may have become a pipe
    writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(os.open(name, reading, dir_fd=source), "rb") as original,
        open(os.open(name, writing, 0o600, dir_fd=into), "wb", buffering=0) as copy,
    ):
        copy_content(original.read, copy, grow)
        os.fchmod(copy.fileno(), status.st_mode & 0o777)
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_content(read: Callable[[int], bytes], copy: BinaryIO, grow: Callable[[int], None]) -> None:
    """Write what ``read`` returns to a file, and call ``grow`` before each chunk."""
    while content := read(_CHUNK):
        grow(len(content))
        view = memoryview(content)
        while view:
            view = view[copy.write(view) :]


def is_folder(name: bytes, folder: int) -> bool:
    """Return whether there is a folder of this name; a link to one is none."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def remove(name: bytes, folder: int) -> None:
    """Remove a file, a link, or a folder with its content, if there is one."""
    if name in (b"", b".", b".."):
        return
    if is_folder(name, folder):
        shutil.rmtree(name, dir_fd=folder)
        return
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def own(name: bytes, folder: int, owner: int) -> None:
    """Give a file to a user, unless it is user 0."""
    if owner:
        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
