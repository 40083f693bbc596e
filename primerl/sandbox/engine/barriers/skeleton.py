"""The read-only root that all sandboxes of a pool share: listed folders, few devices, a small
/etc.
"""

import os
import shlex
import stat
from collections.abc import Iterable

from primerl.sandbox.engine.barriers import kernel

INSIDE = 1000  # user and group of the code, in its own namespace
HOME = "/sandbox"
ROOTS = "/.roots"  # prepared root filesystems, which a sandbox mounts or hides
NEW_ROOT = "/.root"
SCRATCH = "/.scratch"  # the only writable filesystem; its folders appear in several places
DEVICES = ("null", "zero", "full", "random", "urandom")
# Folders of a sandbox's own, which hide the host's, and their names in the scratch filesystem.
PLACES = {HOME: "home", "/tmp": "tmp", "/var/tmp": "var", "/dev/shm": "shm"}
FOLDERS = (*PLACES, "/dev/pts", "/proc", "/etc", "/root")
_ETC = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nsandbox:x:{INSIDE}:{INSIDE}::{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nsandbox:x:{INSIDE}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def enter_namespaces(*, as_root: bool) -> None:
    """Enter a mount namespace of one's own.

    An ordinary user enters a user namespace first. Real root doesn't: it mounts as root, and then
    becomes a user that nobody else is, so that no sandbox ever belongs to root.
    """
    if as_root:
        kernel.unshare(kernel.CLONE_NEWNS)
    else:
        user, group = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        kernel.map_user(0, user, group)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


def become_user(uid: int) -> None:
    """Change from real root to ``uid``, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or its files under /proc belong to root
    if os.getresuid() != (uid, uid, uid):
        raise PermissionError(f"this process could not become user {uid}")


def check_access(readable: Iterable[str]) -> None:
    """Raise PermissionError if this process can't read its own library, or a readable path."""
    if not os.access(os.__file__, os.R_OK):
        raise PermissionError(
            f"sandboxes can't read the interpreter's library, {os.__file__}; name an interpreter "
            "that every user can read, as in SandboxPool(python='/usr/bin/python3')"
        )
    for path in readable:
        if not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
            raise PermissionError(
                f"sandboxes belong to user {os.getuid()}, who can't read {path}: let everybody "
                f"read it and enter the folders above (chmod -R o+rX {shlex.quote(path)}), or "
                "name a copy that everybody can read"
            )


def build(
    folder: str, *, readable: Iterable[str], roots: str, devices: Iterable[str] = DEVICES
) -> None:
    """Make a root of the paths ``readable`` under ``folder``, and make it this process's root.

    Raises:
        OSError: a path can't be opened or mounted.
    """
    # Opened before anything is mounted: the folder may cover one of them.
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in sorted(set(readable))]
    prepared = os.open(roots, os.O_PATH | os.O_CLOEXEC)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID, "size=4m,mode=755")
    for path in (*FOLDERS, ROOTS, NEW_ROOT, SCRATCH):
        os.makedirs(folder + path, exist_ok=True)
    for name, content in _ETC.items():
        with open(f"{folder}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(content)
    for path, source in sources:
        _show(path, source, folder)
        os.close(source)
    for name in devices:
        _bind(f"/dev/{name}", f"{folder}/dev/{name}", kernel.MS_NOSUID | kernel.MS_NOEXEC)
    link_devices(folder)
    _bind(f"/proc/self/fd/{prepared}", folder + ROOTS, kernel.MS_NOSUID | kernel.MS_NODEV)
    os.close(prepared)
    # Only with the whole of /proc in sight does the kernel let a user namespace mount its own.
    kernel.mount("/proc", f"{folder}/proc", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount(
        "none",
        folder,
        None,
        kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID,
    )
    kernel.pivot_root(folder)


def link_devices(root: str) -> None:
    """The links in ``/dev`` that programs expect."""
    links = {"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    links |= {"fd": "/proc/self/fd", "ptmx": "pts/ptmx"}
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")


def below(place: str, paths: Iterable[str]) -> list[str]:
    """The sorted ``paths`` that are below the folder ``place``."""
    return sorted(path for path in set(paths) if path.startswith(f"{place}/"))


def entries(place: str, paths: Iterable[str]) -> list[str]:
    """The entries of the folder ``place`` through which ``paths`` below it are reached."""
    names = {path.removeprefix(f"{place}/").partition("/")[0] for path in below(place, paths)}
    return [f"{place}/{name}" for name in sorted(names)]


def make_target(path: str, like: str) -> None:
    """Make an empty folder, or an empty file, that ``like`` can be mounted on."""
    if os.path.isdir(like):
        os.makedirs(path, exist_ok=True)
    elif not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x", encoding="utf-8").close()


def _show(path: str, source: int, root: str) -> None:
    """Make ``path`` appear, read-only, under ``root``.

    A link appears as a link; in a place of a sandbox's own, which could change it, as its target.
    """
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and not any(below(place, [path]) for place in PLACES):
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        return
    if os.path.ismount(target):
        return
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    _bind(f"/proc/self/fd/{source}", target, flags)


def _bind(source: str, target: str, flags: int) -> None:
    if not os.path.lexists(target):
        open(target, "w", encoding="utf-8").close()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mounts(target, flags)


# One for each pool and sandbox, so that limits that count by user hold for each.
_FIRST = 2_000_000_000
_MOST_PROCESSES = 1 << 22  # the kernel's limit for process ids
_MOST_IN_USE = 500


def unused_user(number: int) -> int:
    """A user that no account and no other pool has, or 0 for an ordinary user.

    Other numbers give other users. 0 is also how an ordinary user is called in its own user
    namespace; so is the only user of a container that maps no other.
    """
    if os.getuid() != 0:
        return 0
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    wanted = _FIRST + os.getppid() + number % _MOST_IN_USE * _MOST_PROCESSES
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    first, _, count = max(ranges, key=lambda entry: entry[2])
    chosen = count // 2 + os.getppid() + number
    return first + 1 + chosen % (count - 1) if count > 1 else 0
