"""The child process of a sandbox that runs untrusted code.

The sandbox's init process forks it. It confines itself, waits for one job, and executes it.
"""

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from primerl.sandbox.guest import messages
from primerl.sandbox.guest.isolation import kernel, seccomp
from primerl.sandbox.guest.jobs import interpreter, kinds, repl

_FIRST_INHERITED = 3
_OUT_OF_THE_WAY = 50  # above all file descriptors of the init process
_LEAST_CLOSED = 1024  # file descriptors to close, however low the limit of open files is


def main(
    descriptor: int,
    *,
    filter_program: bytes,
    confine: Callable[[], None] | None,
    environment: dict[str, str],
    shared: bool,
    open_files: int,
) -> NoReturn:
    """Confine this process, then wait for a job on a socket and execute it.

    ``confine`` adds isolation to the seccomp filter. ``environment`` is the environment of every
    process of the sandbox. ``shared`` says whether the sandbox sees the standard library that this
    interpreter uses. An ordinary job comes with the file descriptors of its payload, stdin, stdout
    and stderr. The first turn of a REPL comes without any; the connection stays open for turns.

    If this machine is too short of something to start an ordinary job, the reason is sent over the
    connection. Untrusted code can't send one: the connection is closed before it begins.
    """
    code = kinds.REFUSED
    connection: socket.socket | None = None
    try:
        connection = socket.socket(fileno=_arrange(descriptor))
        kernel.limit(resource.RLIMIT_NOFILE, open_files)
        # The init process isn't dumpable, and this fork inherits that. It must be dumpable so that
        # its memory can be measured through /proc.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        if confine is not None:
            confine()
        seccomp.install(filter_program)
        _default_signals()
        if shared:
            interpreter.rehearse()
        data, descriptors = messages.receive(connection)
        if data:
            job = json.loads(data)
            _limit(job)
            if job["kind"] == "turn":
                interpreter.forget_guest()
                repl.serve(connection, environment)
            else:
                code = _carry_out(descriptors, environment, shared=shared, begin=connection.close)
    except BaseException as error:  # the child must never return into the parent's code
        with contextlib.suppress(OSError):
            if connection and getattr(error, "errno", None) in kinds.SHORTAGES:
                connection.send(str(error).encode(errors="replace")[: messages.LONGEST_REASON])
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _carry_out(
    descriptors: list[int],
    environment: dict[str, str],
    *,
    shared: bool,
    begin: Callable[[], None],
) -> int:
    payload, *streams = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    header, contents = messages.read_payload(payload)
    return kinds.carry_out(header, contents, environment, shared=shared, begin=begin)


def _arrange(descriptor: int) -> int:
    """Move ``descriptor`` to a fixed number, close all others, and start a new session.

    The standard streams are pointed to /dev/null. Returns the descriptor's new number.
    """
    first = os.dup2(descriptor, _OUT_OF_THE_WAY, inheritable=False)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(_FIRST_INHERITED):
        os.dup2(nothing, number)
    os.closerange(_FIRST_INHERITED, first)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(first + 1, max(limit, _LEAST_CLOSED))
    os.setsid()
    return first


def _limit(job: dict[str, Any]) -> None:
    seconds = int(job["cpu_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    kernel.limit(resource.RLIMIT_AS, job["address_space_bytes"])
    kernel.limit(resource.RLIMIT_FSIZE, job["disk_bytes"])


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
