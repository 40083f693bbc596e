"""The guest program of containers, gVisor and hosted machines: runs a single job from stdin.

It announces its start with one byte, reads the job, and lets a child process execute it. It exits
when the child does, or at a deadline some time after the job's timeout, in case the owner crashed.
Its exit code tells the owner whether the machine was too short of something to start the job.
"""

import contextlib
import io
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from primerl.sandbox.guest import messages
from primerl.sandbox.guest.isolation import kernel
from primerl.sandbox.guest.jobs import interpreter, kinds

READY = b"\x06"
NOT_STARTED = 254  # an exit code that no job has: if one exits with it, the exit code is 255
_TIME_OVER = 124
_FIRST_INHERITED = 3


def main() -> None:
    """Execute one job and exit with its exit code, or 128 plus the signal that ended it."""
    with contextlib.suppress(OSError):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.write(1, READY)
    header, contents = messages.unpacked(io.FileIO(0, closefd=False))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        shortage, telling = os.pipe()
        pid = os.fork()
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(NOT_STARTED)
    if pid == 0:
        os.close(shortage)
        _execute(header, contents, telling)
    os.close(telling)
    for number in range(_FIRST_INHERITED):  # only the child may hold the streams open
        os.close(number)
    ends_at = time.monotonic() + header["ends_in_s"]
    ended = status = 0
    while ended != pid:  # as init of a pid namespace, this process reaps all others, too
        if not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, ends_at - time.monotonic())):
            os._exit(_TIME_OVER)
        ended, status = _reap(pid)
    if os.read(shortage, 1):  # the other end is closed before untrusted code begins
        os._exit(NOT_STARTED)
    code = os.waitstatus_to_exitcode(status)
    code = code if code >= 0 else 128 - code
    os._exit(NOT_STARTED + 1 if code == NOT_STARTED else code)


def _execute(header: dict[str, Any], contents: list[bytes], telling: int) -> NoReturn:
    """Execute the job in this child process; write a byte to ``telling`` if it can't be started."""
    code = kinds.REFUSED
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        code = _carry_out(header, contents, begin=lambda: os.close(telling))
    except BaseException as error:  # the child must never return into the parent's code
        with contextlib.suppress(OSError):
            if getattr(error, "errno", None) in kinds.SHORTAGES:
                os.write(telling, b"!")
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _reap(wanted: int) -> tuple[int, int]:
    """Reap ended processes, up to and including the process ``wanted``.

    Return the pid and status of ``wanted``, or pid 0 if it has not ended.
    """
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, wanted):
            return ended, status


def _carry_out(header: dict[str, Any], contents: list[bytes], *, begin: Callable[[], None]) -> int:
    os.setsid()
    for name, value in header["rlimits"].items():
        kernel.limit(getattr(resource, name), value)
    with contextlib.suppress(OSError):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    return kinds.carry_out(header, contents, interpreter.ENVIRONMENT, shared=True, begin=begin)
