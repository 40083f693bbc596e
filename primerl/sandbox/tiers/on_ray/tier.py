"""A tier whose sandboxes are on other hosts, in Ray actors that each hold the real tier."""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from primerl._common.ray import cluster, draining
from primerl.sandbox.errors import SandboxError, SandboxLost, SandboxUnavailable
from primerl.sandbox.results import Isolation, Result, Root
from primerl.sandbox.tiers.interface import Job, Sandboxes, Tier
from primerl.sandbox.tiers.on_ray.hosts import RayHost, RayHosts, RemoteSandbox

_TRIES = 3  # of a sandbox whose host is lost while it is created
_IMAGE_WORTH = 4  # sandboxes that a host may have more than another one without the image
_MARGIN_S = 5.0  # before a node leaves, for actors to end
_PAUSE_S, _MAX_PAUSE_S = 0.1, 30.0  # before another actor is started

_log = logging.getLogger(__name__)


class RayTier(Tier):
    """A tier on other hosts: each sandbox is created by the actor that has the fewest.

    An actor that is lost is replaced on any host that has room, also on one that joins later.

    Args:
        tier: the tier that each actor starts on its host; it is not started here.
        hosts: the hosts.
    """

    def __init__(self, tier: Tier, hosts: RayHosts) -> None:
        super().__init__(tier.options)
        self.name = tier.name
        self.lacks = tier.lacks
        self.hides = tier.hides
        self._environment = tier.environment
        self._plan = hosts
        self._isolation: Isolation | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # hosts whose nodes are to leave
        self._hosts: set[RayHost] = set()
        self._failures: dict[int, Exception] = {}
        self._changed = asyncio.Event()
        self._numbers = itertools.count()
        self._layers: dict[str, Sequence[str]] = {}

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that every command gets, such as the address of a proxy."""
        return self._environment

    @property
    def alive(self) -> bool:
        """Whether the tier was started and not closed: lost hosts are replaced."""
        return bool(self._keepers)

    async def start(self) -> None:
        """Join the cluster, and start actors; wait for the first one.

        Raises:
            SandboxUnavailable: the cluster can't be joined, or no host can run the tier.
        """
        plan = self._plan
        self._connecting = asyncio.create_task(
            asyncio.to_thread(
                cluster.connect, plan.address, resources=plan.resources, actors=plan.actors
            )
        )
        try:
            try:
                await asyncio.shield(self._connecting)
            except RuntimeError as error:
                raise SandboxUnavailable(str(error)) from error
            self._keepers = [
                asyncio.create_task(self._keep(number)) for number in range(plan.actors)
            ]
            self._draining = asyncio.create_task(self._leave_draining_nodes())
            await self._host()
        except BaseException:
            await self.close()
            raise

    async def make(self, settings: Mapping[str, Any]) -> RemoteSandbox:
        """Create a sandbox on the host with the fewest sandboxes; try another if it is lost."""
        root = settings.get("root")
        if root is not None and root not in self._layers:
            raise SandboxError("the root filesystem belongs to another pool")
        layers = None if root is None else self._layers[root]
        for _ in range(_TRIES):
            host = await self._host(settings.get("image"))
            try:
                return await host.make(next(self._numbers), settings, layers)
            except SandboxLost as error:
                lost = error
        raise lost

    async def run_connected(
        self, served: Job, suite: Job, *, sandboxes: Sandboxes
    ) -> tuple[Result, Result | None]:
        """Execute two jobs in two connected sandboxes of one host."""
        del sandboxes
        host = await self._host()
        return await host.run_connected(next(self._numbers), served, suite)

    async def fetch(self, image: str) -> None:
        """Bring an image to the host that the next session with it is likely to use."""
        for _ in range(_TRIES):
            try:
                return await (await self._host(image)).fetch(image)
            except SandboxLost as error:
                lost = error
        raise lost

    def stats(self) -> dict[str, Any]:
        """Return the images of each host, as it reported them in the last 10 s."""
        return {"hosts": [{"host": one.name, "images": {}, **one.stats} for one in self._hosts]}

    async def prepare_root(self, layers: Sequence[str]) -> Root:
        """Build a root filesystem on one host; others build theirs for their first session."""
        name = str(len(self._layers) + 1)
        self._layers[name] = layers
        host = await self._host()
        root = await host.prepare_root(name, layers)
        return Root(name=name, copy_on_write=root.copy_on_write)

    async def close(self) -> None:
        """End the actors with all sandboxes, and a local Ray."""
        keepers, self._keepers = self._keepers, []
        tasks = [*keepers, *self._leaving]
        if self._draining is not None:
            tasks.append(self._draining)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            await asyncio.wait([connecting])
            if connecting.exception() is None:
                await asyncio.to_thread(cluster.disconnect)

    def isolation(self) -> Isolation:
        """Describe the isolation in force on one of the hosts."""
        assert self._isolation is not None, "start() comes first"
        return self._isolation

    async def _host(self, image: str | None = None) -> RayHost:
        """Return the host with the fewest sandboxes; wait for one if all are lost.

        A host that has the image may have some more sandboxes than others.

        Raises:
            SandboxUnavailable: no actor could be started.
            SandboxError: the pool is closed.
        """
        while not (living := [one for one in self._hosts if not (one.lost or one.draining)]):
            if not self._keepers:
                raise SandboxError("the pool is closed")
            if len(self._failures) == len(self._keepers):
                failure = next(iter(self._failures.values()))
                raise SandboxUnavailable(f"no host runs sandboxes: {failure}") from failure
            self._changed.clear()
            await self._changed.wait()
        return min(
            living, key=lambda host: len(host.sandboxes) - _IMAGE_WORTH * (image in host.images)
        )

    async def _leave_draining_nodes(self) -> None:
        async for nodes in draining.nodes():
            for host in self._hosts:
                if host.node in nodes and not host.draining:
                    left_s = nodes[host.node] - _MARGIN_S
                    host.drain(max(0.0, min(self._plan.drain_timeout_s, left_s)))

    def _leave(self, host: RayHost) -> None:
        """End a host whose node is to leave, when its sessions have ended."""

        async def leave() -> None:
            try:
                await host.finish()
            finally:
                self._hosts.discard(host)
                await host.close()

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _keep(self, number: int) -> None:
        """Start an actor, and another one whenever it is lost."""
        while True:
            host = None
            try:
                host, self._isolation = await RayHost.open(self._plan, self.name, self.options)
                self._failures.pop(number, None)
                self._hosts.add(host)
                self._changed.set()
                if await host.watch():
                    self._leave(host)
                    host = None
                else:
                    _log.warning("sandboxes on %s are lost: %s", host.name, host.lost)
                pause_s = _PAUSE_S
            except RuntimeError as error:
                _log.warning("an actor for sandboxes could not be started: %s", error)
                pause_s = _MAX_PAUSE_S if number in self._failures else _PAUSE_S
                self._failures[number] = error
            finally:
                if host is not None:
                    self._hosts.discard(host)
                    await host.close()
                self._changed.set()
            await asyncio.sleep(pause_s)
