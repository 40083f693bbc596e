"""The inside of a sandbox that another program makes: its first process is a new interpreter.

The zygote executes the program with that interpreter as its command; orders come by a socket that
both inherit.
"""

import compileall
import json
import os
import platform
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from primerl.sandbox.engine import init, interpreter, kernel, namespaces, seccomp, skeleton, users
from primerl.sandbox.engine.processes import OwnNamespace
from primerl.sandbox.engine.watchdog import filesystem_use

ENGINE = "/.engine"  # where sandboxes find this package
PLACES = (skeleton.HOME, "/tmp", "/dev/shm")  # filesystems in memory that they can write
_PROGRAM = (
    f"import sys; sys.path.insert(0, {ENGINE!r}); "
    "from primerl.sandbox.engine import wrapped; wrapped.main()"
)


class Wrapped:
    """Sandboxes of another program's: a way of the zygote's.

    ``config["command"]`` is that program and its options, with ``@CONTROL@`` for the descriptor
    that it has to pass on.
    """

    flags = 0

    def __init__(self, config: dict[str, Any]) -> None:
        self._command: list[str] = [*config["command"], sys.executable, "-I", "-c", _PROGRAM]
        copy = Path(config["folder"]) / "engine"
        copy_engine(copy)
        self.user = users.free(0)
        if self.user != 0:
            skeleton.become_user(self.user)
        skeleton.check_access(config["readable"])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def made(self, pid: int, number: int) -> None:
        """Nothing: the program ends all of a sandbox with itself."""

    def reap(self) -> None:
        """Nothing, as above."""

    def become(self, control: socket.socket, settings: dict[str, Any], number: int) -> None:
        """Execute the program, which makes the sandbox."""
        del number
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_inheritable(control.fileno(), True)
        command = [
            part.replace("@CONTROL@", str(control.fileno()))
            for part in (*self._command, "@CONTROL@", json.dumps(settings))
        ]
        try:
            os.execv(command[0], command)
        except OSError as error:
            failure = {"failed": f"{command[0]}: {error.strerror}", "errno": error.errno}
            control.send(json.dumps(failure).encode())


def copy_engine(folder: Path) -> None:
    """Copy this package, compiled, to where every user can read it, whatever the umask says."""
    target = folder / "primerl" / "sandbox" / "engine"
    shutil.copytree(Path(__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
    for package in (target.parent, target.parent.parent):  # of its own, whatever is installed there
        (package / "__init__.py").touch()
    compileall.compile_dir(folder, quiet=2)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> None:
    """Be the first process of a sandbox; the arguments are a descriptor and settings."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = json.loads(sys.argv[2])
    init.introduce(control, lambda: _set_up(settings))
    init.main(
        control,
        settings | {"environment": interpreter.ENVIRONMENT},
        filter_program=seccomp.program(platform.machine(), sockets=True),
        shared=True,
        processes=OwnNamespace(),
        written=lambda: filesystem_use(PLACES),
    )


def _set_up(settings: dict[str, Any]) -> None:
    if os.getpid() != 1:
        raise OSError(0, "the program gave the sandbox no pid namespace of its own")
    namespaces.limit_all(settings)
    kernel.drop_capabilities()
    os.chdir(skeleton.HOME)
