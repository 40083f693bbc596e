"""Root filesystems for sessions: copied once per pool, then shared by copy-on-write."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from primerl.sandbox.errors import SandboxError
from primerl.sandbox.guest import removal
from primerl.sandbox.results import Root
from primerl.sandbox.tiers.images import folders, unpacking
from primerl.sandbox.tiers.images.unpacking import Grow
from primerl.sandbox.tiers.local.slots import Slot


@attrs.frozen(kw_only=True)
class ImageRoot:
    """The root filesystem of an image, and the variables that the image sets."""

    root: Root
    environment: Mapping[str, str]


class Roots:
    """The prepared root filesystems of a pool, stored in ``folder`` and owned by ``user``."""

    def __init__(self, folder: Path, *, user: int) -> None:
        self._folder = folder
        self._user = user
        self._count = 0

    async def prepare(
        self, layers: list[str], *, make: Callable[[dict[str, Any]], Awaitable[Slot]]
    ) -> Root:
        """Merge layers into a root, and test whether sessions can share it through overlayfs."""
        if not layers:
            raise SandboxError("prepare_root needs at least one folder or layer")
        self._count += 1
        name = str(self._count)
        try:
            await asyncio.to_thread(folders.merge, layers, self._folder / name, owner=self._user)
        except OSError as error:
            raise SandboxError(f"the root filesystem can't be copied: {error}") from error
        return await self._tried(name, make)

    async def unpack(
        self, image: str, *, make: Callable[[dict[str, Any]], Awaitable[Slot]], grow: Grow
    ) -> "ImageRoot":
        """Unpack an image into a root, as ``prepare`` does with layers.

        Raises:
            SandboxError: the image can't be had, or no session can use its root.
        """
        self._count += 1
        name = str(self._count)
        unpacked = await unpacking.unpack(image, self._folder / name, owner=self._user, grow=grow)
        try:
            root = await self._tried(name, make)
        except BaseException as error:
            await asyncio.to_thread(self.remove, name)
            if isinstance(error, SandboxError):
                raise SandboxError(f"no session can use the image {image}: {error}") from error
            raise
        return ImageRoot(root=root, environment=unpacked.environment)

    def has(self, name: str) -> bool:
        """Return whether the files of a root are still there."""
        return (self._folder / name).is_dir()

    def remove(self, name: str) -> None:
        """Remove a root that no session uses."""
        removal.remove(str(self._folder / name))

    async def _tried(self, name: str, make: Callable[[dict[str, Any]], Awaitable[Slot]]) -> Root:
        for way in ("overlay", "copy"):
            root = Root(name=name, copy_on_write=way)
            try:
                slot = await make(root.settings)
            except SandboxError:
                if way == "copy":
                    raise
                continue
            slot.kill()
            return root
        raise AssertionError("unreachable")
