"""Weight updates on all vLLM servers of a fleet, and seeding of servers that return."""

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
from primerl.serving.client.http import Refused, ServerFailed, Unreachable
from primerl.serving.client.servers import FAILED, ServerState
from primerl.serving.client.settings import ON_UPDATE
from primerl.types import PolicyVersion

REPAIR_S = 10.0  # timeout of a request that repairs a server in the background
PREPARED_S = 0.02  # interval of asking whether an update is prepared
# Timeout of the other data-parallel ranks, after the first one is prepared. Ranks on another node
# read the publication into a copy of their own.
LAST_S = 600.0
SEED_S = 600.0
SEED_AGAIN_S = 5.0
UNSEEDED = "default"  # vLLM's label of its checkpoint's weights

log = logging.getLogger(__name__)


@attrs.frozen
class Publication:
    """The latest publication; ``update`` is None if the servers' own checkpoint was adopted."""

    version: PolicyVersion
    update: Mapping[str, Any] | None


class SendBarrier:
    """A barrier between the servers that are to receive weights and the thread that sends them."""

    def __init__(self) -> None:
        self.missing = -1
        """The number of servers that are not ready yet; negative until that number is known."""
        self.broken = False
        self._all = asyncio.Event()
        self._over = Event()

    async def arrive(self) -> None:
        """Report a server as ready to receive, and wait for the others.

        Raises:
            ServerFailed: one of the others can't receive.
        """
        self.missing -= 1
        if not self.missing:
            self._all.set()
            self._over.set()
        await self._all.wait()
        if self.broken:
            raise ServerFailed("another server was not ready to receive the weights")

    def give_up(self) -> None:
        """Break the barrier: a server can't receive, so nothing is sent."""
        self.broken = True
        self._all.set()
        self._over.set()

    def wait(self, update: "Future[Any]") -> bool:
        """Block the sending thread until all servers are ready; return False if one is not."""
        update.add_done_callback(lambda _: self._over.set())
        self._over.wait()
        return not self.missing and not self.broken


class Updates:
    """Updater of a fleet's servers, and of servers that return; runs on the fleet's event loop."""

    accepts_early = True  # whether a report of the new version is believed before the load ends

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pause = ON_UPDATE[fleet.settings.on_update]
        self._latest: Publication | None = None
        self._shared = secrets.token_hex(4)
        """Names the weights of all versions, of which each was published once, in servers' stores
        of keys and values."""
        self._busy = asyncio.Lock()
        self._tasks: dict[ServerState, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        fleet.on_unseeded = self._seed_soon

    async def load(
        self,
        update: Mapping[str, Any],
        version: PolicyVersion,
        *,
        timeout_s: float,
        meeting: SendBarrier | None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Load ``update`` into all live servers; see ``VLLMEngine.load_weights``."""
        deadline = time.monotonic() + timeout_s
        for seeding in self._tasks.values():
            seeding.cancel()  # its server gets these weights instead
        async with self._busy:
            live = await self._fleet.live()
            prepared = await call_all(
                self._fleet,
                lambda one: self._prepare(one, update),
                f"version {version} was not prepared, and no server was changed",
                timeout_s=deadline - time.monotonic(),
                servers=live,
            )
            if self._fleet.published is not None and version <= self._fleet.published:
                self._shared = secrets.token_hex(4)  # the version has other weights now
            self._accept(version if self.accepts_early else -1)
            self._latest = None  # until a server has loaded the update
            if meeting is not None:
                meeting.missing = len(prepared)

            async def swap(server: ServerState) -> list[dict[str, Any]]:
                receipt = await self._swap(server, update, version, meeting)
                if meeting is None:
                    self._latest = Publication(version, dict(update))
                return receipt

            receipts = await call_all(
                self._fleet,
                swap,
                f"version {version} was not loaded everywhere",
                timeout_s=deadline - time.monotonic(),
                servers=prepared,
            )
            return {server.url: receipt for server, receipt in receipts.items()}

    async def adopt(self, version: PolicyVersion, *, timeout_s: float) -> None:
        """Label the current weights of the live servers as ``version``."""
        async with self._busy:
            servers = await self._fleet.live()
            fresh = all(one.label == UNSEEDED for one in servers)
            self._accept(version)
            await call_all(
                self._fleet,
                lambda one: self._name(one, version),
                f"version {version} was not adopted everywhere",
                timeout_s=timeout_s,
                servers=servers,
            )
            self._latest = Publication(version, None) if fresh else None

    def _accept(self, version: PolicyVersion) -> None:
        """Accept servers' reports of versions up to ``version``; the run published no newer one."""
        known = self._fleet.published
        self._fleet.published = version if known is None else max(version, known)

    # ---- one server ----

    async def _prepare(self, server: ServerState, update: Mapping[str, Any]) -> None:
        """Have all workers of a server fetch and verify an update while they sample."""
        ticket = secrets.token_hex(8)
        prepare = functools.partial(
            rpc, self._fleet, server, names.PREPARE_WEIGHTS, update=dict(update), ticket=ticket
        )
        while not all(one.get("prepared") for one in await prepare()):
            await asyncio.sleep(PREPARED_S)
        # vLLM returns only the results of the first data-parallel rank. This call waits for the
        # other ranks, which are nearly done, and fails if one of them failed. A rank that is not
        # done does not sample meanwhile.
        await prepare(timeout_s=LAST_S)

    async def _swap(
        self,
        server: ServerState,
        update: Mapping[str, Any],
        version: PolicyVersion,
        meeting: SendBarrier | None,
    ) -> list[dict[str, Any]]:
        """Pause a server, load the update, and resume; return the workers' receipts.

        A server that fails is not used until a later load succeeds.
        """
        touched = False
        newer = server.version is not None and version > server.version
        label = self._fleet.labels.name(version)
        post = functools.partial(self._fleet.http.post, server.url)
        try:
            # Prefixes are cached by version. If the version is not newer, clear the cache, which
            # may have prefixes of other weights with the same version.
            pause = self._pause if newer else self._pause.replace("cache=false", "cache=true")
            await post(f"{names.PAUSE}?{pause}")
            touched = True
            await post(names.START_UPDATE)
            if meeting is not None:
                await meeting.arrive()
            await post(names.LOAD_UPDATE, {"update_info": dict(update)})
            await post(names.FINISH_UPDATE, {"weight_version": label})
            await self._share_keys(server, version)
            await post(names.RESUME)
        except BaseException as error:
            if meeting is not None:
                meeting.give_up()
            if touched:  # the label makes other copies of the engine stop using the server
                self._fleet.failed(server)
                self._in_background(self._label_failed(server))
            elif not isinstance(error, Unreachable) or error.sent:
                self._in_background(self._resume(server))
            raise
        self._fleet.servers.loaded(server, label, version)
        self._fleet.tell()
        return await rpc(self._fleet, server, names.WEIGHT_RECEIPT)

    def _in_background(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _resume(self, server: ServerState) -> None:
        try:
            async with asyncio.timeout(REPAIR_S):
                await self._fleet.http.post(server.url, names.RESUME)
        except Exception as error:  # a background task: no other code handles its exceptions
            log.error("the server %s could not be resumed: %s", server.url, summary(error))

    async def _label_failed(self, server: ServerState) -> None:
        """Label a server as failed, and retry while it is failed and in the fleet."""
        while server.failed and self._fleet.servers.get(server.url) is server:
            async with self._busy:  # not during a later load
                if server.failed and server.alive:  # a lost server may return
                    try:
                        async with asyncio.timeout(REPAIR_S):
                            await self._set_label(server, FAILED)
                            return
                    except Exception as error:  # a background task, as above
                        log.error(
                            "%s could not be labeled as failed: %s", server.url, summary(error)
                        )
            await asyncio.sleep(SEED_AGAIN_S)

    async def _set_label(self, server: ServerState, label: str) -> None:
        body = {"new_version": label}
        await self._fleet.http.post(server.url, names.SET_WEIGHT_VERSION, body)

    async def _name(self, server: ServerState, version: PolicyVersion) -> None:
        label = self._fleet.labels.name(version)
        if server.failed or server.label == FAILED:
            raise RuntimeError(
                f"{server.url} failed to load weights earlier: publish weights to it first"
            )
        await self._set_label(server, label)
        await self._share_keys(server, version)
        self._fleet.servers.loaded(server, label, version)
        self._fleet.tell()

    async def _share_keys(self, server: ServerState, version: PolicyVersion) -> None:
        """Let a server with primerl's KV connector share the keys and values of a version."""
        label, place = self._fleet.labels.name(version), f"{self._shared}-{version}"
        try:
            await rpc(self._fleet, server, names.LABEL_SHARED_KEYS, label=label, place=place)
        except (ServerFailed, Refused, RuntimeError) as error:  # without primerl's extension
            log.info("%s shares no keys and values: %s", server.url, summary(error))

    # ---- servers that return ----

    def _seed_soon(self, server: ServerState) -> None:
        """Start to load the latest weights into a server that has no weights of this run."""
        busy = self._busy.locked() or server in self._tasks
        if self._latest is None or busy or server.failed or server.label == FAILED:
            return
        if self._latest.update is None and server.label != UNSEEDED:
            return  # weights of another run, not the checkpoint that was adopted
        task = self._tasks[server] = asyncio.create_task(self._seed(server))
        task.add_done_callback(lambda _: self._tasks.pop(server, None))

    async def _seed(self, server: ServerState) -> None:
        async with self._busy:
            latest = self._latest
            if latest is None or server.version is not None or not server.alive:
                return
            try:
                async with asyncio.timeout(SEED_S):
                    if latest.update is None:
                        await self._name(server, latest.version)
                    else:
                        await self._prepare(server, latest.update)
                        await self._swap(server, latest.update, latest.version, None)
            except Exception as error:  # a background task, as above
                log.error("loading weights into %s failed: %s", server.url, summary(error))
            else:
                log.info(
                    "%s has loaded version %d, which it was missing", server.url, latest.version
                )
                return
        await asyncio.sleep(SEED_AGAIN_S)
