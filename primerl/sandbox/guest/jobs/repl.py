"""A REPL: a Python process that keeps its state between turns."""

import ast
import os
import signal
import socket
import sys
import traceback
from typing import Any

from primerl.sandbox.guest import messages
from primerl.sandbox.guest.jobs import interpreter


def serve(connection: socket.socket, environment: dict[str, str]) -> None:
    """Run turns until the connection ends; each turn comes with its code and streams."""
    names: dict[str, Any] | None = None
    while True:
        data, descriptors = messages.receive(connection)
        if not data:
            return
        for number, descriptor in enumerate(descriptors[1:]):
            os.dup2(descriptor, number, inheritable=True)
            os.close(descriptor)
        header, _ = messages.read_payload(descriptors[0])
        if names is None:
            os.environ.clear()
            os.environ.update(environment | header["environment"])
            os.chdir(environment["HOME"])
            names = interpreter.fresh_main("", environment["HOME"]).__dict__
        code = _run(header["code"], names)
        _detach()
        turn, _ = messages.TURN.unpack(data)
        connection.send(messages.TURN.pack(turn, code))


def _run(code: str, names: dict[str, Any]) -> int:
    """Run one turn and return its exit code; print the value of a final expression."""
    try:
        tree = ast.parse(code, "<turn>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<turn>", "exec"), names)
        if last is not None:
            exec(compile(ast.Interactive([last]), "<turn>", "single"), names)
        result = 0
    except BaseException as error:  # SystemExit and KeyboardInterrupt end only the turn
        signal.signal(signal.SIGINT, signal.default_int_handler)
        traceback.print_exception(error)
        result = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            result = 1
    return result


def _detach() -> None:
    """Close the turn's streams, so that their other ends see end of file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number, inheritable=True)
    os.close(nothing)
