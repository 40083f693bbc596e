"""Removing what a sandbox has left, which may have been made to stay."""

import contextlib
import os

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str) -> None:
    """Remove a folder with all that is in it, as far as possible; it may be gone already.

    An ordinary user can't list a folder that was made without the right to, and no recursion
    reaches the end of one that is nested deeply. So each is made accessible, and moved up before
    it is emptied. No link is followed.
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
    """Remove a folder's files, and move its folders to the top; returns their names there."""
    moved = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.close(_opened(name, within=folder))  # to be moved, it must be writable
                new_name = os.urandom(16).hex()
                os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=top)
                moved.append(new_name)
    return moved


def _opened(path: str, *, within: int | None = None) -> int:
    """A descriptor of a folder, which is made accessible first."""
    place = os.open(path, os.O_PATH | _FOLDER, dir_fd=within)
    try:
        with contextlib.suppress(PermissionError):  # of another user, who may have opened it
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=place)
    finally:
        os.close(place)
