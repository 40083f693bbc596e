"""Subordinate users of an ordinary user, one for each sandbox of its pool.

The host's administrator grants them in ``/etc/subuid`` and ``/etc/subgid``. The setuid programs
``newuidmap`` and ``newgidmap`` map them into a user namespace.
"""

import os
from collections.abc import Callable

from primerl.sandbox.guest.isolation import kernel

_GRANTS = {"/usr/bin/newuidmap": "/etc/subuid", "/usr/bin/newgidmap": "/etc/subgid"}
_FIRST = 1  # of the subordinate users in the namespace


def enter(usable: Callable[[], bool]) -> bool:
    """Make this process root of a user namespace with subordinate users; return whether it is.

    Nothing changes for root, if this user has no subordinate users, or if ``usable`` returns False
    when it is called, in a child process, as a subordinate user.
    """
    if os.getuid() == 0 or not all(map(os.path.exists, _GRANTS)):
        return False
    granted = {program: _granted(file) for program, file in _GRANTS.items()}
    if not all(granted.values()):
        return False
    if not _succeeds(lambda: _map(granted) and _as_subordinate(usable)):
        return False
    if not _map(granted):
        raise PermissionError("subordinate users could be mapped, but can't be mapped any more")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    return True


def _granted(file: str) -> tuple[str, str] | None:
    """Return the first subordinate id that a file like ``/etc/subuid`` grants, and how many."""
    import pwd

    names = [str(os.getuid())]
    try:
        names.append(pwd.getpwuid(os.getuid()).pw_name)
        with open(file, encoding="utf-8") as lines:
            grants = [line.strip().split(":") for line in lines]
    except (KeyError, OSError):  # no account, or no such file
        return None
    for name, first, count in (grant for grant in grants if len(grant) == 3):
        if name in names and first.isdigit() and count.isdigit() and int(count) > 1:
            return first, count
    return None


def _map(granted: dict[str, tuple[str, str] | None]) -> bool:
    """Move this process into a new user namespace, and let a child map users and groups into it."""
    process, user, group = str(os.getpid()), str(os.getuid()), str(os.getgid())
    own = dict(zip(_GRANTS, (user, group), strict=True))
    unshared, unsharing = os.pipe()

    def run_programs() -> bool:
        os.close(unsharing)
        os.read(unshared, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        return not any(
            os.spawnv(
                os.P_WAIT, program, [program, process, "0", own[program], "1", str(_FIRST), *ids]
            )
            for program, ids in granted.items()
            if ids is not None
        )

    child = _started(run_programs)
    os.close(unshared)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)
    finally:
        os.close(unsharing)
        mapped = os.waitpid(child, 0)[1] == 0
    return mapped


def _as_subordinate(usable: Callable[[], bool]) -> bool:
    os.setgroups([])
    os.setresgid(_FIRST, _FIRST, _FIRST)
    os.setresuid(_FIRST, _FIRST, _FIRST)
    return usable()


def _succeeds(work: Callable[[], bool]) -> bool:
    return os.waitpid(_started(work), 0)[1] == 0


def _started(work: Callable[[], bool]) -> int:
    """Start a child process that exits with 0 if ``work`` returns True; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return pid
