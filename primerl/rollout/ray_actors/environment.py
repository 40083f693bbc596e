"""``on_ray``: an environment that is played in Ray actors, anywhere in a cluster."""

import asyncio
import functools
import itertools
import logging
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

from primerl._common.ray import cluster, draining
from primerl.rollout.collection.groups import Progress
from primerl.rollout.engines.direct import DirectAddress
from primerl.rollout.engines.observed import CallRecord, ObservedEngine
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.remote import EngineHost, is_portable
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.environments.process_pool import ProcessPool
from primerl.rollout.processes.child import Child, ChildProcess, ProcessDied
from primerl.rollout.processes.pickling import dumps, pickle_arguments
from primerl.rollout.ray_actors.process import RayProcess
from primerl.types import Rollout, SamplingParams

log = logging.getLogger(__name__)

TRIES = 3  # of a rollout whose actor or host is lost
_MARGIN_S = 5.0  # before a node leaves, for actors to end
_DEFAULT_RESOURCES = {"environments": 1.0}


def on_ray(
    environment: Environment,
    *,
    actors: int | tuple[int, int] = 2,
    rollouts_per_actor: int = 16,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    timeout_s: float = 3600.0,
    start_timeout_s: float = 300.0,
    drain_timeout_s: float = 300.0,
    idle_s: float = 300.0,
    threads: int = 1,
) -> "RayEnvironment":
    """Return an environment that plays ``environment`` in Ray actors, on many hosts.

        environment = rollout.on_ray(heavy_environment, actors=64, address="auto")

    Each actor holds a supervised process, with the environment and its sandboxes, on some host of
    the cluster. A ``portable`` engine goes along: tokens travel between its servers and that host.
    Any other engine stays where it is and is called from there. A rollout whose actor or host is
    lost is played again on another one, up to three times. A lost actor is replaced on any host
    that has its resources, also on one that joins later. The actors of a node that is to leave
    (``ray drain-node``, an autoscaler) get no further rollouts and end when theirs have ended.

    Args:
        environment: the environment, which is pickled into each actor; lambdas and local functions
            are supported.
        actors: the number of actors, or the least and the most: then more are started while
            rollouts wait for an actor. An actor for which no node has room waits, and Ray's
            autoscaler adds nodes for it.
        rollouts_per_actor: how many rollouts an actor plays at once; others wait.
        resources: what an actor takes of its node, by Ray's names; by default
            ``{"environments": 1}``, which ``ray start --resources='{"environments": 8}'`` offers
            eight times. ``"CPU"`` is one of the names.
        address: the ``"host:port"`` of a cluster's head; ``"auto"``: the cluster that this host has
            joined; None: a Ray on this host only, which ends on ``aclose``.
        timeout_s: timeout of one rollout, without the wait for an actor.
        start_timeout_s: after waiting this long for room on any node, rollouts fail.
        drain_timeout_s: how long rollouts may go on on a node that is to leave, unless it leaves
            earlier. Then they are played again elsewhere.
        idle_s: how long an actor beyond the least number may be idle until it ends.
        threads: the number of threads of numerical libraries in each actor.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a number is out of range, the address is malformed, or the environment can't be
            pickled.
    """
    resources = dict(_DEFAULT_RESOURCES if resources is None else resources)
    if rollouts_per_actor < 1:
        raise ValueError(f"rollouts_per_actor is {rollouts_per_actor}, expected at least 1")
    for name, seconds in (("timeout_s", timeout_s), ("idle_s", idle_s)):
        if not seconds > 0:
            raise ValueError(f"{name} is {seconds}, expected a positive time")
    if not drain_timeout_s >= 0:
        raise ValueError(f"drain_timeout_s is {drain_timeout_s}, expected at least 0")
    least, most = actors if isinstance(actors, tuple) else (actors, actors)
    cluster.check(
        actors=least, resources=resources, address=address, start_timeout_s=start_timeout_s
    )
    if most < least:
        raise ValueError(f"actors are {actors}, expected the least number, then the most")
    return RayEnvironment(
        pickle_arguments(environment=environment),
        actors=(least, most),
        rollouts_per_actor=rollouts_per_actor,
        resources=resources,
        address=address,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
        drain_timeout_s=drain_timeout_s,
        idle_s=idle_s,
        threads=threads,
    )


class RayEnvironment:
    """An environment that is played in Ray actors, made by ``on_ray``.

    The first rollout connects its process to the cluster and starts the actors. They end on
    ``aclose``, which a worker calls, or with that process.
    """

    def __init__(self, arguments: dict[str, bytes], **plan: Any) -> None:
        self._arguments = arguments
        self._plan = plan
        self._engines = EngineHost()
        self._playing: dict[int, tuple[Child, ObservedEngine]] = {}
        self._copies: MutableMapping[Engine, tuple[int, bytes]] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._connecting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._pool = ProcessPool(
            arguments,
            {"generate": self._engines.generate, "record": self._record},
            processes=plan["actors"][0],
            most=plan["actors"][1],
            idle_s=plan["idle_s"],
            make=functools.partial(
                RayProcess,
                resources=plan["resources"],
                threads=plan["threads"],
                start_timeout_s=plan["start_timeout_s"],
            ),
            most_each=plan["rollouts_per_actor"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the actors: a copy starts its own.
        return functools.partial(RayEnvironment, **self._plan), (self._arguments,)

    @property
    def restarts(self) -> int:
        """The number of actors that were lost and replaced."""
        return self._pool.restarts

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play one rollout in the actor that has the fewest; on others, if the actor is lost.

        Raises:
            TimeoutError: the rollout did not end within ``timeout_s``.
            ProcessDied: the rollout was lost three times.
            RuntimeError: the cluster can't be joined, or no actor can be started.
            Exception: any error of the environment.
        """
        await self._connected()
        for _ in range(TRIES):
            try:
                return await self._play(task, engine, params)
            except ProcessDied as error:
                lost = error
        raise lost

    async def _play(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        observed = engine if isinstance(engine, ObservedEngine) else Progress().observe(engine, 0)
        original = observed.observed
        timeout_s = self._plan["timeout_s"]
        async with self._pool.process(timeout_s=timeout_s, wait_counts=False) as child:
            with self._engines.lease(observed, child.notify) as address:
                where: Any = address
                if is_portable(original):
                    where = DirectAddress(address.index, *self._copy(original))
                    self._playing[address.index] = child, observed
                try:
                    rollout: Rollout = await child.call("play", dict(task), where, params)
                finally:
                    self._playing.pop(address.index, None)
        return rollout

    def _copy(self, engine: Engine) -> tuple[int, bytes]:
        """Return the number of a portable engine, and its pickle, which is made once."""
        if engine not in self._copies:
            self._copies[engine] = next(self._numbers), dumps(engine)
        return self._copies[engine]

    async def _record(self, index: int, number: int, session: str | None) -> None:
        """Record a call that a rollout samples on its host; the handler of ``DirectEngine``."""
        child, observed = self._playing[index]

        async def request(name: str | None) -> CallRecord:
            record: CallRecord = await child.call(
                "sample", index, number, name, int(observed.version)
            )
            return record

        await observed.record(request, session=session)

    async def _connected(self) -> None:
        """Connect to the cluster, once for all rollouts; a failure is that of each rollout."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(
                asyncio.to_thread(
                    cluster.connect,
                    self._plan["address"],
                    resources=self._plan["resources"],
                    actors=self._plan["actors"][1],
                )
            )
        await asyncio.shield(self._connecting)
        if self._draining is None:
            self._draining = asyncio.create_task(self._leave_draining_nodes())

    async def _leave_draining_nodes(self) -> None:
        """End the actors of nodes that are to leave, and start others elsewhere."""
        async for nodes in draining.nodes():
            for node, left_s in nodes.items():
                within_s = max(0.0, min(self._plan["drain_timeout_s"], left_s - _MARGIN_S))
                count = self._pool.retire(functools.partial(_is_on, node), within_s=within_s)
                if count:
                    log.warning(
                        "a node is to leave: the rollouts of %d actors have %.0f s", count, within_s
                    )

    def members(self) -> list[dict[str, Any]]:
        """List the actors' processes, each with ``name``, ``pid`` on its host, and ``alive``."""
        return [
            {"name": one.name, "pid": one.pid, "alive": one.alive} for one in self._pool.children()
        ]

    async def aclose(self) -> None:
        """End the actors, and a local Ray; rollouts in flight fail."""
        connecting, self._connecting = self._connecting, None
        watching, self._draining = self._draining, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        await self._pool.aclose()
        if connecting is not None:
            await asyncio.wait([connecting])
            if connecting.exception() is None:
                await asyncio.to_thread(cluster.disconnect)


def _is_on(node: str, process: ChildProcess) -> bool:
    return isinstance(process, RayProcess) and process.node == node
