"""Exclusive ownership of a folder by one process, among the processes of several hosts."""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from primerl._common.files import whole_or_nothing

log = logging.getLogger(__name__)

OWNER = "publication-owner"
"""The name of the file that says which process owns the folder."""

BEAT_S = 5.0
"""How often an owner shows processes on other hosts that it is alive."""

SILENT_S = 20.0
"""An owner on another host is gone if it shows no sign of life for so long."""


class FolderOwner:
    """The ownership of a folder, until it is released or the process ends.

    A file in the folder names the owner. On the same host, a process that has ended owns nothing.
    If the owner is on another host, this process watches the file for ``SILENT_S``: a living owner
    changes the file's time, also on a full disk. No clocks are compared, and the file system needs
    no locks.

    Args:
        folder: the folder; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = _Held(folder / OWNER)
        weakref.finalize(self, self._held.release)

    def hold(self) -> None:
        """Own the folder, if this object does not own it yet.

        Raises:
            RuntimeError: another process owns it, or another object of this process.
            OSError: the folder can't be written.
        """
        owner = _read(self._held.path)
        if owner is not None and owner.get("token") == self._held.token:
            return
        if owner is not None and _is_alive(owner, self._held.path):
            raise RuntimeError(_in_use(self.folder, owner))
        if owner is not None:
            log.warning(
                "%s belonged to process %s on %s, which has ended, and is taken over",
                self.folder,
                owner.get("pid"),
                owner.get("host"),
            )
        self._held.take()

    def release(self) -> None:
        """Let others own the folder."""
        self._held.release()


def require_unowned(folder: Path) -> None:
    """Check that no other process of this host owns a folder; owners on other hosts are not asked.

    Raises:
        RuntimeError: another process owns it.
    """
    owner = _read(folder / OWNER)
    if owner is not None and _same_kernel(owner) and _is_alive(owner, folder / OWNER):
        raise RuntimeError(_in_use(folder, owner))


def _in_use(folder: Path, owner: dict[str, Any]) -> str:
    pid, host = owner.get("pid"), owner.get("host")
    if _same_kernel(owner) and pid == os.getpid():
        return (
            f"{folder} is in use by another transport of this process; choose another folder, or "
            "leave the `with` block of that transport"
        )
    return (
        f"{folder} is in use by another run (process {pid} on {host}); choose another folder, or "
        "end that run first"
    )


class _Held:
    """The owner's file, and the thread that changes the file's time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = ""
        self._pid = os.getpid()
        self._ended = threading.Event()

    def take(self) -> None:
        self._ended.set()  # of an earlier ownership
        self.token = secrets.token_hex(8)
        self._ended = threading.Event()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_or_nothing(self.path) as file:
                file.write(json.dumps({"token": self.token, **_identity()}).encode())
        except OSError as error:
            what = f"the folder can't be written ({error.strerror}); choose another one"
            raise OSError(error.errno, what, str(self.path.parent)) from error
        threading.Thread(
            target=self._beat, args=(self._ended, self.token), daemon=True, name="primerl-owner"
        ).start()

    def _beat(self, ended: threading.Event, token: str) -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next beat may succeed
                owner = _read(self.path)
                if owner is None or owner.get("token") != token:
                    return  # removed, or taken over: `hold` notices
                os.utime(self.path)

    def release(self) -> None:
        self._ended.set()
        if self._pid != os.getpid():
            return  # a fork of the owner
        with contextlib.suppress(OSError):
            owner = _read(self.path)
            if owner is not None and owner.get("token") == self.token:
                self.path.unlink()
        self.token = ""


def _read(path: Path) -> dict[str, Any] | None:
    """Return the owner that a file names; None if there is no such file, or it is damaged."""
    try:
        owner = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _identity() -> dict[str, Any]:
    """Return what distinguishes this process from all others, also after a restart of the host."""
    return {
        "host": socket.gethostname(),
        "kernel": _kernel(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _kernel() -> str:
    """Return what processes that see each other's process ids have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else stat[19]


def _same_kernel(owner: dict[str, Any]) -> bool:
    return owner.get("kernel") == _kernel()


def _is_alive(owner: dict[str, Any], path: Path) -> bool:
    if _same_kernel(owner):
        pid = owner.get("pid")
        return isinstance(pid, int) and _started(pid) == owner.get("started") != ""
    log.warning(
        "%s names process %s on %s as its owner; this takes up to %.0f s, to see whether it lives",
        path,
        owner.get("pid"),
        owner.get("host"),
        SILENT_S,
    )
    deadline = time.monotonic() + SILENT_S
    before = _mark(path)
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SILENT_S / 10))
        now = _mark(path)
        if now is None:
            return False  # released meanwhile
        if now != before:
            return True
    return False


def _mark(path: Path) -> tuple[bytes, int] | None:
    """Return what a living owner changes of its file; None if there is no file."""
    try:
        with path.open("rb") as file:  # opening asks a network file system for the current time
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
