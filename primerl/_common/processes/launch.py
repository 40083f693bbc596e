"""Functions that start commands under a supervisor, in an environment without secrets."""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl._common.processes import supervisor

# Not inherited, because a child is not a rank of the trainer's process group.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
SECRETS = ("PRIMERL_API_KEY", "VLLM_API_KEY")
"""Environment variables that hold servers' keys; no child inherits them."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a child inherits: all but torchrun's and ``SECRETS``."""
    return {
        name: value
        for name, value in environment.items()
        if name not in (*_TORCHRUN, *SECRETS) and not name.startswith(_TORCHRUN_PREFIXES)
    }


@attrs.frozen
class LaunchContext:
    """The environment and folders that children inherit.

    They are recorded before code of an RL environment can change them.
    """

    environment: dict[str, str]
    folder: str | None
    """The working folder; None if it has been deleted."""
    temporary_folder: str

    @classmethod
    def current(cls) -> "LaunchContext":
        """Return the launch context of this process now."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = None
        return cls(inherited(os.environ), folder, tempfile.gettempdir())


def make_folder(prefix: str, *, within: str | None = None) -> str:
    """Create a private folder in ``within`` (by default, the temporary folder).

    It holds a marker file, without which ``supervisor.remove_folder`` would not remove it.
    """
    folder = os.path.abspath(tempfile.mkdtemp(prefix=prefix, dir=within))
    os.chmod(folder, 0o700)  # whatever the umask says
    with open(os.path.join(folder, supervisor.MARKER), "xb") as marker:
        os.fchmod(marker.fileno(), 0o600)
        marker.write(os.fsencode(folder))
    return folder


def start(
    command: Sequence[str], *, folder: str, grace_s: float, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a command under a supervisor, and return the supervisor's process.

    Sending SIGTERM to the supervisor ends the command and all processes that it started, by SIGKILL
    after ``grace_s``. The exit code is the command's, or 128 + the number of the signal that killed
    the command. ``folder`` is from ``make_folder``. This process has to remove it; if this process
    has died, the supervisor removes it. ``options`` are those of ``subprocess.Popen``.
    """
    program = supervised(command, folder=folder, grace_s=grace_s)
    return subprocess.Popen(program, start_new_session=True, **options)


def supervised(command: Sequence[str], *, folder: str, grace_s: float) -> list[str]:
    """Return the command line that runs ``command`` under a supervisor, for a new session."""
    program = [sys.executable, "-I", "-S", supervisor.__file__]
    return [*program, str(os.getpid()), folder, str(grace_s), *command]


def is_over(folder: str) -> bool:
    """Check that no supervisor with this ``folder`` is running any more.

    A command has two supervisors: when one is killed, the other one ends the command.
    """
    try:
        marker = os.open(os.path.join(folder, supervisor.MARKER), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(marker)
    return True


def wait_until_over(process: "subprocess.Popen[bytes]", folder: str, *, timeout_s: float) -> bool:
    """Wait for a command that ``start`` started, and for all processes that it started.

    Returns whether all of them ended within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    while not (over := process.poll() is not None and is_over(folder)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return over


def search_path() -> list[str]:
    """Return the folders in which this process looks for modules, as absolute paths."""
    return [os.path.abspath(one) for one in sys.path if isinstance(one, str)]
