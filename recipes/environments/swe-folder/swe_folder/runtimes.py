"""Repositories in the runtimes of agents: writing, reading and patching them."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import verifiers.v1 as vf
from verifiers.v1.runtimes import provision_runtime

from swe_folder import repositories
from swe_folder.git import MOST_BYTES, Files

T = TypeVar("T")
_READING = threading.Lock()


@contextlib.asynccontextmanager
async def fresh(runtime: vf.Runtime, timeout_s: float) -> AsyncIterator[vf.Runtime]:
    """Open a new sandbox with the same image as ``runtime``, or one of verifiers' containers.

    ``timeout_s`` limits each command.
    """
    if getattr(runtime, "pool", None) is None:
        async with provision_runtime(runtime.config) as other, asyncio.timeout(timeout_s):
            yield other
        return
    other = runtime.fresh(timeout_s=timeout_s)
    await other.start()
    try:
        yield other
    finally:
        await other.stop()


async def put(runtime: vf.Runtime, files: Files, *, removed: Sequence[str] = ()) -> None:
    """Write a repository into the working folder of a runtime, after removing files.

    Raises:
        RuntimeError: unpacking fails, for lack of space or of tar.
    """
    await runtime.write(".repository.tar", await reading(repositories.packed, files))
    command = 'rm -f -- "$@" && tar xf .repository.tar && rm .repository.tar'
    done = await runtime.run(["sh", "-c", command, "sh", *removed], {})
    if done.exit_code:
        raise RuntimeError(f"the repository can't be unpacked: {done.stderr}")


async def taken(runtime: vf.Runtime) -> Files:
    """Read the files of the working folder, which are untrusted.

    Raises:
        ValueError: the files are too large or can't be packed.
    """
    name = "/tmp/.repository.tar"
    command = f"tar cf {name} --exclude=.git --exclude=__pycache__ --exclude=.repository.tar ."
    done = await runtime.run(["sh", "-c", command], {})
    if done.exit_code:
        raise ValueError(f"the folder can't be packed: {done.stderr}")
    archive = await runtime.read(name, max_bytes=MOST_BYTES)
    return await reading(repositories.unpacked, archive)


async def reading(work: Callable[..., T], *arguments: Any) -> T:
    """Do work on an agent's files in a thread, one such work at a time.

    The event loop stays free. The work must take time that is linear in the size of the files.
    """

    def alone() -> T:
        with _READING:
            return work(*arguments)

    return await asyncio.to_thread(alone)


async def apply(runtime: vf.Runtime, place: str, patch: str) -> None:
    """Apply a patch to the repository at ``place`` of an image.

    Raises:
        ValueError: the patch does not apply.
    """
    if not patch.strip():
        return
    await runtime.write("/tmp/.patch", patch.encode(errors="surrogateescape"))
    command = ["git", "-C", place, "apply", "--whitespace=nowarn", "/tmp/.patch"]
    done = await runtime.run(command, {})
    if done.exit_code:
        raise ValueError(f"the patch does not apply: {done.stderr}")


async def listed(runtime: vf.Runtime, place: str) -> list[str]:
    """Return the paths of the files that git tracks in the repository at ``place``.

    Raises:
        ValueError: git can't read the repository.
    """
    command = 'git -C "$0" ls-files -z > /tmp/.files'
    done = await runtime.run(["sh", "-c", command, place], {})
    if done.exit_code:
        raise ValueError(f"the repository at {place} can't be read: {done.stderr}")
    return os.fsdecode(await runtime.read("/tmp/.files")).split("\0")[:-1]


async def made_in(runtime: vf.Runtime, place: str, commit: str) -> str:
    """Return the untrusted patch of all changes since a commit to the repository at ``place``.

    Raises:
        ValueError: git can't read the changes.
    """
    command = (
        'cd "$0" && git add -A && git diff --cached --binary --full-index --no-renames '
        '--no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ "$1" > /tmp/.patch'
    )
    done = await runtime.run(["sh", "-c", command, place, commit], {})
    if done.exit_code:
        raise ValueError(done.stderr)
    content = await runtime.read("/tmp/.patch", max_bytes=MOST_BYTES)
    return content.decode(errors="surrogateescape")
