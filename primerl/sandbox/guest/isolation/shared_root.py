"""The shared root: the read-only root of a pool's sandboxes, with listed paths, /dev and /etc."""

import contextlib
import os
import shlex
import stat
from collections.abc import Iterable, Iterator

from primerl.sandbox.guest.isolation import kernel

INSIDE = 1000  # uid and gid of the code in its user namespace
HOME = "/sandbox"
ROOTS = "/.roots"  # the prepared root filesystems, which each sandbox uses or hides
NEW_ROOT = "/.root"
SCRATCH = "/.scratch"  # the only writable filesystem; its folders appear in several places
DEVICES = ("null", "zero", "full", "random", "urandom")
# On a read-only mount, devices can be written to, but their times can't be set.
DEVICE_FLAGS = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC
# The sandbox's own writable folders, which hide the host's, with their names in SCRATCH.
PLACES = {HOME: "home", "/tmp": "tmp", "/var/tmp": "var", "/dev/shm": "shm"}
FOLDERS = (*PLACES, "/dev/pts", "/proc", "/etc", "/root")
_ETC = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nsandbox:x:{INSIDE}:{INSIDE}::{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nsandbox:x:{INSIDE}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def enter_namespaces(*, as_root: bool) -> None:
    """Enter a new mount namespace.

    An unprivileged user also enters a new user namespace. Real root does not: it mounts as root,
    and creates each sandbox as another user, so that no sandbox ever belongs to root.
    """
    if as_root:
        kernel.unshare(kernel.CLONE_NEWNS)
    else:
        user, group = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        kernel.map_user(0, user, group)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


def become_user(uid: int) -> None:
    """Change irrevocably from real root, or in ``acting_as``, to the user and group ``uid``."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise root owns its files in /proc
    if os.getresuid() != (uid, uid, uid):
        raise PermissionError(f"this process could not change to user {uid}")


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Let real root act as the user and group ``uid``; if ``uid`` is 0, do nothing.

    A new user namespace then belongs to this user, and the kernel counts what it uses as theirs.
    """
    if uid == 0:
        yield
        return
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        if os.getresuid()[2] == 0:  # not in a forked sandbox, where root is nobody
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)


def unreadable(readable: Iterable[str]) -> str | None:
    """Return a path that this process can't read, or None.

    The paths are the interpreter's library and those of ``readable``.
    """
    for path in (os.__file__, *readable):
        if not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
            return path
    return None


def check_access(readable: Iterable[str]) -> None:
    """Check that this process can read the interpreter's library and the ``readable`` paths.

    Raises:
        PermissionError: one of them can't be read.
    """
    path = unreadable(readable)
    if path == os.__file__:
        raise PermissionError(
            f"sandboxes can't read the interpreter's library, {path}; use an interpreter "
            "that every user can read, as in SandboxPool(python='/usr/bin/python3')"
        )
    if path is not None:
        raise PermissionError(
            f"sandboxes run as user {os.getuid()}, who can't read {path}: let all users "
            f"read it and enter the folders above it (chmod -R o+rX {shlex.quote(path)}), or "
            "list a copy that all users can read"
        )


def build(
    folder: str, *, readable: Iterable[str], roots: str, devices: Iterable[str] = DEVICES
) -> None:
    """Build a read-only root in ``folder`` from the ``readable`` paths, and change to that root.

    Raises:
        OSError: a path can't be opened or mounted.
    """
    # Opened before anything is mounted, because the mount on ``folder`` may hide a readable path.
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
        _bind(f"/dev/{name}", f"{folder}/dev/{name}", DEVICE_FLAGS)
    link_devices(folder)
    _bind(f"/proc/self/fd/{prepared}", folder + ROOTS, kernel.MS_NOSUID | kernel.MS_NODEV)
    os.close(prepared)
    # The kernel lets a user namespace mount its own /proc only if the current one is fully visible.
    kernel.mount("/proc", f"{folder}/proc", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount(
        "none",
        folder,
        None,
        kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID,
    )
    kernel.pivot_root(folder)


def link_devices(root: str) -> None:
    """Create the links in ``/dev`` that programs expect."""
    links = {"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    links |= {"fd": "/proc/self/fd", "ptmx": "pts/ptmx"}
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")


def below(place: str, paths: Iterable[str]) -> list[str]:
    """Return those of ``paths`` that are below the folder ``place``, sorted."""
    return sorted(path for path in set(paths) if path.startswith(f"{place}/"))


def entries(place: str, paths: Iterable[str]) -> list[str]:
    """Return the entries of the folder ``place`` that lead to the ``paths`` below it."""
    names = {path.removeprefix(f"{place}/").partition("/")[0] for path in below(place, paths)}
    return [f"{place}/{name}" for name in sorted(names)]


def make_target(path: str, like: str) -> None:
    """Create an empty folder or file on which ``like`` can be mounted."""
    if os.path.isdir(like):
        os.makedirs(path, exist_ok=True)
    elif not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x", encoding="utf-8").close()


def _show(path: str, source: int, root: str) -> None:
    """Show ``path`` read-only under ``root``.

    A symlink is copied as a symlink. In a writable folder, where code could change the link, its
    target is mounted instead.
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


_FIRST = 2_000_000_000
_MOST_PROCESSES = 1 << 22  # the kernel's limit for process ids
_MOST_IN_USE = 500


class UnusedUsers:
    """The uids of a pool: of each of its sandboxes, so that the kernel's counters are theirs alone.

    No account and no other pool uses them. They are all 0 if this process isn't root, and in a
    container whose user namespace maps only one user. 0 is also the uid of an unprivileged user in
    its own user namespace. ``shared`` is the uid for sandboxes that share files.
    """

    def __init__(self) -> None:
        self.shared = 0
        self._others = [0]
        if os.getuid() == 0:
            os.setgroups([])
            with open("/proc/self/uid_map", encoding="utf-8") as file:
                ranges = [tuple(map(int, line.split())) for line in file]
            pool = os.getppid()
            self.shared, *self._others = [_unused(ranges, pool, k) for k in range(_MOST_IN_USE)]

    @property
    def separate(self) -> bool:
        """Whether sandboxes have different uids."""
        return len(self._others) > 1 and self._others[0] != self._others[1]

    def of(self, number: int) -> int:
        """Return the uid of a sandbox by its number in the pool."""
        return self._others[number % len(self._others)]


def _unused(ranges: list[tuple[int, ...]], pool: int, number: int) -> int:
    wanted = _FIRST + pool + number * _MOST_PROCESSES
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    first, _, count = max(ranges, key=lambda entry: entry[2])
    chosen = count // 2 + pool * _MOST_IN_USE + number
    return first + 1 + chosen % (count - 1) if count > 1 else 0
