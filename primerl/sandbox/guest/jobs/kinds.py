"""Execution of one job, in a process that is already confined.

All access to paths and data of the sandbox happens here, including reads and writes of files for
the host: this process has no more rights than the code itself.
"""

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

from primerl.sandbox.guest.jobs import archive, code_under_test, interpreter, test_runner

REFUSED = 126  # the exit code if a job could not be executed
# Errors of a machine that is short of something. If one of them keeps a job from starting, the job
# says nothing about its code, and may be tried again. Not EIO, which code can cause by its files.
SHORTAGES = {
    *(errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ENOBUFS, errno.ETOOMANYREFS),
}


def carry_out(
    header: dict[str, Any],
    contents: list[bytes],
    environment: dict[str, str],
    *,
    shared: bool,
    begin: Callable[[], None],
) -> int:
    """Execute the job that a header describes; return its exit code.

    ``environment`` is the environment of every process of the sandbox. If ``shared`` is true, the
    sandbox sees the standard library of this interpreter, which then runs Python code itself.
    ``begin`` is called before untrusted code runs in this process.

    Raises:
        OSError: the job could not be started.
    """
    os.environ.clear()
    os.environ.update(environment | header["environment"])
    os.chdir(environment["HOME"])
    os.chdir(header["folder"])
    executable = set(header.get("executable", ()))
    for path, content in zip(header["files"], contents, strict=True):
        _write(path, content, executable=path in executable)
    for path, target in header.get("links", {}).items():
        _make_parents(path)
        os.symlink(target, path)
    kind = header["kind"]
    if kind == "argv":
        return _execute(header["argv"])
    if kind == "code":
        if not shared:  # the session's root filesystem has another Python
            return _execute(["python3", "-c", header["code"]])
        begin()
        return interpreter.run(header["code"], environment["HOME"])
    if kind == "read":
        return _read(header["path"])
    if kind == "write":
        return _write_input(header["path"])
    if kind in ("code_under_test", "tests"):
        begin()
        interpreter.fresh_main("", environment["HOME"])
        if kind == "tests":
            return test_runner.main(header)
        code_under_test.main(header["paths"], header["packages"])
        return 0
    if kind == "pack":
        return archive.pack(header["paths"])
    return archive.unpack()


def _write(path: str, content: bytes, *, executable: bool) -> None:
    _make_parents(path)
    # The mode is set on creation, because not all tiers allow changing it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o777 if executable else 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)


def _make_parents(path: str) -> None:
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)


def _read(path: str) -> int:
    # Non-blocking, because opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as source:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
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
        if error.errno in SHORTAGES:
            raise
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 127 if isinstance(error, FileNotFoundError) else REFUSED
