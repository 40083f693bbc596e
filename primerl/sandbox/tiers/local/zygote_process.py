"""The owner's side of a pool's zygote: start it, and request sandboxes from it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl.sandbox.errors import SandboxError, SandboxNotStarted
from primerl.sandbox.guest import messages, removal
from primerl.sandbox.tiers import guest_files
from primerl.sandbox.tiers.host import new_folder
from primerl.sandbox.tiers.local.slots import parse

_END_S = 5.0


class Launcher:
    """The owner's connection to a zygote, which forks sandboxes and ends when its owner ends."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, folder: Path
    ) -> None:
        self.folder = folder
        self.landlock = False
        self.user = 0
        self.separate_users = False
        self._process = process
        self._connection = connection
        self._waiting: dict[int, asyncio.Future[tuple[socket.socket, int]]] = {}
        self._count = 0

    @classmethod
    async def start(
        cls,
        *,
        way: str,
        python: str,
        readable: list[str],
        settings: dict[str, Any],
        lease_s: float,
        start_timeout_s: float,
    ) -> "Launcher":
        """Start a zygote; ``way`` is the kind of sandboxes it forks, such as ``namespaces``.

        Raises:
            ZygoteFailed: the zygote could not set itself up.
            SandboxError: the zygote did not respond in time.
        """
        folder = new_folder()
        for name in ("shared_root", "roots"):
            (folder / name).mkdir()
        # Despite the umask: the sandboxes' user must find the prepared roots in this folder.
        for opened in (folder, *folder.iterdir()):
            opened.chmod(0o755)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "owner": os.getpid(),
            "folder": str(folder),
            "way": way,
            "readable": readable,
            "settings": settings,
            "lease_s": lease_s,
        }
        ours.setblocking(False)
        try:
            process = await asyncio.to_thread(_start_process, python, theirs)
        except OSError as error:
            ours.close()
            removal.remove(str(folder))
            raise SandboxError(f"the interpreter {python} could not be started: {error}") from error
        finally:
            theirs.close()
        launcher = cls(process, ours, folder)
        try:
            ours.send(json.dumps(config).encode())
            async with asyncio.timeout(start_timeout_s):
                data, _ = await _receive(ours)
            answer = parse(data)
            if "failed" in answer:
                raise ZygoteFailed(str(answer["failed"]), int(answer.get("errno", 0)))
            launcher.landlock = answer.get("landlock") is True
            launcher.user = int(answer["user"])
            launcher.separate_users = answer.get("separate") is True
        except TimeoutError:
            await launcher.close()
            raise SandboxError(
                f"the pool's zygote process did not start within {start_timeout_s} s"
            ) from None
        except BaseException:
            await launcher.close()
            raise
        asyncio.get_running_loop().add_reader(ours, launcher._take_answers)
        return launcher

    @property
    def alive(self) -> bool:
        """Whether the zygote still accepts requests."""
        return self._connection.fileno() >= 0

    async def make(
        self, settings: dict[str, Any], *, cgroup: int | None = None
    ) -> tuple[socket.socket, int]:
        """Create a sandbox; return its control socket and a pidfd of its init process.

        ``cgroup`` is a file descriptor of the ``cgroup.procs`` of the group that it should enter.

        Raises:
            SandboxNotStarted: the kernel refuses.
            SandboxError: the zygote has ended.
        """
        self._count += 1
        number = self._count
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._say({"sandbox": number, "settings": settings}, [] if cgroup is None else [cgroup])
            made: tuple[socket.socket, int] = await asyncio.shield(future)
            return made
        except asyncio.CancelledError:
            future.add_done_callback(_discard)
            raise

    def renew(self) -> None:
        """Send the zygote a heartbeat, which renews the lease."""
        with contextlib.suppress(SandboxError):
            self._say({"beat": True})

    async def close(self) -> None:
        """End the zygote and all its sandboxes."""
        self._fail("the pool is closed")
        try:
            async with asyncio.timeout(_END_S):
                while self._process.poll() is None:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(removal.remove, str(self.folder))

    def _say(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise SandboxError(f"the pool's zygote process can't be reached: {error}") from error

    def _take_answers(self) -> None:
        try:
            data, descriptors = messages.receive(self._connection)
        except BlockingIOError:
            return
        except ValueError:  # no room for descriptors here; the zygote answers in order
            number, future = next(iter(self._waiting.items()), (0, None))
            self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_exception(
                    SandboxNotStarted("a new sandbox's descriptors exceed the limit of open files")
                )
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._fail("the pool's zygote process has ended")
            return
        answer = parse(data)
        future = self._waiting.pop(answer.get("sandbox", 0), None)
        if len(descriptors) == 2:
            made = (socket.socket(fileno=descriptors[0]), descriptors[1])
            if future is None or future.cancelled():
                made[0].close()
                os.close(made[1])
            else:
                future.set_result(made)
        elif future is not None and not future.done():
            future.set_exception(
                SandboxNotStarted(f"no sandbox could be created: {answer.get('failed')}")
            )

    def _fail(self, reason: str) -> None:
        if self.alive:
            asyncio.get_running_loop().remove_reader(self._connection)
            with contextlib.suppress(OSError):  # the zygote has ended
                # So that the zygote ends although a fork of this process has a copy.
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError(reason))
                future.exception()  # marks it as retrieved: its caller may have been cancelled
        self._waiting.clear()


class ZygoteFailed(SandboxError):
    """The zygote failed to set itself up; ``errno`` is that of the failed step, or 0."""

    def __init__(self, message: str, errno: int) -> None:
        super().__init__(message)
        self.errno = errno


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    return messages.receive(connection)


def _start_process(python: str, connection: socket.socket) -> subprocess.Popen[bytes]:
    call = f"main({connection.fileno()})"
    return subprocess.Popen(
        [python, "-I", "-c", guest_files.program(guest_files.SOURCE, "zygote", call)],
        pass_fds=[connection.fileno()],
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},  # none of the owner's variables
        cwd="/",
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _discard(future: "asyncio.Future[tuple[socket.socket, int]]") -> None:
    """End a sandbox whose caller was cancelled, by closing its control socket."""
    if not future.cancelled() and future.exception() is None:
        control, handle = future.result()
        control.close()
        os.close(handle)
