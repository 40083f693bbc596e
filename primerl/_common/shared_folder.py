"""Folders in a host's shared memory, or a place of its own, removed by their last user."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

_DEV_SHM = Path("/dev/shm")
_POLL_S = 0.01
_USERS = ".users"
_REMOVED = ".removed-"  # part of the name of a folder that is being removed


def shared_memory() -> Path:
    """``/dev/shm``, or the folder for temporary files where there is none."""
    return _DEV_SHM if os.path.isdir(_DEV_SHM) else Path(tempfile.gettempdir())


class SharedFolder:
    """A folder that processes of one user share; the last to close it removes it.

    Each user holds a lock, which the kernel releases when the process ends in any way; what killed
    processes leave is removed when another folder is opened.

    Args:
        name: of the folder; the same name is the same folder.
        within: another place than the shared memory, such as a filesystem that hosts share. The
            host's name is then part of the folder's: locks may not be seen by other hosts, so each
            removes only what its own processes have left.

    Raises:
        RuntimeError: the folder belongs to somebody else.
    """

    def __init__(self, name: str, *, within: Path | None = None) -> None:
        place = shared_memory() if within is None else within
        # With a sign that no host's name has: one may begin with another's.
        host = "" if within is None else f"{socket.gethostname()}@"
        prefix = f"primerl-{os.getuid()}-{host}"
        self.path = place / f"{prefix}{name}"
        for other in place.glob(f"{prefix}*"):
            if other != self.path:
                _remove_if_unused(other)
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                found = self.path.lstat()
                if found.st_uid != os.getuid() or found.st_mode & 0o077:
                    raise RuntimeError(f"{self.path} can be changed by others; remove it")
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
        # Nobody can write a file there under the new name, while the others are removed.
        removed = path.with_name(f"{path.name}{_REMOVED}{secrets.token_hex(4)}")
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        pass  # somebody uses it, or has removed it
    finally:
        os.close(users)


def acquire(path: Path, *, exclusive: bool, timeout_s: float) -> BinaryIO:
    """Lock a file among processes, until the returned file is closed.

    Raises:
        TimeoutError: others hold it for longer than ``timeout_s``.
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
                raise TimeoutError(f"{path} is locked for more than {timeout_s:g} s") from None
            time.sleep(_POLL_S)
