"""Detection of a test's leftovers that could affect later tests.

Leftover processes are child processes of this process and processes that inherited ``MARK``,
including ended ones that nobody has waited for.
"""

import logging
import os
import tempfile
import threading
import time
from pathlib import Path

ENDS_S = 10.0  # timeout for a thread or a process that was asked to end
MARK = "PRIMERL_TESTS_PROCESS"
OWN_FILES = ("torchinductor_", "torchelastic_")  # torch's caches, and the logs of torchrun
OWN_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "CRC32C_SW_MODE",  # tensorboardX sets it when it is imported
    "TORCHINDUCTOR_CACHE_DIR",  # torch, when it first compiles
}

_kept: set[int] = set()


def keep_process(pid):
    """Exempt a process, such as a server that all tests of this process share."""
    _kept.add(pid)


def mark_processes():
    """Mark the environment, so that processes started from now on can be recognized."""
    os.environ[MARK] = str(os.getpid())


class Leftovers:
    """A snapshot of threads, processes, files, settings and handlers, to compare with later."""

    def __init__(self):
        self._threads = set(threading.enumerate())
        self._processes = _process_ids()
        self._files = set(os.listdir(tempfile.gettempdir()))
        self._environment = dict(os.environ)
        self._handlers = _log_handlers()

    def found(self):
        """Return one line for each leftover, and restore changed variables."""
        return [
            *self._living_threads(),
            *self._new_processes(),
            *self._new_files(),
            *self._edits(),
            *self._new_handlers(),
        ]

    def _living_threads(self):
        new = [one for one in threading.enumerate() if one not in self._threads and not one.daemon]
        for thread in new:
            thread.join(ENDS_S)
        return [f"thread {thread.name}" for thread in new if thread.is_alive()]

    def _new_processes(self):
        ours = self._ours()
        deadline = time.monotonic() + ENDS_S
        while ours and time.monotonic() < deadline:
            time.sleep(0.01)
            ours = self._ours()
        return list(ours)

    def _ours(self):
        described = (_describe(pid) for pid in _process_ids() - self._processes - _kept)
        return [one for one in described if one is not None]

    def _new_files(self):
        new = set(os.listdir(tempfile.gettempdir())) - self._files
        return [f"file {name}" for name in sorted(new) if not name.startswith(OWN_FILES)]

    def _new_handlers(self):
        new = _log_handlers() - self._handlers
        for name, handler in new:
            logging.getLogger(name).removeHandler(handler)
        return [f"{handler!r} of the logger {name}" for name, handler in new]

    def _edits(self):
        now = dict(os.environ)
        names = {name for name, _ in self._environment.items() ^ now.items()} - OWN_VARIABLES
        for name in names:
            if name in self._environment:
                os.environ[name] = self._environment[name]
            else:
                del os.environ[name]
        return [f"environment variable {name}" for name in sorted(names)]


def _log_handlers():
    """Return the handlers of this project's loggers."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("primerl")]
    return {(name, handler) for name in names for handler in logging.getLogger(name).handlers}


def _process_ids():
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _describe(pid):
    """Describe a process in one line if this process or a descendant started it, else None."""
    folder = Path("/proc", str(pid))
    try:
        _, _, rest = (folder / "stat").read_bytes().rpartition(b") ")
        state, parent = rest.split()[:2]
        inherited = f"{MARK}={os.getpid()}\0".encode() in (folder / "environ").read_bytes()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # a process of another user
        return None
    ours = (
        inherited or tempfile.gettempdir() in command
    )  # sandboxes have an environment of their own
    if int(parent) != os.getpid() and not ours:
        return None
    ended = ", which has ended and was not waited for" if state == b"Z" else ""
    return f"process {pid} {command[:200].strip()}{ended}"
