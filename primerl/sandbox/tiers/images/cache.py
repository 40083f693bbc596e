"""The images that a pool holds on its host: each fetched once, within a limit on bytes."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import attrs

from primerl._common import progress
from primerl.sandbox.errors import SandboxError

_log = logging.getLogger(__name__)
_REPORT_S = 5.0
_WAIT_S = 0.05

V = TypeVar("V")
Grow = Callable[[int], None]


class NoSpace(Exception):
    """The images that sessions use leave too little space for another one."""


@attrs.define(kw_only=True, eq=False)
class HeldImage(Generic[V]):
    """An image that is on this host, and the number of ``sessions`` that use it."""

    name: str
    value: V
    size: int
    sessions: int = 0
    used: int = 0  # when it was used last, by the count of all uses


class ImageCache(Generic[V]):
    """Images by name, which are fetched one at a time; those unused for longest are removed.

    Args:
        fetch: brings an image to this host and returns what sessions need to use it. It calls
            ``grow`` with each number of bytes, from any thread, before the host's disk holds them;
            an error of ``grow`` must end it, and leave nothing behind.
        remove: removes an image from this host; called in a thread.
        limit_bytes: the most bytes of all images.
        timeout_s: timeout of fetching one image, and of waiting for space.
    """

    def __init__(
        self,
        fetch: Callable[[str, Grow], Awaitable[V]],
        remove: Callable[[V], None],
        *,
        limit_bytes: int,
        timeout_s: float,
    ) -> None:
        self._fetch = fetch
        self._remove = remove
        self._limit = limit_bytes
        self._timeout_s = timeout_s
        self._held: dict[str, HeldImage[V]] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._lock = threading.Lock()  # of _held and _size
        self._size = 0
        self._fetched = self._removed = 0
        self._uses = itertools.count(1)
        self._closed = threading.Event()

    async def fetch(self, name: str) -> None:
        """Fetch an image if this host does not hold it; many callers share one fetch.

        Raises:
            SandboxError: the image can't be fetched, or not in time; the message names it.
        """
        while name not in self._held:
            if self._closed.is_set():
                raise SandboxError("the pool is closed")
            if name not in self._fetching:
                self._fetching[name] = asyncio.create_task(self._fetched_once(name))
                self._fetching[name].add_done_callback(lambda task: self._ended(name, task))
            await asyncio.shield(self._fetching[name])

    async def take(self, name: str) -> HeldImage[V]:
        """Fetch an image, and count one more session that uses it, until ``release``.

        Raises:
            SandboxError: as ``fetch``.
        """
        while True:
            await self.fetch(name)
            with self._lock:
                held = self._held.get(name)
                if held is not None:  # else it has just been removed
                    held.sessions += 1
                    held.used = next(self._uses)
                    return held

    def release(self, held: HeldImage[V]) -> None:
        """End a session's use of an image."""
        with self._lock:
            held.sessions -= 1
            held.used = next(self._uses)

    def forget(self, held: HeldImage[V]) -> None:
        """Fetch an image again for the next session, because it is gone from this host."""
        with self._lock:
            if self._held.get(held.name) is held:
                del self._held[held.name]
                self._size -= held.size
                self._removed += 1

    def stats(self) -> dict[str, Any]:
        """Return the images with their bytes and sessions, and how many came and went."""
        with self._lock:
            images = {
                one.name: {"bytes": one.size, "sessions": one.sessions}
                for one in self._held.values()
            }
            return {
                "images": images,
                "image_bytes": self._size,
                "images_fetched": self._fetched,
                "images_removed": self._removed,
            }

    def clear(self) -> None:
        """Remove all images, which no session uses any more."""
        for held in self._held.values():
            self._remove(held.value)
        self._held.clear()

    async def close(self) -> None:
        """Cancel what is being fetched, and wait until it has ended."""
        self._closed.set()
        tasks = [*self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetched_once(self, name: str) -> None:
        async with self._one_at_a_time:
            began = time.monotonic()
            _log.info("fetching the image %s", name)
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    held = await self._within_limit(name)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise SandboxError(
                    f"the image {name} was not fetched within {self._timeout_s:g} s "
                    "(image_timeout_s)"
                ) from None
            with self._lock:
                self._held[name] = held
                self._fetched += 1
        took_s = time.monotonic() - began
        _log.info("fetched the image %s: %d MB in %.1f s", name, held.size >> 20, took_s)

    def _ended(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._fetching[name]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all callers may have been cancelled

    async def _within_limit(self, name: str) -> HeldImage[V]:
        """Fetch an image, again whenever sessions have released the space that it lacked."""
        needed = 0
        while True:
            await self._space(name, needed)
            growth = _Growth(self._grow, name)
            try:
                value = await self._fetch(name, growth)
                return HeldImage(name=name, value=value, size=growth.size)
            except NoSpace:
                needed = growth.size + growth.refused
                self._shrink(growth.size)
            except BaseException:
                self._shrink(growth.size)
                raise

    async def _space(self, name: str, needed: int) -> None:
        """Wait until the images in use leave room for ``needed`` bytes."""
        reported = False
        while needed and self._in_use() + needed > self._limit:
            if not self._in_use():
                raise SandboxError(
                    f"the image {name} has more than the {self._limit} bytes that images may "
                    "take on this host (image_bytes)"
                )
            if not reported:
                _log.info("the image %s waits for space that images in use take", name)
                reported = True
            await asyncio.sleep(_WAIT_S)

    def _in_use(self) -> int:
        with self._lock:
            return sum(one.size for one in self._held.values() if one.sessions)

    def _shrink(self, size: int) -> None:
        with self._lock:
            self._size -= size

    def _grow(self, size: int) -> None:
        """Account for more bytes; remove images, those unused for longest first, to make room.

        Raises:
            NoSpace: all images are in use.
        """
        if self._closed.is_set():
            raise SandboxError("the pool is closed")
        while True:
            with self._lock:
                if self._size + size <= self._limit:
                    self._size += size
                    return
                unused = [one for one in self._held.values() if not one.sessions]
                if not unused:
                    raise NoSpace
                oldest = min(unused, key=lambda one: one.used)
                del self._held[oldest.name]
            self._remove(oldest.value)
            with self._lock:
                self._size -= oldest.size
                self._removed += 1
            _log.info("removed the image %s: %d MB", oldest.name, oldest.size >> 20)


class _Growth:
    """The bytes of an image that is being fetched."""

    def __init__(self, grow: Grow, name: str) -> None:
        self.size = self.refused = 0
        self._grow = grow
        self._name = name
        self._reported = time.monotonic()

    def __call__(self, size: int) -> None:
        try:
            self._grow(size)
        except NoSpace:
            self.refused = size
            raise
        self.size += size
        if time.monotonic() > self._reported + _REPORT_S:
            self._reported = time.monotonic()
            progress.report("image", f"{self._name}: {self.size >> 20} MB")
