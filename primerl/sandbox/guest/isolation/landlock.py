"""Landlock: irrevocable restrictions on the files, sockets and signals that a process may use."""

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from primerl.sandbox.guest.isolation import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_TCP = 3  # binding and connecting
_SCOPES = 3  # abstract Unix sockets and signals reach only processes of the domain
_RULE_PATH_BENEATH = 1
SCOPED_VERSION = 6

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the kernel's Landlock ABI version, or 0 if it has no Landlock."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, 1)))


def confine(
    *,
    readable: Iterable[str],
    writable: Iterable[str],
    devices: Iterable[str] = (),
    network: bool,
) -> None:
    """Restrict this process, and every process that it starts, to the given paths.

    Access to a folder includes everything below it. Readable files can also be executed;
    ``devices`` can be read and written. If ``network`` is false, Landlock version 4 and later
    refuse TCP. From version 6 on, processes outside can't be signaled, and their abstract Unix
    sockets can't be reached.

    Raises:
        CallFailed: the kernel has no Landlock, or refuses a rule.
    """
    abi = version()
    if abi == 0:
        raise kernel.CallFailed(errno.ENOSYS, "landlock_create_ruleset: the kernel has no Landlock")
    handled = (1 << 13) - 1
    handled |= _REFER if abi >= 2 else 0
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL if abi >= 5 else 0
    tcp = _TCP if abi >= 4 and not network else 0
    attributes = struct.pack("QQQ", handled, tcp, _SCOPES if abi >= SCOPED_VERSION else 0)
    size = 24 if abi >= SCOPED_VERSION else 16 if abi >= 4 else 8
    ruleset = kernel.checked(
        _libc.syscall(_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset"
    )
    try:
        for path in readable:
            _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_FOLDER) & handled)
        for path in writable:
            _allow(ruleset, path, handled)
        for path in devices:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL) & handled)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(place).st_mode):
                rights &= _FILE_RIGHTS
            rule = struct.pack("=Qi", rights, place)
            result = _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
            kernel.checked(result, f"landlock_add_rule of {path}")
        finally:
            os.close(place)
