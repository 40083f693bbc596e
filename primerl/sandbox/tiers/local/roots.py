"""Root filesystems for sessions: copied once per pool, then shared by copy-on-write."""

import asyncio
import os
import shutil
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from primerl.sandbox.errors import SandboxError
from primerl.sandbox.results import Root
from primerl.sandbox.tiers.local.slots import Slot

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"


class Roots:
    """The prepared root filesystems of a pool, stored in ``folder`` and owned by ``user``."""

    def __init__(self, folder: Path, *, user: int) -> None:
        self._folder = folder
        self._user = user
        self._count = 0

    async def prepare(
        self, layers: list[str], *, make: Callable[[dict[str, Any]], Awaitable[Slot]]
    ) -> Root:
        """Merge layers into a root, and test whether sessions can share it through overlayfs."""
        if not layers:
            raise SandboxError("prepare_root needs at least one folder or layer")
        self._count += 1
        name = str(self._count)
        try:
            await asyncio.to_thread(merge, layers, self._folder / name, owner=self._user)
        except OSError as error:
            raise SandboxError(f"the root filesystem can't be copied: {error}") from error
        for way in ("overlay", "copy"):
            root = Root(name=name, copy_on_write=way)
            try:
                slot = await make(root.settings)
            except SandboxError:
                if way == "copy":
                    raise
                continue
            slot.kill()
            return root
        raise AssertionError("unreachable")


def merge(layers: list[str], target: Path, *, owner: int) -> None:
    """Merge the layers of an OCI image into ``target``, the lowest layer first.

    A file ``.wh.NAME`` removes ``NAME`` from the layers below, and ``.wh..wh..opq`` empties its
    folder. Links are never followed, neither in a layer nor in ``target``. Devices, pipes and
    sockets are left out, and files lose their setuid bits. If ``owner`` is not 0, it owns the
    copied files.

    Raises:
        OSError: a file can't be read or written.
    """
    target.mkdir()
    into = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for layer in layers:
            source = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _merge_folder(source, into, owner)
            finally:
                os.close(source)
        _own(".", into, owner)
        os.fchmod(into, 0o755)
    finally:
        os.close(into)


def _merge_folder(source: int, into: int, owner: int) -> None:
    names = os.listdir(source)
    if _OPAQUE in names:
        for name in os.listdir(into):
            _remove(name, into)
    for name in names:
        if name.startswith(_WHITEOUT) and name != _OPAQUE:
            _remove(name.removeprefix(_WHITEOUT), into)
    for name in names:
        if not name.startswith(_WHITEOUT):
            _merge_entry(name, source, into, owner)


def _merge_entry(name: str, source: int, into: int, owner: int) -> None:
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        if not _is_folder(name, into):
            _remove(name, into)
            os.mkdir(name, 0o700, dir_fd=into)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        below, target = os.open(name, flags, dir_fd=source), os.open(name, flags, dir_fd=into)
        try:
            _merge_folder(below, target, owner)
            # The pool's user must be able to write to its own folders.
            os.fchmod(target, (status.st_mode & 0o777) | 0o700)
        finally:
            os.close(below)
            os.close(target)
    elif stat.S_ISLNK(status.st_mode):
        _remove(name, into)
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=into)
    elif stat.S_ISREG(status.st_mode):
        _remove(name, into)
        _copy_file(name, source, into, status)
    else:
        return
    _own(name, into, owner)


def _copy_file(name: str, source: int, into: int, status: os.stat_result) -> None:
    reading = os.O_RDONLY | os.O_NOFOLLOW
    writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(os.open(name, reading, dir_fd=source), "rb") as original,
        open(os.open(name, writing, 0o600, dir_fd=into), "wb") as copy,
    ):
        shutil.copyfileobj(original, copy)
        os.fchmod(copy.fileno(), status.st_mode & 0o777)
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def _is_folder(name: str, folder: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _remove(name: str, folder: int) -> None:
    if name in ("", ".", ".."):
        return
    if _is_folder(name, folder):
        shutil.rmtree(name, dir_fd=folder)
        return
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def _own(name: str, folder: int, owner: int) -> None:
    if owner:
        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
