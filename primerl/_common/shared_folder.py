"""Folders in shared memory or on disk, shared by processes and removed by their last user."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

_LOG = logging.getLogger(__name__)
_DEV_SHM = Path("/dev/shm")
_POLL_S = 0.01
_USERS = ".users"
_REMOVED = ".removed-"  # part of the name of a folder that is being removed


def shared_memory(*, room: int = 0) -> Path:
    """Return ``/dev/shm``, or the temporary folder if ``/dev/shm`` is missing or too small.

    Args:
        room: bytes that must be free. In containers, ``/dev/shm`` often has 64 MB.
    """
    temporary = Path(tempfile.gettempdir())
    if not os.path.isdir(_DEV_SHM):
        return temporary
    free = shutil.disk_usage(_DEV_SHM).free
    if free < room:
        _LOG.warning(
            "%s has %d MB free, but %d MB are needed: files go to %s instead, which is slower",
            _DEV_SHM,
            free // 10**6,
            room // 10**6,
            temporary,
        )
        return temporary
    return _DEV_SHM


class SharedFolder:
    """A folder that processes of one account share; the last process to close it removes it.

    Each process holds a lock, which the kernel releases when the process ends for any reason.
    Folders that killed processes leave are removed when another ``SharedFolder`` is opened.

    Args:
        name: the folder's name; processes that use the same name share the folder.
        within: a parent folder to use instead of shared memory, such as one on a filesystem that
            hosts share. The host's name is then part of the folder's name: other hosts may not see
            locks, so each host removes only folders that its own processes have left.
        room: bytes that its files will take. If shared memory has less, the folder is created in
            the temporary folder.

    Raises:
        RuntimeError: the folder belongs to another account, or others can access it.
    """

    def __init__(self, name: str, *, within: Path | None = None, room: int = 0) -> None:
        # "@" ends the host's name, which may be a prefix of another host's name.
        host = "" if within is None else f"{socket.gethostname()}@"
        prefix = f"primerl-{os.getuid()}-{host}"
        places = {shared_memory(), Path(tempfile.gettempdir())} if within is None else {within}
        for place in places:  # first, because left-over folders may take up the room
            for other in place.glob(f"{prefix}*"):
                if other.name != f"{prefix}{name}":
                    _remove_if_unused(other)
        if within is not None:
            self.path = within / f"{prefix}{name}"
        elif (shared_memory() / f"{prefix}{name}").exists():
            self.path = shared_memory() / f"{prefix}{name}"  # its own files may take up the room
        else:
            self.path = shared_memory(room=room) / f"{prefix}{name}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                found = self.path.lstat()
                if found.st_uid != os.getuid() or found.st_mode & 0o077:
                    raise RuntimeError(f"{self.path} is accessible to other accounts; remove it")
                self._users = os.open(self.path / _USERS, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # its last user has just removed it
            fcntl.flock(self._users, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._users), (self.path / _USERS).stat()):
                    return
            os.close(self._users)

    def close(self) -> None:
        """Close the folder; its last user removes it."""
        if self._users >= 0:
            os.close(self._users)
            self._users = -1
            _remove_if_unused(self.path)


def _remove_if_unused(path: Path) -> None:
    if _REMOVED in path.name:
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        users = os.open(path / _USERS, os.O_RDWR)
    except OSError:
        return  # being made or removed
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first, so that nobody creates a file in it while its files are removed.
        removed = path.with_name(f"{path.name}{_REMOVED}{secrets.token_hex(4)}")
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        pass  # another process uses it, or has removed it
    finally:
        os.close(users)


def acquire(path: Path, *, exclusive: bool, timeout_s: float) -> BinaryIO:
    """Lock a file against other processes, until the returned file is closed.

    Raises:
        TimeoutError: another process held the lock for longer than ``timeout_s``.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb")
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise TimeoutError(f"{path} was locked by others for {timeout_s:g} s") from None
            time.sleep(_POLL_S)
