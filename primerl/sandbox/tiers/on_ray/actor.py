"""The Ray actor that holds sandboxes, whose code travels with it: see ``HostActor``."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

from primerl._common.ray.host_actor import HostActor

_POLL_S = 0.1


class SandboxActor(HostActor):
    """The owner of a tier and its sandboxes, by number, on the actor's host.

    Methods return errors instead of raising them: Ray would log an error whose caller is gone.
    ``Any`` stands for types of primerl, which can't be imported before ``open``.
    """

    what = "sandboxes"

    def __init__(self) -> None:
        self._sandboxes: dict[int, Any] = {}
        self._making: dict[int, asyncio.Task[Any]] = {}
        self._roots: dict[str, asyncio.Task[Any]] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._heard = 0.0  # when the driver last asked for ended sandboxes

    async def start(self, name: Any, options: Any) -> Any:
        """Start the tier of a given name; return its isolation."""
        return await _outcome(self._start(name, options))

    async def make(
        self, number: int, settings: Mapping[str, Any], layers: Sequence[str] | None
    ) -> Exception | None:
        """Create a sandbox, on the root of the settings if it has ``layers``."""
        self._making[number] = asyncio.create_task(self._make(number, settings, layers))
        await asyncio.wait([self._making[number]])
        making = self._making.pop(number)
        return None if making.cancelled() else await _outcome(making)

    async def execute(self, number: int, job: Any) -> tuple[Any, bool]:
        """Execute a job; return its result, and whether the sandbox can take more jobs."""
        from primerl.sandbox.errors import SandboxNotStarted

        sandbox = self._sandboxes.get(number)
        if sandbox is None or not sandbox.alive:
            return SandboxNotStarted("the sandbox has ended"), False
        result = await _outcome(sandbox.execute(job))
        if not sandbox.alive:
            await asyncio.sleep(0)  # the event loop may not know yet that the tier ended, too
            self._end_with_tier()
        return result, sandbox.alive

    async def run_connected(self, number: int, served: Any, suite: Any) -> Any:
        """Execute two jobs in two connected sandboxes; return their results."""
        self._making[number] = asyncio.create_task(self._run_connected(served, suite))
        await asyncio.wait([self._making[number]])
        running = self._making.pop(number)
        return None if running.cancelled() else await _outcome(running)

    async def kill(self, number: int) -> None:
        """Kill a sandbox, even one that is being created."""
        making = self._making.get(number)
        if making is not None:
            making.cancel()
            await asyncio.wait([making])
        sandbox = self._sandboxes.pop(number, None)
        if sandbox is not None:
            sandbox.kill()

    async def ended(self, wait_s: float) -> tuple[list[int], dict[str, Any]]:
        """Wait for sandboxes that end by themselves, at most ``wait_s``.

        Return their numbers, and the images that this host holds.
        """
        until = time.monotonic() + wait_s
        found: list[int] = []
        while not found and time.monotonic() < until:
            self._heard = time.monotonic()
            await asyncio.sleep(_POLL_S)
            found = [number for number, one in self._sandboxes.items() if not one.alive]
        for number in found:
            self._sandboxes.pop(number).kill()
        return found, self._tier.stats()

    async def fetch(self, image: str, wait_s: float) -> tuple[bool, Exception | None]:
        """Wait for an image, at most ``wait_s``; return whether that ended, and an error."""
        if image not in self._fetching:
            self._fetching[image] = asyncio.create_task(self._tier.fetch(image))
        fetching = self._fetching[image]
        await asyncio.wait([fetching], timeout=wait_s)
        if not fetching.done():
            return False, None
        if self._fetching.get(image) is fetching:
            del self._fetching[image]
        return True, await _outcome(fetching)

    async def prepare_root(self, name: str, layers: Sequence[str]) -> Any:
        """Build a root filesystem that the driver calls ``name``, once."""
        return await _outcome(self._root(name, layers))

    async def close(self) -> None:
        """End the tier with all sandboxes."""
        self._watching.cancel()
        for sandbox in self._sandboxes.values():
            sandbox.kill()
        await self._tier.close()

    async def _start(self, name: Any, options: Any) -> Any:
        from primerl.sandbox import tiers

        self._tier = tiers.on_this_host(name, options)
        await self._tier.start()
        self._heard = time.monotonic()
        self._watching = asyncio.create_task(self._watch())
        return self._tier.isolation()

    async def _make(
        self, number: int, settings: Mapping[str, Any], layers: Sequence[str] | None
    ) -> None:
        if layers is not None:
            settings = {**settings, **(await self._root(settings["root"], layers)).settings}
        self._sandboxes[number] = await self._tier.make(settings)

    async def _run_connected(self, served: Any, suite: Any) -> Any:
        @contextlib.asynccontextmanager
        async def new() -> AsyncIterator[Any]:
            sandbox = await self._tier.make({"session": True})
            try:
                yield sandbox
            finally:
                sandbox.kill()

        return await self._tier.run_connected(served, suite, sandboxes=new)

    async def _root(self, name: str, layers: Sequence[str]) -> Any:
        if name not in self._roots:
            self._roots[name] = asyncio.create_task(self._tier.prepare_root(layers))
        try:
            return await asyncio.shield(self._roots[name])
        except Exception:
            self._roots.pop(name, None)  # the next session tries again
            raise

    async def _watch(self) -> None:
        """End this process when the tier ends, or the driver is silent for the tier's lease."""
        while time.monotonic() < self._heard + self._tier.options.lease_s:
            await asyncio.sleep(_POLL_S)
            self._end_with_tier()
        _end("the driver was silent")

    def _end_with_tier(self) -> None:
        if not self._tier.alive:
            _end("the tier's helper processes have ended")


def _end(reason: str) -> None:
    """End this process, and by that everything that its tier owns."""
    logging.getLogger(__name__).warning("the actor ends: %s", reason)
    os._exit(1)


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except Exception as error:  # the driver raises it
        return error
