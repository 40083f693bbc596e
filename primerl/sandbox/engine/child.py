"""The process that runs untrusted code: the last steps before it, and the code.

Everything that touches paths or data of the sandbox happens here, also reading and writing files on
the host's behalf: a process that can do no more than the code itself.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
from typing import Any, NoReturn

from primerl.sandbox.engine import (
    archive,
    interpreter,
    kernel,
    messages,
    repl,
    seccomp,
    subject,
    testside,
)

REFUSED = 126  # the exit code where an order could not be carried out
_FIRST_INHERITED = 3
_OUT_OF_THE_WAY = 50  # above all descriptors that the first process has


def main(
    descriptors: list[int], order: dict[str, Any], filter_program: bytes, *, shared: bool
) -> NoReturn:
    """Confine this process, and carry out an order: with its payload, stdin, stdout and stderr."""
    code = REFUSED
    try:
        payload = _arrange(descriptors)
        _limit(order)
        # Unlike the first process, whose memory it has a copy of, it may be looked at: its memory
        # is counted that way.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        seccomp.install(filter_program)
        _default_signals()
        if order["kind"] == "turn":
            interpreter.forget_engine()
            repl.serve(socket.socket(fileno=payload))
        else:
            header, contents = messages.read_payload(payload)
            code = _carry_out(header, contents, shared=shared)
    except BaseException as error:  # nothing may return into the first process's program
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def wait(descriptor: int, filter_program: bytes, *, shared: bool) -> NoReturn:
    """Confine this process, then wait for the first order of a sandbox and carry it out."""
    code = REFUSED
    try:
        connection = socket.socket(fileno=_arrange([descriptor]))
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        seccomp.install(filter_program)
        _default_signals()
        data, descriptors = messages.receive(connection)
        connection.close()
        if data:
            _limit(json.loads(data))
            for number, stream in enumerate(descriptors[1:]):
                os.dup2(stream, number)
                os.close(stream)
            header, contents = messages.read_payload(descriptors[0])
            code = _carry_out(header, contents, shared=shared)
    except BaseException as error:  # as above
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _arrange(descriptors: list[int]) -> int:
    """Leave open stdin, stdout, stderr and the first descriptor, whose new number is returned."""
    first = os.dup2(descriptors[0], _OUT_OF_THE_WAY)
    streams = descriptors[1:] or [os.open(os.devnull, os.O_RDWR)] * 3
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
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


def _carry_out(header: dict[str, Any], contents: list[bytes], *, shared: bool) -> int:
    """Do what the header says; returns the exit code."""
    os.environ.clear()
    os.environ.update(interpreter.ENVIRONMENT | header["environment"])
    os.chdir(header["folder"])
    for path, content in zip(header["files"], contents, strict=True):
        _write(path, content)
    kind = header["kind"]
    if kind == "argv":
        return _execute(header["argv"])
    if kind == "code":
        if not shared:  # a root filesystem with another Python
            return _execute(["python3", "-c", header["code"]])
        return interpreter.run(header["code"])
    if kind == "read":
        return _read(header["path"])
    if kind == "write":
        return _write_input(header["path"])
    if kind in ("subject", "tests"):
        interpreter.fresh_main("")
        return _run_side(kind, header)
    if kind == "pack":
        return archive.pack(header["paths"])
    return archive.unpack()


def _run_side(kind: str, header: dict[str, Any]) -> int:
    if kind == "subject":
        subject.main()
        return 0
    return testside.main(header["modules"], header["packages"], header["files"])


def _write(path: str, content: bytes) -> None:
    _make_parents(path)
    with open(path, "wb") as file:
        file.write(content)


def _make_parents(path: str) -> None:
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)


def _read(path: str) -> int:
    # Opening a pipe must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as source:
        if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            raise OSError(f"{path} is not a regular file")
        shutil.copyfileobj(source, io.FileIO(1, "w", closefd=False))
    return 0


def _write_input(path: str) -> int:
    _make_parents(path)
    with open(path, "wb") as target:
        shutil.copyfileobj(io.FileIO(0, closefd=False), target)
    return 0


def _execute(argv: list[str]) -> int:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 127 if isinstance(error, FileNotFoundError) else REFUSED
