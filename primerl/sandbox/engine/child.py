"""The process that runs untrusted code: the last steps before it.

It is forked from the sandbox's first process, confines itself, and waits for one order.
"""

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from primerl.sandbox.engine import messages
from primerl.sandbox.engine.barriers import kernel, seccomp
from primerl.sandbox.engine.work import interpreter, orders, repl

_FIRST_INHERITED = 3
_OUT_OF_THE_WAY = 50  # above all descriptors that the first process has


def main(
    descriptor: int,
    *,
    filter_program: bytes,
    confine: Callable[[], None] | None,
    environment: dict[str, str],
    shared: bool,
) -> NoReturn:
    """Confine this process, then wait for an order on a socket and carry it out.

    ``confine`` adds to the filter of system calls. ``environment`` is what every process of the
    sandbox gets; ``shared`` says whether this interpreter's library is the one seen inside.
    With a job come its payload, stdin, stdout and stderr; with the first turn of a REPL nothing,
    but the connection stays for its turns.
    """
    code = orders.REFUSED
    try:
        connection = socket.socket(fileno=_arrange(descriptor))
        # Unlike the first process, whose memory it has a copy of, it may be looked at: its memory
        # is counted that way.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        if confine is not None:
            confine()
        seccomp.install(filter_program)
        _default_signals()
        if shared:
            interpreter.rehearse()
        data, descriptors = messages.receive(connection)
        if data:
            order = json.loads(data)
            _limit(order)
            if order["kind"] == "turn":
                interpreter.forget_engine()
                repl.serve(connection, environment)
            else:
                connection.close()
                code = _carry_out(descriptors, environment, shared=shared)
    except BaseException as error:  # nothing may return into the first process's program
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _carry_out(descriptors: list[int], environment: dict[str, str], *, shared: bool) -> int:
    payload, *streams = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    header, contents = messages.read_payload(payload)
    return orders.carry_out(header, contents, environment, shared=shared)


def _arrange(descriptor: int) -> int:
    """Leave open only a descriptor, whose new number is returned, and no streams."""
    first = os.dup2(descriptor, _OUT_OF_THE_WAY)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(_FIRST_INHERITED):
        os.dup2(nothing, number)
    os.closerange(_FIRST_INHERITED, first)
    os.closerange(first + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.setsid()
    return first


def _limit(order: dict[str, Any]) -> None:
    seconds = int(order["cpu_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    kernel.limit(resource.RLIMIT_AS, order["address_space_bytes"])
    kernel.limit(resource.RLIMIT_FSIZE, order["disk_bytes"])


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
