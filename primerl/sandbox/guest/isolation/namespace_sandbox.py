"""Sandboxes of the tier ``namespaces``: their mounts, network, limits and capabilities."""

import contextlib
import functools
import os
import platform
import resource
import signal
import socket
from typing import Any

from primerl.sandbox.guest import child, init, processes, watchdog
from primerl.sandbox.guest.isolation import (
    kernel,
    landlock,
    seccomp,
    shared_root,
    subordinate_users,
)
from primerl.sandbox.guest.jobs import interpreter

FLAGS = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
PROXY_PORT = 3128
# Files of /proc that describe the host, and are therefore hidden. None is writable here anyway.
HOST_FILES = ("cmdline", "kallsyms", "kcore", "key-users", "keys", "kmsg", "modules", "timer_list")
_PRIVATE = kernel.MS_NOSUID | kernel.MS_NODEV
# Socket buffers don't count as any process's memory, so their sizes are limited.
_SOCKET_BUFFERS = {
    "net/core/somaxconn": "16",
    "net/ipv4/tcp_rmem": "4096 32768 65536",
    "net/ipv4/tcp_wmem": "4096 16384 65536",
    "net/unix/max_dgram_qlen": "10",
}
_MOST_SIGNALS = 256
_MOST_LOCKED_BYTES = 65536
_MOST_TERMINALS = 32


class NamespaceSandbox:
    """The zygote's factory of sandboxes with their own namespaces of every kind.

    If root started the pool, or a user with subordinate users, each sandbox belongs to a separate
    user. Sandboxes with a prepared root filesystem all belong to the user who owns its files.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._filter = seccomp.program(platform.machine(), sockets=True)
        self._landlock = landlock.version() > 0
        readable = config["readable"]
        subordinate = subordinate_users.enter(lambda: shared_root.unreadable(readable) is None)
        self._users = shared_root.UnusedUsers()
        self.separate = self._users.separate
        # Not 0 only if this is real root, which must not own a sandbox.
        self.user = 0 if subordinate else self._users.shared
        shared_root.enter_namespaces(as_root=subordinate or self.user != 0)
        # A shared mapping of /dev/zero gives memory that nothing counts; Landlock prevents it.
        devices = [name for name in shared_root.DEVICES if name != "zero" or self._landlock]
        shared_root.build(
            f"{config['folder']}/shared_root",
            readable=readable,
            roots=f"{config['folder']}/roots",
            devices=devices,
        )
        with shared_root.acting_as(self.user):
            shared_root.check_access(readable)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def fork(self, number: int, settings: dict[str, Any]) -> int:
        """Fork the init process of a sandbox into new namespaces; return the pid, 0 in the fork."""
        user = self._users.of(number) if settings["root"] is None else self.user
        with shared_root.acting_as(user):
            pid = kernel.fork_into_namespaces(FLAGS)
            if pid == 0:
                self.user = user
        return pid

    def reap(self) -> None:
        """Do nothing: ended sandboxes leave nothing to clean up."""

    def become(self, control: socket.socket, settings: dict[str, Any], number: int) -> None:
        """Turn this process into the init process of a sandbox, and serve its jobs."""
        del number
        library = os.stat(os.__file__)
        settings = settings | {"landlock": self._landlock}
        init.introduce(control, lambda: set_up(settings, user=self.user))
        start_child = functools.partial(
            child.main,
            filter_program=self._filter,
            confine=None,
            environment=interpreter.ENVIRONMENT,
            shared=_same_library(library),
            open_files=settings["open_files"],
        )
        init.Init(
            control,
            settings,
            start_child=start_child,
            processes=processes.OwnNamespace(),
            written=watchdog.filesystem_use,
            sockets=watchdog.sockets_of_namespace,
        ).serve()


def _same_library(before: os.stat_result) -> bool:
    """Check that the path of this interpreter's standard library still leads to the same file."""
    try:
        return os.path.samestat(before, os.stat(os.__file__))
    except OSError:
        return False


def set_up(settings: dict[str, Any], *, user: int) -> socket.socket | None:
    """Set up a sandbox in the new namespaces of this process, its init process.

    ``user`` is the uid and gid of this process outside, or 0 for root of an outer user namespace.
    Returns a listening socket for the owner's proxy if the settings enable the network, else None.

    Raises:
        OSError: the kernel refuses a step; the message names the step.
    """
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise root owns its files in /proc
    kernel.map_user(shared_root.INSIDE, user, user)
    shared_root.become_user(shared_root.INSIDE)
    _mount_scratch(settings)
    if settings["root"] is None:
        kernel.mount("tmpfs", shared_root.ROOTS, "tmpfs", _PRIVATE | kernel.MS_RDONLY, "size=4k")
    else:
        _change_root(settings)
    _mount_proc()
    _mount_folders()
    kernel.mount(
        "devpts",
        "/dev/pts",
        "devpts",
        kernel.MS_NOSUID | kernel.MS_NOEXEC,
        f"newinstance,ptmxmode=0666,mode=620,max={_MOST_TERMINALS}",
    )
    kernel.raise_loopback()
    socket.sethostname("sandbox")
    listener = _listen() if settings["network"] else None
    limit_all(settings)
    if settings["landlock"]:
        _confine(root=settings["root"] is not None)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.chdir(shared_root.HOME)
    return listener


def _mount_scratch(settings: dict[str, Any]) -> None:
    """Mount the only writable filesystem, whose size and inode limits cover all writable folders.

    If readable paths are below a writable folder, the shared root's folders that lead to them are
    mounted there, so that code can't rename, remove or change them.
    """
    limits = f"size={settings['disk_bytes']},nr_inodes={settings['files']},mode=755"
    kernel.mount("tmpfs", shared_root.SCRATCH, "tmpfs", _PRIVATE, limits)
    for place, name in shared_root.PLACES.items():
        folder = f"{shared_root.SCRATCH}/{name}"
        os.mkdir(folder)
        os.chmod(folder, 0o755 if place == shared_root.HOME else 0o1777)
        for entry in shared_root.entries(place, settings["readable"]):
            target = folder + entry.removeprefix(place)
            shared_root.make_target(target, entry)
            _place(entry, target)


def _mount_folders() -> None:
    for place, name in shared_root.PLACES.items():
        _place(f"{shared_root.SCRATCH}/{name}", place)
    # No path leads to the scratch filesystem any more; its bind mounts above remain.
    kernel.unmount(shared_root.SCRATCH)


def _place(source: str, target: str) -> None:
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _mount_proc() -> None:
    kernel.mount("proc", "/proc", "proc", _PRIVATE | kernel.MS_NOEXEC)
    for name, value in _SOCKET_BUFFERS.items():
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/sys/{name}", "w", encoding="utf-8") as file,
        ):
            file.write(value)
    for name in HOST_FILES:
        if os.path.lexists(f"/proc/{name}"):
            kernel.mount("/dev/null", f"/proc/{name}", None, kernel.MS_BIND)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _PRIVATE | kernel.MS_NOEXEC
    kernel.mount("none", "/proc", None, flags)


def _listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", PROXY_PORT), backlog=16)
    listener.setblocking(False)
    return listener


def limit_all(settings: dict[str, Any]) -> None:
    """Set the rlimits of all processes of a sandbox; the child sets its own and its job's.

    The init process may open more files than the child. The kernel counts the descriptors that a
    user's sockets pass, and refuses to pass more if there are more than a process may open. So a
    sandbox that has passed as many as it can does not keep its init process from passing one.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kernel.limit(resource.RLIMIT_CORE, 0)
    kernel.limit(resource.RLIMIT_NPROC, settings["processes"] + 1)
    kernel.limit(resource.RLIMIT_MEMLOCK, _MOST_LOCKED_BYTES)
    kernel.limit(resource.RLIMIT_MSGQUEUE, 0)
    kernel.limit(resource.RLIMIT_SIGPENDING, _MOST_SIGNALS)
    for kind in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
        kernel.limit(kind, 0)


def _confine(*, root: bool) -> None:
    """Apply Landlock as a second layer behind the mounts, also against writes to /dev/zero."""
    folders = [*shared_root.PLACES, "/dev/pts"]
    landlock.confine(
        readable=["/"],
        writable=["/"] if root else folders,
        devices=["/dev/null", "/dev/full"],
        network=True,
    )


# ---- sessions with their own root filesystem ----


def _change_root(settings: dict[str, Any]) -> None:
    """Change the root to a prepared root filesystem; its changes go to the scratch filesystem."""
    new, scratch = shared_root.NEW_ROOT, shared_root.SCRATCH
    lower = f"{shared_root.ROOTS}/{settings['root']}"
    for name in ("changes", "work", "root"):
        os.mkdir(f"{scratch}/{name}")
    if settings["overlay"]:
        layers = f"lowerdir={lower},upperdir={scratch}/changes,workdir={scratch}/work,userxattr"
        kernel.mount("overlay", new, "overlay", _PRIVATE, layers)
    else:
        _place(f"{scratch}/root", new)
        _copy(lower, new)
    for path in (*shared_root.FOLDERS, shared_root.SCRATCH, "/dev"):
        os.makedirs(new + path, exist_ok=True)
    _show_folders(settings["readable"], new)
    _add_etc(new)
    for path in (shared_root.SCRATCH, "/proc"):
        _place(path, new + path)
    _add_devices(new)
    kernel.pivot_root(new)


def _copy(source: str, target: str) -> None:
    import shutil  # slow to import, and needed only where overlayfs is unavailable

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def _show_folders(paths: list[str], root: str) -> None:
    """Add the pool's readable paths that the root filesystem lacks."""
    hidden = [path for place in shared_root.PLACES for path in shared_root.below(place, paths)]
    for path in paths:
        if path in hidden or os.path.lexists(root + path):
            continue
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
            continue
        shared_root.make_target(root + path, path)
        _place(path, root + path)


def _add_etc(root: str) -> None:
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        if not os.path.lexists(f"{root}/etc/{name}"):
            with open(f"/etc/{name}", "rb") as source, open(f"{root}/etc/{name}", "wb") as target:
                target.write(source.read())


def _add_devices(root: str) -> None:
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "size=64k,mode=755")
    for name in shared_root.DEVICES:
        if name == "zero":  # a shared mapping of it gives memory that nothing counts
            continue
        open(f"{root}/dev/{name}", "w", encoding="utf-8").close()
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", None, kernel.MS_BIND)
        kernel.restrict_mounts(f"{root}/dev/{name}", shared_root.DEVICE_FLAGS)
    for name in ("shm", "pts"):
        os.mkdir(f"{root}/dev/{name}")
    shared_root.link_devices(root)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.mount("none", f"{root}/dev", None, flags)
