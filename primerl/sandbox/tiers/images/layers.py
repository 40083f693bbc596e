"""Unpacking of an untrusted image's layers into a folder, which nothing in them can leave."""

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

from primerl.sandbox import archives
from primerl.sandbox.archives import ArchiveMember, BadArchive
from primerl.sandbox.tiers.images.folders import (
    DEEPEST,
    ENTRY_BYTES,
    OPAQUE,
    WHITEOUT,
    copy_content,
    is_folder,
    own,
    remove,
)

MOST_STEPS = 4_000_000  # headers of one layer, and records of extended headers
_MOST_LINKS = 40
_LONGEST_PATH = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


Names = dict[bytes, "Names"]  # of files, and of folders with the names in them


class LayeredRoot:
    """A root filesystem in the new folder ``path``, to which layers are added, the lowest first.

    A file ``.wh.NAME`` removes ``NAME`` of the layers below, and ``.wh..wh..opq`` empties its
    folder. Symbolic links of the image are followed inside the root only. Devices, pipes and
    sockets are left out, and files lose their setuid bits.

    Args:
        path: the folder.
        owner: the user that owns the files; 0 is this process's.
        grow: called with each number of bytes before they are written; may raise an error.
    """

    def __init__(self, path: str, *, owner: int, grow: Callable[[int], None]) -> None:
        os.mkdir(path, 0o755)
        self._root = os.open(path, _FOLDER)
        self._owner = owner
        self._grow = grow
        self._added: Names = {}  # of the layer that is being added
        self._folder: tuple[bytes, ...] = ()  # of the last member
        self._opened = os.dup(self._root)
        self._resolved: tuple[bytes, ...] = ()
        own(b".", self._root, owner)

    def close(self) -> None:
        """Close the folders."""
        os.fchmod(self._root, 0o755)
        os.close(self._opened)
        os.close(self._root)

    def add(self, layer: BinaryIO) -> None:
        """Add a layer, a tar archive.

        Raises:
            BadArchive: the archive is malformed, or leads out of the root.
            OSError: a file can't be written.
        """
        self._added = {}
        for member in archives.members(layer, most_steps=MOST_STEPS):
            self._grow(ENTRY_BYTES)
            try:
                self._add(member)
            except BadArchive:
                raise
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise BadArchive(f"{member.name!r:.200} can't be unpacked: {error}") from error

    def _add(self, member: ArchiveMember) -> None:
        parts = _parts(member.name)
        if not parts:
            return
        *above, name = parts
        folder, resolved = self._enter(tuple(above))
        if name == OPAQUE:
            self._empty(folder, self._names(resolved))
        elif name.startswith(WHITEOUT):
            remove(name.removeprefix(WHITEOUT), folder)
        elif member.kind != "other":
            self._write(member, name, folder)
            self._names(resolved).setdefault(name, {})

    def _write(self, member: ArchiveMember, name: bytes, folder: int) -> None:
        if member.kind == "folder":
            if not is_folder(name, folder):
                remove(name, folder)
                os.mkdir(name, 0o700, dir_fd=folder)
                own(name, folder, self._owner)
            made = os.open(name, _FOLDER, dir_fd=folder)
            try:
                # The pool's user must be able to write to its own folders.
                os.fchmod(made, (member.mode & 0o777) | 0o700)
            finally:
                os.close(made)
            return
        if member.kind == "link":
            self._link(member, name, folder)
            return
        remove(name, folder)
        if member.kind == "symbolic link":
            os.symlink(_encoded(member.target), name, dir_fd=folder)
        else:
            _copy(member, os.open(name, _NEW_FILE, 0o600, dir_fd=folder), self._grow)
        own(name, folder, self._owner)

    def _link(self, member: ArchiveMember, name: bytes, folder: int) -> None:
        """Make a hard link to a file of this image."""
        parts = _parts(member.target)
        if not parts:
            raise BadArchive(f"the link {member.name!r:.200} has no target")
        here = os.dup(folder)
        try:
            where, _ = self._enter(tuple(parts[:-1]))
            status = os.stat(parts[-1], dir_fd=where, follow_symlinks=False)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                raise BadArchive(f"the link {member.name!r:.200} does not lead to a file")
            if is_folder(name, here) or not _is_same(name, here, status):
                remove(name, here)
                os.link(parts[-1], name, src_dir_fd=where, dst_dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)

    def _names(self, path: tuple[bytes, ...]) -> "Names":
        """Return the names that this layer has in a folder."""
        names = self._added
        for name in path:
            names = names.setdefault(name, {})
        return names

    def _empty(self, folder: int, added: "Names") -> None:
        """Remove what the layers below have in a folder, of which this layer added some names."""
        for name in map(os.fsencode, os.listdir(folder)):
            if name not in added:
                remove(name, folder)
            elif is_folder(name, folder):
                below = os.open(name, _FOLDER, dir_fd=folder)
                try:
                    self._empty(below, added[name])
                finally:
                    os.close(below)

    def _enter(self, path: tuple[bytes, ...]) -> tuple[int, tuple[bytes, ...]]:
        """Return a descriptor of a folder, valid until the next call, and its path without links.

        Missing folders are created. Links are resolved as if the root were ``/``.
        """
        if path != self._folder:
            opened, resolved = self._walk(path)
            os.close(self._opened)
            self._folder, self._resolved, self._opened = path, resolved, opened
        return self._opened, self._resolved

    def _walk(self, path: tuple[bytes, ...]) -> tuple[int, tuple[bytes, ...]]:
        names: list[bytes] = []
        folders = [os.dup(self._root)]
        left = [*reversed(path)]
        links = 0
        try:
            while left:
                name = left.pop()
                if name == b"..":
                    if names:
                        names.pop()
                        os.close(folders.pop())
                    continue
                target = self._step(name, folders)
                if target is None:
                    names.append(name)
                    if len(names) > DEEPEST:
                        raise BadArchive(f"{b'/'.join(path)!r:.200} is more than {DEEPEST} deep")
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise BadArchive(f"{b'/'.join(path)!r:.200} has too many links")
                if target.startswith(b"/"):
                    names = []
                    while len(folders) > 1:
                        os.close(folders.pop())
                left += [part for part in reversed(target.split(b"/")) if part not in (b"", b".")]
            return folders.pop(), tuple(names)
        finally:
            for folder in folders:
                os.close(folder)

    def _step(self, name: bytes, folders: list[int]) -> bytes | None:
        """Enter a folder, and create it if there is none; return the target if it is a link."""
        try:
            folders.append(os.open(name, _FOLDER, dir_fd=folders[-1]))
            return None
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            status = os.stat(name, dir_fd=folders[-1], follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                return os.readlink(name, dir_fd=folders[-1])
            remove(name, folders[-1])
        self._grow(ENTRY_BYTES)
        os.mkdir(name, 0o755, dir_fd=folders[-1])
        own(name, folders[-1], self._owner)
        folders.append(os.open(name, _FOLDER, dir_fd=folders[-1]))
        return None


def _parts(name: str) -> list[bytes]:
    """Return the names of a path.

    Raises:
        BadArchive: the path is too long, or has ``..``.
    """
    path = _encoded(name)
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise BadArchive(f"the path {name!r:.200} has '..'")
    if len(path) > _LONGEST_PATH:
        raise BadArchive(f"the path {name!r:.200} has more than {_LONGEST_PATH} bytes")
    return parts


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", errors="surrogateescape")


def _is_same(name: bytes, folder: int, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), status)
    except FileNotFoundError:
        return False


def _copy(member: ArchiveMember, target: int, grow: Callable[[int], None]) -> None:
    with open(target, "wb", buffering=0) as file:
        copy_content(member.content.read, file, grow)
        os.fchmod(target, member.mode & 0o777)
        os.utime(target, ns=(time.time_ns(), member.modified * 10**9))
