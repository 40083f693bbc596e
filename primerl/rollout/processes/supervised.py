"""What a child process is started with: a supervisor, a folder of its own, and no secret."""

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

from primerl.rollout.processes import supervisor

# A child is no rank of the trainer's process group.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
SECRETS = ("PRIMERL_API_KEY", "VLLM_API_KEY")
"""Variables that open the routes of servers; no child gets one."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child may know of an environment: neither torchrun's variables nor ``SECRETS``."""
    return {
        name: value
        for name, value in environment.items()
        if name not in (*_TORCHRUN, *SECRETS) and not name.startswith(_TORCHRUN_PREFIXES)
    }


@attrs.frozen
class Surroundings:
    """What a child inherits, as it was before an environment's code could change it."""

    environment: dict[str, str]
    folder: str | None
    """The current one; None if there is none any more."""
    temporary_folder: str

    @classmethod
    def now(cls) -> "Surroundings":
        """Those of this process."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = None
        return cls(inherited(os.environ), folder, tempfile.gettempdir())


def make_folder(prefix: str, *, within: str | None = None) -> str:
    """A private folder for temporary files, which ``remove_folder`` knows by its path and marker.

    Args:
        prefix: of its name.
        within: the folder that holds it; by default the one for temporary files.
    """
    folder = os.path.abspath(tempfile.mkdtemp(prefix=prefix, dir=within))
    os.chmod(folder, 0o700)  # whatever the umask says
    with open(os.path.join(folder, supervisor.MARKER), "xb") as marker:
        marker.write(os.fsencode(folder))
    return folder


def remove_folder(folder: str) -> None:
    """Remove a folder that ``make_folder`` made; whatever has taken its place stays."""
    supervisor.remove_folder(folder)


def start(
    command: Sequence[str], *, folder: str, grace_s: float, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a command under a supervisor, and return the supervisor's process.

    SIGTERM ends the command and all that it started; its exit code is the command's, or 128 + the
    number of the signal that killed the command.

    Args:
        command: the program and its arguments.
        folder: from ``make_folder``. This process removes it, or if it is dead, the supervisor.
        grace_s: between asking the command to stop and killing it.
        options: of ``subprocess.Popen``.
    """
    program = [sys.executable, "-I", "-S", supervisor.__file__]
    arguments = [str(os.getpid()), folder, str(grace_s)]
    return subprocess.Popen([*program, *arguments, *command], start_new_session=True, **options)


def is_over(folder: str) -> bool:
    """Whether no supervisor is at work any more for whom ``folder`` was made.

    A supervisor that was killed has another one, which then ends the command.
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
    """Wait for a command that ``start`` started, and for all that it started itself."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    while not (over := process.poll() is not None and is_over(folder)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return over
