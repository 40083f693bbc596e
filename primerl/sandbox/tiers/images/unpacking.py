"""Images as root filesystems of this host: from a path, or from a container engine."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs

from primerl.sandbox.errors import SandboxError
from primerl.sandbox.guest.removal import remove
from primerl.sandbox.tiers.images import formats
from primerl.sandbox.tiers.images.engines import ContainerClient, reference
from primerl.sandbox.tiers.images.formats import UnpackedImage

T = TypeVar("T")
Grow = Callable[[int], None]


async def unpack(image: str, target: Path, *, owner: int, grow: Grow) -> UnpackedImage:
    """Unpack an image into the new folder ``target``, which is removed again if that fails.

    An absolute path names an archive or a folder. Any other image comes from the engine of this
    host, which pulls it if it does not have it, and then removes its copy.

    Raises:
        SandboxError: the image can't be pulled or unpacked; the message names it.
    """
    stop = threading.Event()

    def checked(size: int) -> None:
        if stop.is_set():
            raise SandboxError(f"unpacking the image {image} was cancelled")
        grow(size)

    try:
        if os.path.isabs(image):
            return await _in_thread(
                lambda: formats.unpack(image, str(target), owner=owner, grow=checked), stop
            )
        return await _from_engine(image, target, owner, checked, stop)
    except BaseException as error:
        await asyncio.to_thread(remove, str(target))
        if isinstance(error, ValueError | OSError) and not isinstance(error, TimeoutError):
            raise SandboxError(f"the image {image} can't be unpacked: {error}") from error
        raise


async def _from_engine(
    image: str, target: Path, owner: int, grow: Grow, stop: threading.Event
) -> UnpackedImage:
    reference(image)
    engine = await ContainerClient.of_this_host(image)
    ours = not await engine.has(image)
    if ours:
        await engine.pull(image)
    try:
        environment = await engine.environment(image)
        async with engine.exported(image) as (archive, end):
            unpacked = await _in_thread(
                lambda: formats.unpack_files(archive, str(target), owner=owner, grow=grow),
                stop,
                end,
            )
    finally:
        if ours:
            await engine.remove(image)
    return attrs.evolve(unpacked, environment=environment)


async def _in_thread(
    work: Callable[[], T], stop: threading.Event, end: Callable[[], None] | None = None
) -> T:
    """Do ``work`` in a thread; if this is cancelled, stop it and wait until the thread ends.

    ``end`` ends the archive that the thread may be waiting for.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        if end is not None:
            end()
        await asyncio.wait([working])
        working.exception()
        raise
