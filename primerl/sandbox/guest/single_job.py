"""The guest program of containers, gVisor and hosted machines: runs a single job from stdin.

It announces its start with one byte, reads the job, and lets a child process execute it. It exits
when the child does, or at a deadline some time after the job's timeout, in case the owner crashed.
"""

import contextlib
import io
import os
import resource
import signal
import time
from typing import Any

from primerl.sandbox.guest import messages
from primerl.sandbox.guest.isolation import kernel
from primerl.sandbox.guest.jobs import interpreter, kinds

READY = b"\x06"
_TIME_OVER = 124
_FIRST_INHERITED = 3


def main() -> None:
    """Execute one job and exit with its exit code, or 128 plus the signal that ended it."""
    with contextlib.suppress(OSError):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.write(1, READY)
    header, contents = messages.unpacked(io.FileIO(0, closefd=False))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        code = kinds.REFUSED
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            code = _carry_out(header, contents)
        except BaseException as error:  # the child must never return into the parent's code
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    for number in range(_FIRST_INHERITED):  # only the child may hold the streams open
        os.close(number)
    ends_at = time.monotonic() + header["ends_in_s"]
    ended = status = 0
    while ended != pid:  # as init of a pid namespace, this process reaps all others, too
        if not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, ends_at - time.monotonic())):
            os._exit(_TIME_OVER)
        ended, status = _reap(pid)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _reap(wanted: int) -> tuple[int, int]:
    """Reap ended processes, up to and including the process ``wanted``.

    Return the pid and status of ``wanted``, or pid 0 if it has not ended.
    """
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, wanted):
            return ended, status


def _carry_out(header: dict[str, Any], contents: list[bytes]) -> int:
    os.setsid()
    for name, value in header["rlimits"].items():
        kernel.limit(getattr(resource, name), value)
    with contextlib.suppress(OSError):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    return kinds.carry_out(header, contents, interpreter.ENVIRONMENT, shared=True)
