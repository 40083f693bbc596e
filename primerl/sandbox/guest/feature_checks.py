"""Checks of kernel features, each tried in a child process rather than guessed from versions."""

import errno
import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable

from primerl.sandbox.guest.isolation import (
    kernel,
    landlock,
    namespace_sandbox,
    seccomp,
    shared_root,
)

_NAMESPACES = {
    "mount namespace": kernel.CLONE_NEWNS,
    "pid namespace": kernel.CLONE_NEWPID,
    "network namespace": kernel.CLONE_NEWNET,
    "ipc namespace": kernel.CLONE_NEWIPC,
    "uts namespace": kernel.CLONE_NEWUTS,
    "cgroup namespace": kernel.CLONE_NEWCGROUP,
}


def main() -> None:
    """Print the results of all checks as JSON: a list of (name, errno or 0, message)."""
    rows = [_tried("user namespace", _user_namespace)]
    for name, flag in _NAMESPACES.items():
        rows.append(_tried(name, lambda flag=flag: _user_namespace(flag)))  # type: ignore[misc]
    rows += [
        _tried("tmpfs in a user namespace", _mount_tmpfs),
        _tried("own /proc (fails where a container masks parts of /proc)", _mount_proc),
        _tried("overlay in a user namespace (optional)", _mount_overlay),
        _tried("loopback interface", _loopback),
        _tried("seccomp filter", _filter),
        _tried("pidfd", lambda: os.close(os.pidfd_open(os.getpid()))),
        _tried("landlock", _landlock),
        _tried("landlock of version 6", _scoped_landlock),
    ]
    json.dump(rows, sys.stdout)


def _tried(name: str, attempt: Callable[[], None]) -> tuple[str, int, str]:
    """Try a feature in a child process; return its name, the errno or 0, and the message."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        failure = (0, "")
        try:
            attempt()
        except Exception as error:  # any error is the result of the check
            failure = (getattr(error, "errno", None) or 0, str(error) or type(error).__name__)
        os.write(theirs, json.dumps(failure).encode()[:4096])
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    if not said:
        return name, 0, f"the check was killed by signal {os.WTERMSIG(status)}"
    number, message = json.loads(said)
    return name, number, message


def _user_namespace(flags: int = 0) -> None:
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    kernel.map_user(shared_root.INSIDE, user, group)


def _mount_tmpfs() -> None:
    _user_namespace(kernel.CLONE_NEWNS)
    kernel.mount("tmpfs", tempfile.gettempdir(), "tmpfs", kernel.MS_NOSUID, "size=4k")


def _mount_proc() -> None:
    _user_namespace(0)
    if (pid := kernel.fork_into_namespaces(namespace_sandbox.FLAGS & ~kernel.CLONE_NEWUSER)) == 0:
        try:
            kernel.mount("proc", "/proc", "proc")
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number:
        raise OSError(number, f"mount proc: {os.strerror(number)}")


def _mount_overlay() -> None:
    _mount_tmpfs()
    folder = tempfile.gettempdir()
    os.makedirs(f"{folder}/a")
    kernel.mount("tmpfs", f"{folder}/a", "tmpfs", 0, "size=64k")
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(f"{folder}/a/{name}")
    layers = (
        f"lowerdir={folder}/a/lower,upperdir={folder}/a/upper,workdir={folder}/a/work,userxattr"
    )
    kernel.mount("overlay", f"{folder}/a/merged", "overlay", 0, layers)


def _loopback() -> None:
    _user_namespace(kernel.CLONE_NEWNET)
    kernel.raise_loopback()
    socket.create_server(("127.0.0.1", 0)).close()


def _filter() -> None:
    seccomp.install(seccomp.program(platform.machine(), sockets=True))
    try:
        os.unlink("/nonexistent-primerl")
    except FileNotFoundError:
        return


def _scoped_landlock() -> None:
    if landlock.version() < landlock.SCOPED_VERSION:
        raise OSError(errno.ENOSYS, f"this kernel's Landlock is version {landlock.version()}")


def _landlock() -> None:
    landlock.confine(readable=["/"], writable=[], network=True)
