"""The inside of a sandbox without namespaces: a folder of the host's, under Landlock.

Only its own folder can be written, only listed paths can be read, and no socket can be made. Where
the pool was started by root, each sandbox has a user of its own, else the pool's.
"""

import contextlib
import errno
import functools
import os
import platform
import resource
import signal
import socket
import stat
from typing import Any

from primerl.sandbox.engine import child, init, processes, removal
from primerl.sandbox.engine.barriers import kernel, landlock, namespaces, seccomp, skeleton
from primerl.sandbox.engine.work import interpreter

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_BEYOND = 1 << 62


class Confined:
    """Sandboxes of Landlock and the filter alone: a way of the zygote's."""

    flags = 0  # of clone(2), for a sandbox's first process

    def __init__(self, config: dict[str, Any]) -> None:
        if landlock.version() < landlock.SCOPED_VERSION:
            raise OSError(
                errno.ENOSYS,
                f"Landlock of version {landlock.SCOPED_VERSION} is needed, for signals and sockets "
                f"(Linux 6.12); this kernel has {landlock.version()}",
            )
        self._folder = f"{config['folder']}/sandboxes"
        os.mkdir(self._folder, 0o711)
        self._filter = seccomp.program(platform.machine(), sockets=False, attributes=False)
        self._alive: dict[int, str] = {}
        self.user = skeleton.unused_user(0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # What an ended sandbox leaves becomes this process's child, and is killed.
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)

    def made(self, pid: int, number: int) -> None:
        """Remember a new sandbox."""
        self._alive[pid] = f"{self._folder}/{number}"

    def reap(self) -> None:
        """Clear away what ended sandboxes leave: processes first, then the folder."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                ended += [self._alive.pop(pid)] if pid in self._alive else []
        for process in processes.children(str(os.getpid())):
            if int(process) not in self._alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        for folder in ended:
            removal.remove(folder)

    def become(self, control: socket.socket, settings: dict[str, Any], number: int) -> None:
        """Turn this process into the first one of a sandbox, and serve its orders."""
        folder = f"{self._folder}/{number}"
        init.introduce(control, lambda: _set_up(settings, folder, skeleton.unused_user(number)))
        family = processes.Descendants()
        start_child = functools.partial(
            child.main,
            filter_program=self._filter,
            confine=lambda: _confine(settings, folder),
            environment=environment(folder),
            shared=True,
        )
        init.Init(
            control,
            settings,
            start_child=start_child,
            processes=family,
            written=lambda: written(folder, family, most_files=settings["files"]),
        ).serve()


def _set_up(settings: dict[str, Any], folder: str, user: int) -> None:
    for path in (folder, f"{folder}/home", f"{folder}/tmp"):
        os.mkdir(path, 0o700)
        os.chown(path, user or -1, user or -1)
    others = 0
    if user != 0:
        skeleton.become_user(user)
    else:
        others = _threads_of_this_user()
    skeleton.check_access(settings["readable"])
    namespaces.limit_all(settings | {"processes": settings["processes"] + others})
    kernel.drop_capabilities()
    os.chdir(f"{folder}/home")


def _confine(settings: dict[str, Any], folder: str) -> None:
    landlock.confine(
        readable=[*settings["readable"], *DEVICES],
        writable=[folder],
        devices=["/dev/null"],
        network=False,
    )


def environment(folder: str) -> dict[str, str]:
    """Variables of every process in a sandbox with that folder."""
    return interpreter.ENVIRONMENT | {"HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp"}


def written(folder: str, family: processes.Processes, *, most_files: int) -> tuple[int, int]:
    """Bytes and number of the files in a folder, and of deleted ones that its processes hold open.

    Beyond every limit if a folder can't be looked into; not counted on beyond ``most_files``.
    """
    deleted = _deleted_files(family.listed())
    size, count = sum(deleted.values()), len(deleted)
    folders = [folder]
    while folders and count <= most_files:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            return _BEYOND, _BEYOND
    return size, count


def _deleted_files(family: list[str]) -> dict[int, int]:
    """Sizes of the deleted files that processes hold open, by inode."""
    found: dict[int, int] = {}
    for process in family:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{process}/fd/{name}")
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        found[status.st_ino] = 512 * status.st_blocks
    return found


def _threads_of_this_user() -> int:
    """What counts for RLIMIT_NPROC already: it is kept per user, not per sandbox."""
    count, user = 0, os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return min(count, resource.getrlimit(resource.RLIMIT_NPROC)[0] & 0x7FFFFFFF)
