"""The servers of an engine: which are alive, and which version each serves."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from primerl.rollout.errors import summary
from primerl.serving import names
from primerl.serving.client.http import (
    Http,
    Refused,
    ServerFailed,
    Unreachable,
)
from primerl.serving.client.members import Members
from primerl.serving.client.replicas import Replica, Replicas
from primerl.serving.client.settings import Settings
from primerl.serving.protocol import responses
from primerl.types import PolicyVersion

POLL_S = 0.15  # interval of asking each server for its version
SILENT_S = 30.0  # a server whose health check takes longer is lost

T = TypeVar("T")
log = logging.getLogger(__name__)


class Fleet:
    """The servers of one copy of an engine; used on one event loop only."""

    def __init__(self, members: Members, settings: Settings, *, version: PolicyVersion) -> None:
        self.settings = settings
        self.labels = settings.labels
        self.replicas = Replicas(members.urls, version=version)
        self.version = version
        """The version of the slowest replica in use; read from other threads."""
        self.newest_version = version
        """The newest version known to be served by any replica; read from other threads."""
        self.published: PolicyVersion | None = None
        """The newest version that this copy has published, if it has published any."""
        self.context_length: int | None = None
        self.on_unseeded: Callable[[Replica], None] | None = None
        """Called when a replica is up without weights of this run."""
        self._members = members
        self._changed = asyncio.Event()
        self._confirming = asyncio.Lock()
        self._scopes: dict[Replica, set[asyncio.Timeout]] = {}
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self.http = Http(settings.api_key)

    async def watch(self) -> None:
        """Watch the servers until cancelled."""
        try:
            while True:
                self._follow()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._watchers.values():
                task.cancel()
            await self.http.close()

    async def poll_all(self) -> None:
        """Ask every server once what it serves."""
        await asyncio.gather(*(self.poll(replica) for replica in self.replicas))

    # ---- watching ----

    def _follow(self) -> None:
        """Watch servers that joined, and stop watching those that left."""
        try:
            if self._members.changed():
                urls = self._members.urls
                for url in urls:
                    self.replicas.join(url)
                for replica in self.replicas:
                    if replica.url not in urls:
                        self.replicas.leave(replica.url)
                        log.info("%s left", replica.url)
        except Exception as error:  # any failure of the file: keep watching
            log.error("the list of replicas stays as it was: %s", summary(error))
        present = set(self.replicas)
        for replica in present - set(self._watchers):
            self._watchers[replica] = asyncio.create_task(self._watch(replica))
        for replica in set(self._watchers) - present:
            self._watchers.pop(replica).cancel()
        self.tell()

    async def _watch(self, replica: Replica) -> None:
        while True:
            try:
                await self.poll(replica)
            except Exception as error:  # or the replica would be used without being watched
                if replica.alive:  # log once, not at every poll
                    log.exception("%s could not be watched", replica.url)
                self.lost(replica, f"it could not be watched: {summary(error)}")
                self._withdraw(replica)
            await asyncio.sleep(POLL_S)

    async def poll(self, replica: Replica) -> None:
        """Ask a server which weights it serves."""
        try:
            label = await self._label(replica)
            if self.context_length is None:
                await self._read_context(replica)
        except (Unreachable, Refused, ServerFailed, RuntimeError, TimeoutError) as error:
            self.lost(replica, str(error) or f"no answer for {SILENT_S:.0f} s")
            # Connections to a host that vanished stay open.
            if isinstance(error, TimeoutError) or replica.lost_s > SILENT_S:
                self._withdraw(replica)
            return
        self.reported(replica, label)
        if replica.version is None and self.on_unseeded is not None:
            self.on_unseeded(replica)

    def reported(self, replica: Replica, label: str | None) -> None:
        """A server reported the label of its weights."""
        if self.replicas.reported(replica, label, self.number(label)):
            self._withdraw(replica)
        self.tell()

    def number(self, label: str | None) -> PolicyVersion | None:
        """The version of a label; None if this run did not publish it."""
        version = self.labels.number(label)
        if version is None or self.published is None or version <= self.published:
            return version
        return None

    async def confirm(self, replica: Replica, version: PolicyVersion) -> None:
        """Ask a server for its version when a response has a newer one than any known."""
        async with self._confirming:  # the first of many responses asks
            if version > self.newest_version:
                await self.poll(replica)

    def failed(self, replica: Replica) -> None:
        """A server failed to load weights: its reports are ignored until a load succeeds."""
        if self.replicas.failed(replica):
            self._withdraw(replica)
        self.tell()

    async def _label(self, replica: Replica) -> str | None:
        # vLLM answers between two engine steps, so not while it loads weights, and with an error
        # while its data-parallel ranks have different labels. If it is healthy, nothing changed.
        try:
            async with asyncio.timeout(SILENT_S):
                if self.labels.adapter is not None:
                    return await self._adapter_label(replica)
                content = await self.http.get(replica.url, names.WEIGHT_INFO)
        except (TimeoutError, ServerFailed):
            async with asyncio.timeout(SILENT_S):
                await self.http.get(replica.url, names.HEALTH)
            return replica.label
        return responses.decode(responses.weight_infos, content, replica.url).weight_version

    async def _adapter_label(self, replica: Replica) -> str:
        """The newest version of the adapter that a server has loaded."""
        held = [name for name in await self.models(replica) if self.number(name) is not None]
        newest = max(held, key=lambda name: self.number(name) or 0, default=None)
        return f"without the adapter {self.labels.adapter!r}" if newest is None else newest

    async def models(self, replica: Replica) -> list[str]:
        """The names of a server's model and of the adapters that it has loaded."""
        content = await self.http.get(replica.url, names.MODELS)
        cards = responses.decode(responses.model_cards, content, replica.url).data
        return [card.id for card in cards]

    def no_routes(self, token_ids: Sequence[int]) -> int | None:
        """The ``routes_start`` of a request for which expert routes are not needed."""
        return None if self.settings.routes is None else len(token_ids)

    def adapter_of(self, replica: Replica) -> str | None:
        """What a request to a replica calls the adapter; None for the server's own weights."""
        return None if self.labels.adapter is None else replica.label

    async def _read_context(self, replica: Replica) -> None:
        async with asyncio.timeout(SILENT_S):
            content = await self.http.get(replica.url, names.MODELS)
        cards = responses.decode(responses.model_cards, content, replica.url).data
        lengths = [card.max_model_len for card in cards]
        self.context_length = min([one for one in lengths if one], default=None)

    def lost(self, replica: Replica, error: str) -> None:
        """Record that a server can't be reached."""
        if replica.alive:
            log.warning("%s is lost: %s", replica.url, error)
        self.replicas.lost(replica, error)
        self.tell()

    def _withdraw(self, replica: Replica) -> None:
        """Send the requests in flight on a replica to another one."""
        for scope in self._scopes.get(replica, ()):
            scope.reschedule(0)

    def tell(self) -> None:
        """Publish what is known of the replicas to other threads and to waiting requests."""
        self.version = self.replicas.version
        self.newest_version = max(self.newest_version, self.version, self.replicas.newest or 0)
        self._changed.set()
        self._changed = asyncio.Event()

    def learn(self, version: PolicyVersion) -> None:
        """Another copy of the engine saw ``version`` served by every replica in use."""
        self.replicas.learn(version)
        if self.published is not None:
            self.published = max(self.published, version)
        self.tell()

    async def context(self) -> int:
        """The context length; waits for a server to report it.

        Raises:
            RuntimeError: none did for ``down_timeout_s``.
        """
        what = "no server has reported its context length"
        return await self.wait(lambda: self.context_length, what)

    async def report(self) -> list[dict[str, Any]]:
        """The status of each replica."""
        serving = self.replicas.serving()
        return [
            {
                "url": one.url,
                "alive": one.alive,
                "serving": one in serving,
                "version": one.version,
                "in_flight": one.in_flight,
                "error": one.error,
            }
            for one in self.replicas
        ]

    async def live(self) -> list[Replica]:
        """The servers that can be reached; waits for one.

        Raises:
            RuntimeError: none could be reached for ``down_timeout_s``.
        """
        return await self.wait(lambda: self.replicas.live() or None, "no server has answered")

    async def wait(
        self, find: Callable[[], T | None], what: str, *, patient: Callable[[], bool] = bool
    ) -> T:
        """Wait until ``find`` returns something other than None, and return it.

        Raises:
            RuntimeError: it did not for ``down_timeout_s``, not counting while ``patient()``.
        """
        timeout_s = self.settings.down_timeout_s
        deadline = time.monotonic() + timeout_s
        while (found := find()) is None:
            if patient():
                deadline = time.monotonic() + timeout_s
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise RuntimeError(
                    f"{what} for {timeout_s:g} s: {self.replicas.describe()}"
                ) from None
        return found

    @contextlib.asynccontextmanager
    async def holding(self, replica: Replica) -> AsyncIterator[None]:
        """Count a request of the replica; TimeoutError in the body when the replica is lost."""
        scopes = self._scopes.setdefault(replica, set())
        replica.in_flight += 1
        try:
            async with asyncio.timeout(None) as scope:
                scopes.add(scope)
                yield
        finally:
            replica.in_flight -= 1
            scopes.discard(scope)
