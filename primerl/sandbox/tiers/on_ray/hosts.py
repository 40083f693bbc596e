"""Hosts of a Ray cluster, and the sandboxes that this process uses on them."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl._common.ray import actors, cluster
from primerl._common.ray.actors import ActorLost
from primerl.sandbox.errors import (
    SandboxError,
    SandboxLost,
    SandboxNotStarted,
    SandboxUnavailable,
)
from primerl.sandbox.results import Isolation, Result, Root
from primerl.sandbox.tiers.interface import Job, Options
from primerl.sandbox.tiers.on_ray.actor import SandboxActor

ANSWER_S = 30.0  # for an actor to answer, besides the time that its work may take
ROOT_S = 600.0  # for a root filesystem to be copied
CLOSE_S = 15.0
FETCH_S = 10.0  # of each question whether an image is there
_POLL_S = 0.1
_log = logging.getLogger(__name__)
_WAIT_S = 10.0  # of each question for ended sandboxes, unless the lease is short


@attrs.frozen(kw_only=True)
class RayHosts:
    """Hosts of a Ray cluster on which the sandboxes of a pool run.

    Attributes:
        actors: the number of actors that hold sandboxes, each on some host. An actor for which no
            node has room waits.
        resources: what an actor takes of its node, by Ray's names; ``ray start
            --resources='{"sandboxes": 1}'`` offers the default once. ``"CPU"`` is one of the names.
        address: the ``"host:port"`` of a cluster's head; ``"auto"``: the cluster that this host has
            joined; None: a Ray on this host only, which ends with the pool.
        start_timeout_s: after waiting this long for room on any node, sandboxes can't be created.
        drain_timeout_s: how long sessions may go on on a node that is to leave (``ray drain-node``,
            an autoscaler), unless it leaves earlier.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a number is out of range, or the address is malformed.
    """

    actors: int = 2
    resources: Mapping[str, float] = attrs.field(factory=lambda: {"sandboxes": 1.0})
    address: str | None = None
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 300.0

    def __attrs_post_init__(self) -> None:
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, expected at least 0")
        cluster.check(
            actors=self.actors,
            resources=self.resources,
            address=self.address,
            start_timeout_s=self.start_timeout_s,
        )


class RayHost:
    """An actor with sandboxes on some host, from ``open``.

    Attributes:
        name: the name of the host.
        node: the id of its Ray node.
        sandboxes: the numbers of the sandboxes that are alive, or being created.
        images: the images of sessions that the host has.
        stats: the images of the host, as its tier reported them last.
        lost: why the actor is lost; empty while it is alive.
    """

    def __init__(self, actor: Any, name: str, node: str, options: Options) -> None:
        self.name = name
        self.node = node
        self._ready: set[int] = set()  # sandboxes that were not used yet
        self._drains: asyncio.Event = asyncio.Event()
        self._ends_at = math.inf
        self.sandboxes: set[int] = set()
        self.images: set[str] = set()
        self.stats: dict[str, Any] = {}
        self.lost = ""
        self._actor = actor
        self._options = options
        self._watching: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether the node is to leave: it gets no further sandboxes."""
        return self._drains.is_set()

    def drain(self, within_s: float) -> None:
        """Let the sessions of this host go on for ``within_s`` only, and create no sandboxes."""
        _log.warning("the node of %s is to leave: its sandboxes have %.0f s", self.name, within_s)
        self._ends_at = time.monotonic() + within_s
        self._drains.set()
        for number in [*self._ready]:
            self.kill(number)

    async def finish(self) -> None:
        """Wait until the sandboxes of a draining host have ended, or their time is over."""
        while self.sandboxes and not self.lost and time.monotonic() < self._ends_at:
            await asyncio.sleep(_POLL_S)

    @classmethod
    async def open(
        cls, hosts: RayHosts, tier: str, options: Options
    ) -> "tuple[RayHost, Isolation]":
        """Start an actor with a tier, where there is room; return it with the tier's isolation.

        Raises:
            RuntimeError: no actor could be started, or its host lacks a requirement of the tier,
                the interpreter, or a readable path.
        """
        actor, name, node = await actors.start(
            SandboxActor, resources=hosts.resources, timeout_s=hosts.start_timeout_s
        )
        host = cls(actor, name, node, options)
        try:
            # The tier starts, and creates test sandboxes.
            timeout_s = 3 * options.start_timeout_s + ANSWER_S
            isolation = await host.call("start", tier, options, timeout_s=timeout_s)
        except BaseException:
            host.lose("could not start")
            raise
        return host, isolation

    async def make(
        self, number: int, settings: Mapping[str, Any], layers: Sequence[str] | None
    ) -> "RemoteSandbox":
        """Create a sandbox, on a root filesystem if it has ``layers``."""
        sandbox = RemoteSandbox(self, number)
        if "session" not in settings:
            self._ready.add(number)
        self.sandboxes.add(number)
        timeout_s = 2 * self._options.start_timeout_s + ANSWER_S + (ROOT_S if layers else 0.0)
        if "image" in settings:  # which may have been removed since it was fetched
            timeout_s += 2 * self._options.image_timeout_s
        try:
            await self.call("make", number, settings, layers, timeout_s=timeout_s)
        except BaseException:
            sandbox.kill()
            raise
        if not sandbox.alive:
            raise SandboxLost(f"the node of the host {self.name} is to leave")
        return sandbox

    async def execute(self, number: int, job: Job) -> Result:
        """Execute a job in a sandbox.

        Raises:
            SandboxError: the sandbox raised it.
            SandboxLost: the host is lost.
        """
        self._ready.discard(number)
        timeout_s = job.timeout_s + self._options.start_timeout_s + ANSWER_S
        result, alive = await self.call("execute", number, job, timeout_s=timeout_s)
        if not alive:
            self.sandboxes.discard(number)
        done: Result = self._checked(result)
        return done

    async def run_connected(
        self, number: int, served: Job, suite: Job
    ) -> tuple[Result, Result | None]:
        """Execute two jobs in two connected sandboxes, which count as one.

        Raises:
            SandboxNotStarted: the sandboxes could not be created or connected.
            SandboxLost: the host is lost.
        """
        self.sandboxes.add(number)
        limit_s = max(served.timeout_s, suite.timeout_s)
        timeout_s = limit_s + 4 * self._options.start_timeout_s + ANSWER_S
        try:
            answer: tuple[Result, Result | None] = await self.call(
                "run_connected", number, served, suite, timeout_s=timeout_s
            )
            return answer
        finally:
            self.kill(number)  # if this is cancelled, the code must not keep running

    def kill(self, number: int) -> None:
        """Kill a sandbox, without waiting."""
        if number in self.sandboxes:
            self.sandboxes.discard(number)
            self._ready.discard(number)
            self._actor.kill.remote(number)

    async def fetch(self, image: str) -> None:
        """Bring an image to this host.

        Raises:
            SandboxError: the image can't be had.
            SandboxLost: the host is lost.
        """
        done = False
        while not done:
            done, error = await self.call("fetch", image, FETCH_S, timeout_s=FETCH_S + ANSWER_S)
            self._checked(error)
        self.images.add(image)

    async def prepare_root(self, name: str, layers: Sequence[str]) -> Root:
        """Build a root filesystem on this host."""
        root: Root = await self.call("prepare_root", name, layers, timeout_s=ROOT_S)
        return root

    async def watch(self) -> bool:
        """Watch for sandboxes that end by themselves, until the host is lost or drains.

        Returns whether it drains; then it is still watched.
        """
        self._watching = asyncio.create_task(self._watch())
        drains = asyncio.create_task(self._drains.wait())
        try:
            await asyncio.wait([self._watching, drains], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._watching.cancel()
            raise
        finally:
            drains.cancel()
        return self.draining and not self.lost

    async def _watch(self) -> None:
        wait_s = min(_WAIT_S, self._options.lease_s / 4)
        with contextlib.suppress(SandboxLost):
            while True:
                answer = await self.call("ended", wait_s, timeout_s=wait_s + ANSWER_S)
                ended, self.stats = answer
                self.sandboxes.difference_update(ended)
                self.images.intersection_update(self.stats.get("images", ()))

    async def close(self) -> None:
        """End the actor with its tier and all sandboxes."""
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(SandboxError):
            await self.call("close", timeout_s=CLOSE_S)
        self.lose("the pool is closed")

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of the actor.

        Raises:
            SandboxLost: the actor is lost, or did not answer in time.
            SandboxError: the method failed.
        """
        if self.lost:
            raise self._lost()
        try:
            with actors.errors():
                async with asyncio.timeout(timeout_s):
                    answer = await getattr(self._actor, method).remote(*arguments)
        except ActorLost as error:
            self.lose(str(error))
            raise self._lost() from error
        except TimeoutError:
            self.lose(f"it did not answer within {timeout_s:g} s")
            raise self._lost() from None
        except RuntimeError as error:
            raise SandboxError(f"on the host {self.name}: {error}") from error
        return self._checked(answer)

    def lose(self, reason: str) -> None:
        """End the actor; its sandboxes are dead."""
        if not self.lost:
            self.lost = reason
            self.sandboxes.clear()
            actors.end(self._actor)

    def _lost(self) -> SandboxLost:
        return SandboxLost(f"the host {self.name} of sandboxes is lost: {self.lost}")

    def _checked(self, answer: Any) -> Any:
        """Return an answer, or raise it with the name of the host if it is an error."""
        if not isinstance(answer, Exception):
            return answer
        kinds = (SandboxUnavailable, SandboxNotStarted)
        kind = next((one for one in kinds if isinstance(answer, one)), SandboxError)
        said = isinstance(answer, SandboxError | ValueError)
        raise kind(
            f"on the host {self.name}: {answer if said else f'{type(answer).__name__}: {answer}'}"
        )


class RemoteSandbox:
    """A sandbox that an actor holds."""

    def __init__(self, host: RayHost, number: int) -> None:
        self.host = host.name
        self._host = host
        self._number = number

    @property
    def alive(self) -> bool:
        """Whether the sandbox can take jobs."""
        return self._number in self._host.sandboxes

    async def execute(self, job: Job) -> Result:
        """Execute a job on the other host; kill the sandbox if this is cancelled.

        Raises:
            SandboxLost: the host is lost.
        """
        try:
            return await self._host.execute(self._number, job)
        except asyncio.CancelledError:  # the code must not keep running
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the sandbox; calling this again does nothing."""
        self._host.kill(self._number)
