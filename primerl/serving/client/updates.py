"""Weight updates of all vLLM servers of a fleet."""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Event
from typing import Any

import attrs

from primerl.rollout.errors import summary
from primerl.serving import names
from primerl.serving.client.calls import call_all, rpc
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.http import ServerFailed, Unreachable
from primerl.serving.client.replicas import FAILED, Replica
from primerl.serving.client.settings import ON_UPDATE
from primerl.types import PolicyVersion

REPAIR_S = 10.0  # timeout of a request that repairs a server in the background
PREPARED_S = 0.02  # interval of asking whether an update is prepared
LAST_S = 60.0  # how much later than the first data-parallel rank another may be prepared
SEED_S = 600.0
SEED_AGAIN_S = 5.0
UNSEEDED = "default"  # vLLM's label of its checkpoint's weights

log = logging.getLogger(__name__)


@attrs.frozen
class Publication:
    """The latest publication; ``update`` is None for the servers' own checkpoint."""

    version: PolicyVersion
    update: Mapping[str, Any] | None


class Rendezvous:
    """A barrier of replicas that are ready to receive and the thread that sends."""

    def __init__(self) -> None:
        self.missing = -1
        """How many replicas have not arrived; below 0 while it is not known who will."""
        self.broken = False
        self._all = asyncio.Event()
        self._over = Event()

    async def arrive(self) -> None:
        """Wait for the others.

        Raises:
            ServerFailed: one of them can't receive.
        """
        self.missing -= 1
        if not self.missing:
            self._all.set()
            self._over.set()
        await self._all.wait()
        if self.broken:
            raise ServerFailed("another replica was not ready to receive the weights")

    def give_up(self) -> None:
        """Break the barrier: one of the replicas can't receive, so nothing is sent."""
        self.broken = True
        self._all.set()
        self._over.set()

    def wait(self, update: "Future[Any]") -> bool:
        """Wait in another thread until all have arrived; returns False if they will not."""
        update.add_done_callback(lambda _: self._over.set())
        self._over.wait()
        return not self.missing and not self.broken


class Updates:
    """Updates the servers of a fleet, and seeds those that return; on the fleet's event loop."""

    accepts_early = True  # a server's report of a version, before it is known to have loaded it

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pause = ON_UPDATE[fleet.settings.on_update]
        self._latest: Publication | None = None
        self._busy = asyncio.Lock()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        fleet.on_unseeded = self._seed_soon

    async def load(
        self,
        update: Mapping[str, Any],
        version: PolicyVersion,
        *,
        timeout_s: float,
        meeting: Rendezvous | None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Load ``update`` into all live replicas; see ``VLLMEngine.load_weights``."""
        deadline = time.monotonic() + timeout_s
        for seeding in self._tasks.values():
            seeding.cancel()  # its replica gets these weights instead
        async with self._busy:
            live = await self._fleet.live()
            prepared = await call_all(
                self._fleet,
                lambda one: self._prepare(one, update),
                f"version {version} was not prepared, and no server was changed",
                timeout_s=deadline - time.monotonic(),
                replicas=live,
            )
            self._accept(version if self.accepts_early else -1)
            self._latest = None  # until a replica has loaded it
            if meeting is not None:
                meeting.missing = len(prepared)

            async def swap(replica: Replica) -> list[dict[str, Any]]:
                receipt = await self._swap(replica, update, version, meeting)
                if meeting is None:
                    self._latest = Publication(version, dict(update))
                return receipt

            receipts = await call_all(
                self._fleet,
                swap,
                f"version {version} was not loaded everywhere",
                timeout_s=deadline - time.monotonic(),
                replicas=prepared,
            )
            return {replica.url: receipt for replica, receipt in receipts.items()}

    async def adopt(self, version: PolicyVersion, *, timeout_s: float) -> None:
        """Label the current weights of the live replicas as ``version``."""
        async with self._busy:
            replicas = await self._fleet.live()
            fresh = all(one.label == UNSEEDED for one in replicas)
            self._accept(version)
            await call_all(
                self._fleet,
                lambda one: self._name(one, version),
                f"version {version} was not adopted everywhere",
                timeout_s=timeout_s,
                replicas=replicas,
            )
            self._latest = Publication(version, None) if fresh else None

    def _accept(self, version: PolicyVersion) -> None:
        """Believe servers that report this version; versions beyond it are not this run's."""
        known = self._fleet.published
        self._fleet.published = version if known is None else max(version, known)

    # ---- one replica ----

    async def _prepare(self, replica: Replica, update: Mapping[str, Any]) -> None:
        """Have all workers fetch and verify an update while they sample."""
        ticket = secrets.token_hex(8)
        prepare = functools.partial(
            rpc, self._fleet, replica, names.PREPARE_WEIGHTS, update=dict(update), ticket=ticket
        )
        while not all(one.get("prepared") for one in await prepare()):
            await asyncio.sleep(PREPARED_S)
        # vLLM returns the results of the first data-parallel rank only. This waits for the others,
        # which are nearly done, and fails if one has failed.
        await prepare(timeout_s=LAST_S)

    async def _swap(
        self,
        replica: Replica,
        update: Mapping[str, Any],
        version: PolicyVersion,
        meeting: Rendezvous | None,
    ) -> list[dict[str, Any]]:
        """Pause, load, resume; a replica that fails is not used until a later load succeeds."""
        touched = False
        newer = replica.version is not None and version > replica.version
        label = self._fleet.labels.name(version)
        post = functools.partial(self._fleet.http.post, replica.url)
        try:
            # Prefixes are cached by version: clear those of other weights with the same number.
            pause = self._pause if newer else self._pause.replace("cache=false", "cache=true")
            await post(f"{names.PAUSE}?{pause}")
            touched = True
            await post(names.START_UPDATE)
            if meeting is not None:
                await meeting.arrive()
            await post(names.LOAD_UPDATE, {"update_info": dict(update)})
            await post(names.FINISH_UPDATE, {"weight_version": label})
            await post(names.RESUME)
        except BaseException as error:
            if meeting is not None:
                meeting.give_up()
            if touched:  # other copies of the engine stop using it by its label
                self._fleet.failed(replica)
                self._in_background(self._label_failed(replica))
            elif not isinstance(error, Unreachable) or error.sent:
                self._in_background(self._resume(replica))
            raise
        self._fleet.replicas.loaded(replica, label, version)
        self._fleet.tell()
        return await rpc(self._fleet, replica, names.WEIGHT_RECEIPT)

    def _in_background(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _resume(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(REPAIR_S):
                await self._fleet.http.post(replica.url, names.RESUME)
        except Exception as error:  # in the background: it has no other handler
            log.error("%s could not be resumed: %s", replica.url, summary(error))

    async def _label_failed(self, replica: Replica) -> None:
        """Label a server as failed as soon as possible, while it is."""
        while replica.failed and self._fleet.replicas.get(replica.url) is replica:
            async with self._busy:  # not during a later load
                if replica.failed and replica.alive:  # a lost one may be restarted
                    try:
                        async with asyncio.timeout(REPAIR_S):
                            await self._set_label(replica, FAILED)
                            return
                    except Exception as error:  # in the background, as above
                        log.error(
                            "%s could not be labelled as failed: %s", replica.url, summary(error)
                        )
            await asyncio.sleep(SEED_AGAIN_S)

    async def _set_label(self, replica: Replica, label: str) -> None:
        body = {"new_version": label}
        await self._fleet.http.post(replica.url, names.SET_WEIGHT_VERSION, body)

    async def _name(self, replica: Replica, version: PolicyVersion) -> None:
        label = self._fleet.labels.name(version)
        if replica.failed or replica.label == FAILED:
            raise RuntimeError(f"{replica.url} failed to load weights: publish to it")
        await self._set_label(replica, label)
        self._fleet.replicas.loaded(replica, label, version)
        self._fleet.tell()

    # ---- replicas that return ----

    def _seed_soon(self, replica: Replica) -> None:
        """Start loading the latest weights into a replica that has none of this run."""
        busy = self._busy.locked() or replica in self._tasks
        if self._latest is None or busy or replica.failed or replica.label == FAILED:
            return
        if self._latest.update is None and replica.label != UNSEEDED:
            return  # weights of another run, not the checkpoint that was adopted
        task = self._tasks[replica] = asyncio.create_task(self._seed(replica))
        task.add_done_callback(lambda _: self._tasks.pop(replica, None))

    async def _seed(self, replica: Replica) -> None:
        async with self._busy:
            latest = self._latest
            if latest is None or replica.version is not None or not replica.alive:
                return
            try:
                async with asyncio.timeout(SEED_S):
                    if latest.update is None:
                        await self._name(replica, latest.version)
                    else:
                        await self._prepare(replica, latest.update)
                        await self._swap(replica, latest.update, latest.version, None)
            except Exception as error:  # in the background, as above
                log.error("%s could not be seeded: %s", replica.url, summary(error))
            else:
                log.info("%s was seeded with version %d", replica.url, latest.version)
                return
        await asyncio.sleep(SEED_AGAIN_S)
