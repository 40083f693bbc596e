"""Removal of a sandbox's files, which untrusted code may have made hard to remove."""

import contextlib
import os

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str) -> None:
    """Remove a folder with its content as far as possible; a missing folder is not an error.

    Untrusted code may have removed a folder's permissions, or nested folders too deeply for
    recursion. So each folder is first made accessible, and moved to the top before it is emptied.
    Links are never followed.
    """
    try:
        top = _opened(path)
    except OSError:
        return
    try:
        waiting = _emptied(top, top)
        while waiting:
            name = waiting.pop()
            with contextlib.suppress(OSError):
                folder = _opened(name, within=top)
                try:
                    waiting += _emptied(folder, top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _emptied(folder: int, top: int) -> list[str]:
    """Remove a folder's files, and move its subfolders to the top; return their new names."""
    moved = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.close(_opened(name, within=folder))  # makes it writable, so that it can move
                new_name = os.urandom(16).hex()
                os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=top)
                moved.append(new_name)
    return moved


def _opened(path: str, *, within: int | None = None) -> int:
    """Make a folder accessible, and open it."""
    place = os.open(path, os.O_PATH | _FOLDER, dir_fd=within)
    try:
        with contextlib.suppress(PermissionError):  # another user's, perhaps accessible
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=place)
    finally:
        os.close(place)
