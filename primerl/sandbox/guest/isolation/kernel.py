"""Wrappers, through ctypes, of system calls that Python's standard library lacks."""

import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 36, 38, 47
SECCOMP_MODE_FILTER = 2

_CLONE = {"x86_64": 56, "aarch64": 220}
_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_VM = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442  # numbers from 424 on are the same on all architectures
_SIGCHLD = 17
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MNT_DETACH = 2
_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


class CallFailed(OSError):
    """A system call failed; the message names the call."""


def checked(result: int, what: str) -> int:
    """Return the result of the C call ``what``.

    Raises:
        CallFailed: the result is negative; the error has the call's errno.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise CallFailed(number, f"{what}: {os.strerror(number)}")
    return result


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, data: str = ""
) -> None:
    """Mount a filesystem: ``mount(2)``."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    checked(result, f"mount {kind or source} on {target}")


def restrict_mounts(path: str, flags: int) -> None:
    """Set flags such as ``MS_RDONLY`` on a mount and all mounts below it: ``mount_setattr(2)``."""
    # MOUNT_ATTR_RDONLY, NOSUID, NODEV and NOEXEC have the same values as MS_*.
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, len(attributes)
    )
    checked(result, f"mount_setattr of {path}")


def pivot_root(new_root: str) -> None:
    """Make a mount the root of this process, and unmount the old root."""
    os.chdir(new_root)
    checked(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def unmount(path: str) -> None:
    """Detach a mount lazily, so that it disappears from the tree at once."""
    checked(_libc.umount2(os.fsencode(path), _MNT_DETACH), f"umount of {path}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces: ``unshare(2)``."""
    checked(_libc.unshare(flags), "unshare")


def fork_into_namespaces(flags: int) -> int:
    """Fork into new namespaces, like ``os.fork``; only safe in a single-threaded process."""
    arguments = [ctypes.c_ulong(flags | _SIGCHLD), *[ctypes.c_ulong(0)] * 4]
    return checked(_libc.syscall(_CLONE[platform.machine()], *arguments), "clone")


def same_memory(process: str, other: str) -> bool:
    """Check by ``kcmp(2)`` that two processes share all their memory; False where unknown."""
    number = _KCMP[platform.machine()]
    return bool(_libc.syscall(number, int(process), int(other), _KCMP_VM, 0, 0) == 0)


def prctl(option: int, *values: int) -> None:
    """Call ``prctl(2)`` with integer arguments."""
    arguments = [ctypes.c_ulong(value) for value in values]
    missing = [ctypes.c_ulong(0)] * (4 - len(values))
    checked(_libc.prctl(option, *arguments, *missing), f"prctl {option}")


def prctl_pointer(option: int, value: int, pointer: bytes) -> None:
    """Call ``prctl(2)`` with a pointer as its third argument."""
    checked(_libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def map_user(inside: int, uid: int, gid: int) -> None:
    """Map the outer ``uid`` and ``gid`` to ``inside``, this namespace's only user and group."""
    contents = {"setgroups": "deny", "uid_map": f"{inside} {uid} 1", "gid_map": f"{inside} {gid} 1"}
    for name, content in contents.items():
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(content)


def drop_capabilities() -> None:
    """Drop all capabilities of this process and of every process that it starts."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    prctl(PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    checked(_libc.capset(header, bytes(24)), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def raise_loopback() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def limit(kind: int, value: int) -> None:
    """Set the soft and hard rlimit to ``value``, or to the current hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
