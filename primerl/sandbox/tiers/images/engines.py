"""Container engines of this host, which pull images: docker and podman."""

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from typing import BinaryIO

from primerl._common import progress
from primerl.sandbox.archives import BadArchive
from primerl.sandbox.errors import SandboxError
from primerl.sandbox.tiers.images import formats

PROGRAMS = ("docker", "podman")
# The variables of the owner's environment that container engines read; none reaches a sandbox.
PASSED = (
    *("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "CONTAINER_HOST", "STORAGE_DRIVER"),
    *("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha(256|512):[0-9a-f]+)?")
_ANSWER_S = 60.0
_ENDING_S = 2.0
_LONGEST_MESSAGE = 500


def reference(image: str) -> str:
    """Return the reference of an image, after checking that no engine takes it for an option.

    Raises:
        SandboxError: it is malformed. The message leaves out what may be a password.
    """
    if not _REFERENCE.fullmatch(image):
        before, at, after = image.rpartition("@")
        if before:
            raise SandboxError(
                f"{at + after!r:.200} of an image is no digest; an image has no user and password: "
                "log in with the container engine"
            )
        raise SandboxError(
            f"{image!r:.200} is no image; expected a reference such as 'registry/name:tag', or the "
            "absolute path of an archive or folder"
        )
    return image


class ContainerClient:
    """A container engine; its calls raise ``SandboxError`` with the image and its message."""

    def __init__(self, program: str) -> None:
        self.program = program

    @classmethod
    async def of_this_host(cls, image: str) -> "ContainerClient":
        """Return the engine that runs here.

        Raises:
            SandboxError: there is none.
        """
        found: list[str] = []
        for program in filter(shutil.which, PROGRAMS):
            engine = cls(program)
            code, _, said = await engine._run(["info"])
            if code == 0:
                return engine
            found.append(f"{program} says: {_message(said)}")
        why = "; ".join(found) or "neither docker nor podman is installed"
        raise SandboxError(
            f"the image {image} can't be pulled on this host: {why}. Set up an engine, or give the "
            "absolute path of an archive (docker save) or folder"
        )

    async def has(self, image: str) -> bool:
        """Return whether this host has the image."""
        code, _, _ = await self._run(["image", "inspect", reference(image)])
        return code == 0

    async def pull(self, image: str) -> None:
        """Pull an image; its lines are logged as progress."""
        await self._checked(["pull", reference(image)], image, what=f"{image}: ", timeout_s=None)

    async def size(self, image: str) -> int:
        """Return the bytes that an image takes."""
        out = await self._checked(["image", "inspect", "--format", "{{.Size}}", image], image)
        return int(out)

    async def environment(self, image: str) -> dict[str, str]:
        """Return the variables that an image sets."""
        form = "{{json .Config.Env}}"
        out = await self._checked(["image", "inspect", "--format", form, image], image)
        return formats.variables(json.loads(out))

    async def remove(self, image: str) -> None:
        """Remove an image, unless a container uses it."""
        await self._run(["rmi", image])

    @contextlib.asynccontextmanager
    async def exported(self, image: str) -> AsyncIterator[tuple[BinaryIO, Callable[[], None]]]:
        """Export the files of an image as a tar archive, for a thread that reads it.

        Yields the archive, and a function that ends it early.
        """
        made = await self._checked(["create", "--network", "none", image, "true"], image)
        container = made.split()[-1].decode()
        reading, writing = os.pipe()
        try:
            with open(reading, "rb") as archive:
                try:
                    process = await self._start(["export", container], stdout=writing)
                finally:
                    os.close(writing)
                try:
                    yield archive, functools.partial(_kill, process)
                    _, said = await process.communicate()
                    if process.returncode:
                        raise self._failed(image, said)
                except BadArchive as error:
                    # An engine that fails leaves an archive that is cut off.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_ENDING_S):
                            await process.wait()
                    if process.returncode and process.stderr is not None:
                        raise self._failed(image, await process.stderr.read()) from error
                    raise
                finally:
                    await _end(process)
        finally:
            await self._run(["rm", "--force", container])

    async def _checked(
        self,
        arguments: Sequence[str],
        image: str,
        *,
        what: str = "",
        timeout_s: float | None = _ANSWER_S,
    ) -> bytes:
        code, out, said = await self._run(arguments, what=what, timeout_s=timeout_s)
        if code:
            raise self._failed(image, said or out)
        return out

    def _failed(self, image: str, said: bytes) -> SandboxError:
        return SandboxError(f"the image {image} can't be had from {self.program}: {_message(said)}")

    async def _run(
        self, arguments: Sequence[str], *, what: str = "", timeout_s: float | None = _ANSWER_S
    ) -> tuple[int, bytes, bytes]:
        """Return the exit code, standard output and standard error of a command."""
        process = await self._start(arguments, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s):
                out, said = await asyncio.gather(
                    _lines(process.stdout, what), _lines(process.stderr, what)
                )
                return await process.wait(), out, said
        except TimeoutError:
            command = f"{self.program} {' '.join(arguments)}"
            raise SandboxError(f"`{command}` did not end within {timeout_s:g} s") from None
        finally:
            await _end(process)

    async def _start(self, arguments: Sequence[str], *, stdout: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self.program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=asyncio.subprocess.PIPE,
                env={name: os.environ[name] for name in PASSED if name in os.environ},
                cwd="/",
            )
        except OSError as error:
            raise SandboxError(f"{self.program} could not be started: {error}") from error


def _message(said: bytes) -> str:
    lines = said.decode(errors="replace").split("\n")
    return next((line.strip()[-_LONGEST_MESSAGE:] for line in reversed(lines) if line.strip()), "")


async def _lines(stream: asyncio.StreamReader, what: str) -> bytes:
    """Read a stream to its end, and report its lines as progress if ``what`` is not empty."""
    found = b""
    while content := await stream.read(1 << 16):
        found = (found + content)[-(1 << 20) :]
        last = content.decode(errors="replace").split("\n")[-1 if content[-1:] != b"\n" else -2]
        if what and last.strip():
            progress.report("image", what + last.strip()[:200])
    return found


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
