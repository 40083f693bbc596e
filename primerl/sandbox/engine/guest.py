"""The first process of a sandbox that takes a single order, from stdin: in containers and gVisor.

It says that it is there by one byte, reads the order, lets a child carry it out, and ends when that
child does, or when the order's time is long over: whoever gave it may have crashed.
"""

import contextlib
import io
import os
import resource
import signal
import time
from typing import Any

from primerl.sandbox.engine import messages
from primerl.sandbox.engine.barriers import kernel
from primerl.sandbox.engine.work import interpreter, orders

READY = b"\x06"
_TIME_OVER = 124
_FIRST_INHERITED = 3


def main() -> None:
    """Carry out one order; the exit code is that of its process, 128 and more for signals."""
    with contextlib.suppress(OSError):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.write(1, READY)
    header, contents = messages.unpacked(io.FileIO(0, closefd=False))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        code = orders.REFUSED
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            code = _carry_out(header, contents)
        except BaseException as error:  # nothing may return into the first process's program
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    for number in range(_FIRST_INHERITED):  # the child alone has the streams
        os.close(number)
    ends_at = time.monotonic() + header["ends_in_s"]
    ended = status = 0
    while ended != pid:  # the first process of a pid namespace reaps all others, too
        if not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, ends_at - time.monotonic())):
            os._exit(_TIME_OVER)
        ended, status = _reap(pid)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _reap(wanted: int) -> tuple[int, int]:
    """Reap what has ended, up to the process ``wanted``."""
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
    return orders.carry_out(header, contents, interpreter.ENVIRONMENT, shared=True)
