"""The inside of one sandbox: its mounts, its network, its limits, and no capabilities."""

import contextlib
import functools
import os
import platform
import resource
import signal
import socket
from typing import Any

from primerl.sandbox.engine import child, init, processes, watchdog
from primerl.sandbox.engine.barriers import kernel, landlock, seccomp, skeleton
from primerl.sandbox.engine.work import interpreter

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
# Files of /proc that describe the host. None of them can be written here in any case.
HOST_FILES = ("cmdline", "kallsyms", "kcore", "key-users", "keys", "kmsg", "modules", "timer_list")
_PRIVATE = kernel.MS_NOSUID | kernel.MS_NODEV
# Sockets' buffers aren't part of any process's memory.
_SOCKET_BUFFERS = {
    "net/core/somaxconn": "16",
    "net/ipv4/tcp_rmem": "4096 32768 65536",
    "net/ipv4/tcp_wmem": "4096 16384 65536",
    "net/unix/max_dgram_qlen": "10",
}
_MOST_SIGNALS = 256
_MOST_LOCKED_BYTES = 65536


class Namespaces:
    """Sandboxes with everything of their own but the kernel: a way of the zygote's."""

    flags = FLAGS  # of clone(2), for a sandbox's first process

    def __init__(self, config: dict[str, Any]) -> None:
        self._filter = seccomp.program(platform.machine(), sockets=True)
        self._landlock = landlock.version() > 0
        # Other than 0 only for real root, which must not own a sandbox.
        self.user = skeleton.unused_user(0)
        skeleton.enter_namespaces(as_root=self.user != 0)
        # Written to through a shared mapping, /dev/zero gives memory that nothing counts.
        devices = [name for name in skeleton.DEVICES if name != "zero" or self._landlock]
        skeleton.build(
            f"{config['folder']}/skeleton",
            readable=config["readable"],
            roots=f"{config['folder']}/roots",
            devices=devices,
        )
        if self.user != 0:
            skeleton.become_user(self.user)
        skeleton.check_access(config["readable"])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def made(self, pid: int, number: int) -> None:
        """Nothing: the kernel ends all of a sandbox with its first process."""

    def reap(self) -> None:
        """Nothing, as above."""

    def become(self, control: socket.socket, settings: dict[str, Any], number: int) -> None:
        """Turn this process into the first one of a sandbox, and serve its orders."""
        del number
        library = os.stat(os.__file__)
        settings = settings | {"landlock": self._landlock}
        init.introduce(control, lambda: set_up(settings, uid=self.user, gid=self.user))
        start_child = functools.partial(
            child.main,
            filter_program=self._filter,
            confine=None,
            environment=interpreter.ENVIRONMENT,
            shared=_same_library(library),
        )
        init.Init(
            control,
            settings,
            start_child=start_child,
            processes=processes.OwnNamespace(),
            written=watchdog.filesystem_use,
        ).serve()


def _same_library(before: os.stat_result) -> bool:
    """Whether this interpreter's library is still the one under its path."""
    try:
        return os.path.samestat(before, os.stat(os.__file__))
    except OSError:
        return False


def set_up(settings: dict[str, Any], *, uid: int, gid: int) -> socket.socket | None:
    """Finish a sandbox in the namespaces that this process is the first in.

    Returns the socket that a proxy outside listens on, if the network was asked for.

    Raises:
        OSError: the kernel refuses a step, which the message names.
    """
    kernel.map_user(skeleton.INSIDE, uid, gid)
    _mount_scratch(settings)
    if settings["root"] is None:
        kernel.mount("tmpfs", skeleton.ROOTS, "tmpfs", _PRIVATE | kernel.MS_RDONLY, "size=4k")
    else:
        _change_root(settings)
    _mount_proc()
    _mount_folders()
    kernel.mount(
        "devpts",
        "/dev/pts",
        "devpts",
        kernel.MS_NOSUID | kernel.MS_NOEXEC,
        "newinstance,ptmxmode=0666,mode=620",
    )
    kernel.raise_loopback()
    socket.sethostname("sandbox")
    listener = _listen() if settings["network"] else None
    limit_all(settings)
    if settings["landlock"]:
        _confine(root=settings["root"] is not None)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.chdir(skeleton.HOME)
    return listener


def _mount_scratch(settings: dict[str, Any]) -> None:
    """One writable filesystem, so that one size and one number of files limit all places.

    Where readable paths are below a place, it gets the folders of the skeleton's that lead there:
    mounts, which can't be renamed or removed, and read-only.
    """
    limits = f"size={settings['disk_bytes']},nr_inodes={settings['files']},mode=755"
    kernel.mount("tmpfs", skeleton.SCRATCH, "tmpfs", _PRIVATE, limits)
    for place, name in skeleton.PLACES.items():
        folder = f"{skeleton.SCRATCH}/{name}"
        os.mkdir(folder)
        os.chmod(folder, 0o755 if place == skeleton.HOME else 0o1777)
        for entry in skeleton.entries(place, settings["readable"]):
            target = folder + entry.removeprefix(place)
            skeleton.make_target(target, entry)
            _place(entry, target)


def _mount_folders() -> None:
    for place, name in skeleton.PLACES.items():
        _place(f"{skeleton.SCRATCH}/{name}", place)
    # Reachable by no path from here on; the folders above stay.
    kernel.unmount(skeleton.SCRATCH)


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
    """The limits that hold for all processes; those of one job are the child's."""
    kernel.limit(resource.RLIMIT_CORE, 0)
    kernel.limit(resource.RLIMIT_NOFILE, settings["open_files"])
    kernel.limit(resource.RLIMIT_NPROC, settings["processes"] + 1)
    kernel.limit(resource.RLIMIT_MEMLOCK, _MOST_LOCKED_BYTES)
    kernel.limit(resource.RLIMIT_MSGQUEUE, 0)
    kernel.limit(resource.RLIMIT_SIGPENDING, _MOST_SIGNALS)
    for kind in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
        kernel.limit(kind, 0)


def _confine(*, root: bool) -> None:
    """A second barrier behind the mounts; it also keeps /dev/zero from giving shared memory."""
    folders = [*skeleton.PLACES, "/dev/pts"]
    landlock.confine(
        readable=["/"],
        writable=["/"] if root else folders,
        devices=["/dev/null", "/dev/full"],
        network=True,
    )


# ---- a root filesystem of the session's own ----


def _change_root(settings: dict[str, Any]) -> None:
    """Make a prepared root filesystem the root, with changes kept in the scratch filesystem."""
    new, scratch = skeleton.NEW_ROOT, skeleton.SCRATCH
    lower = f"{skeleton.ROOTS}/{settings['root']}"
    for name in ("changes", "work", "root"):
        os.mkdir(f"{scratch}/{name}")
    if settings["overlay"]:
        layers = f"lowerdir={lower},upperdir={scratch}/changes,workdir={scratch}/work,userxattr"
        kernel.mount("overlay", new, "overlay", _PRIVATE, layers)
    else:
        _place(f"{scratch}/root", new)
        _copy(lower, new)
    for path in (*skeleton.FOLDERS, skeleton.SCRATCH, "/dev"):
        os.makedirs(new + path, exist_ok=True)
    _show_folders(settings["readable"], new)
    _add_etc(new)
    for path in (skeleton.SCRATCH, "/proc"):
        _place(path, new + path)
    _add_devices(new)
    kernel.pivot_root(new)


def _copy(source: str, target: str) -> None:
    import shutil  # takes long to load, and only kernels without overlays need it

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def _show_folders(paths: list[str], root: str) -> None:
    """Add the readable folders of the pool that the root filesystem lacks."""
    hidden = [path for place in skeleton.PLACES for path in skeleton.below(place, paths)]
    for path in paths:
        if path in hidden or os.path.lexists(root + path):
            continue
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
            continue
        skeleton.make_target(root + path, path)
        _place(path, root + path)


def _add_etc(root: str) -> None:
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        if not os.path.lexists(f"{root}/etc/{name}"):
            with open(f"/etc/{name}", "rb") as source, open(f"{root}/etc/{name}", "wb") as target:
                target.write(source.read())


def _add_devices(root: str) -> None:
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "size=64k,mode=755")
    for name in skeleton.DEVICES:
        if name == "zero":  # mapped for sharing, it gives memory that nothing counts
            continue
        open(f"{root}/dev/{name}", "w", encoding="utf-8").close()
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    for name in ("shm", "pts"):
        os.mkdir(f"{root}/dev/{name}")
    skeleton.link_devices(root)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.mount("none", f"{root}/dev", None, flags)
