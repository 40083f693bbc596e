"""Sandboxes of the tier ``landlock``: no namespaces, one host folder each, confined by Landlock.

Code can write only in its sandbox's folder, read only listed paths, and create no socket except
socket pairs. If root started the pool, each sandbox runs as a separate user, otherwise as the
pool's user.
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

from primerl.sandbox.guest import child, init, processes, removal, watchdog
from primerl.sandbox.guest.isolation import (
    kernel,
    landlock,
    namespace_sandbox,
    seccomp,
    shared_root,
)
from primerl.sandbox.guest.jobs import interpreter

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_BEYOND = 1 << 62
_MOST_REMOVERS = 4


class LandlockSandbox:
    """The zygote's factory of sandboxes that are isolated by Landlock and seccomp alone."""

    def __init__(self, config: dict[str, Any]) -> None:
        if landlock.version() < landlock.SCOPED_VERSION:
            raise OSError(
                errno.ENOSYS,
                f"Landlock version {landlock.SCOPED_VERSION} (Linux 6.12) is needed to restrict "
                f"signals and sockets; this kernel has version {landlock.version()}",
            )
        self._folder = f"{config['folder']}/sandboxes"
        os.mkdir(self._folder, 0o711)
        self._filter = seccomp.program(platform.machine(), sockets=False, attributes=False)
        self._alive: dict[int, str] = {}  # folders by the pids of the init processes
        self._left: list[str] = []  # folders of ended sandboxes, which no process removes yet
        self._removers: set[int] = set()
        self._users = shared_root.UnusedUsers()
        self.user = self._users.shared
        self.separate = self._users.separate
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Processes that outlive their sandbox become this process's children, and reap kills them.
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)

    def fork(self, number: int, settings: dict[str, Any]) -> int:
        """Fork the init process of a sandbox; return the pid, 0 in the fork."""
        del settings
        pid = kernel.fork_into_namespaces(0)
        if pid != 0:
            self._alive[pid] = f"{self._folder}/{number}"
        return pid

    def reap(self) -> None:
        """Clean up after ended sandboxes: kill leftover processes, and let others remove folders.

        Untrusted code may have left files that take seconds to remove. Therefore, a separate
        process removes each folder that isn't empty, while the zygote serves requests. When the
        pool ends, the keeper removes what is left.
        """
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self._removers.discard(pid)
                folder = self._alive.pop(pid, None)
                if folder is not None and not _is_removed(folder):
                    self._left.append(folder)
        for process in processes.children(str(os.getpid())):
            if int(process) not in self._alive and int(process) not in self._removers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        with contextlib.suppress(OSError):  # too many processes: the next call tries again
            while self._left and len(self._removers) < _MOST_REMOVERS:
                self._removers.add(_start_removing(self._left[0]))
                del self._left[0]

    def become(self, control: socket.socket, settings: dict[str, Any], number: int) -> None:
        """Turn this process into the init process of a sandbox, and serve its jobs."""
        folder = f"{self._folder}/{number}"
        init.introduce(control, lambda: _set_up(settings, folder, self._users.of(number)))
        family = processes.Descendants()
        start_child = functools.partial(
            child.main,
            filter_program=self._filter,
            confine=lambda: _confine(settings, folder),
            environment=environment(folder),
            shared=True,
            open_files=settings["open_files"],
        )
        init.Init(
            control,
            settings,
            start_child=start_child,
            processes=family,
            written=lambda: written(folder, family, most_files=settings["files"]),
            sockets=watchdog.sockets_of_processes,
        ).serve()


def _is_removed(folder: str) -> bool:
    """Remove the folder of a sandbox that left no files; return whether it did."""
    try:
        for path in (f"{folder}/home", f"{folder}/tmp", folder):
            os.rmdir(path)
    except OSError:
        return False
    return True


def _start_removing(folder: str) -> int:
    """Fork a process that removes a folder and ends, at the latest with the zygote; return its pid.

    Raises:
        OSError: the kernel refuses another process.
    """
    pid = os.fork()
    if pid == 0:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
            removal.remove(folder)
        finally:
            os._exit(0)
    return pid


def _set_up(settings: dict[str, Any], folder: str, user: int) -> None:
    for path in (folder, f"{folder}/home", f"{folder}/tmp"):
        os.mkdir(path, 0o700)
        os.chown(path, user or -1, user or -1)
    others = 0
    if user != 0:
        shared_root.become_user(user)
    else:
        others = _threads_of_this_user()
    shared_root.check_access(settings["readable"])
    namespace_sandbox.limit_all(settings | {"processes": settings["processes"] + others})
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
    """Return the environment of every process in the sandbox with the given folder."""
    return interpreter.ENVIRONMENT | {"HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp"}


def written(folder: str, family: processes.Processes, *, most_files: int) -> tuple[int, int]:
    """Return the size and number of the files in a folder, and of deleted files still held open.

    Deleted files are those that processes of ``family`` hold open. If a folder can't be listed,
    both numbers exceed every limit. Counting stops above ``most_files`` files.
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
        except FileNotFoundError:  # removed in the meantime
            continue
        except OSError:
            return _BEYOND, _BEYOND
    return size, count


def _deleted_files(family: list[str]) -> dict[int, int]:
    """Return the sizes, by inode, of deleted files that the given processes hold open."""
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
    """Count this user's threads on the host: RLIMIT_NPROC counts per user, not per sandbox."""
    count, user = 0, os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return min(count, resource.getrlimit(resource.RLIMIT_NPROC)[0] & 0x7FFFFFFF)
