"""An engine's side of its servers: who is alive, and what each serves."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from primerl._vllm_names import GENERATE, HEALTH, MODELS, WEIGHT_INFO
from primerl.rollout.engines.replicas import Replica, Replicas
from primerl.rollout.engines.vllm.client.http import Http, Refused, ServerFailed, Unreachable
from primerl.rollout.engines.vllm.client.members import Members
from primerl.rollout.engines.vllm.protocol import answers
from primerl.rollout.engines.vllm.protocol.labels import Labels
from primerl.rollout.errors import summary
from primerl.types import PolicyVersion

POLL_S = 0.15  # how soon a newly served version is known where no request is in flight
SILENT_S = 30.0  # a server that does not even say that it is healthy for this long is lost

T = TypeVar("T")
log = logging.getLogger(__name__)


class Fleet:
    """The servers of one copy of an engine; all of it lives on one event loop."""

    def __init__(
        self,
        members: Members,
        labels: Labels,
        *,
        api_key: str | None,
        version: PolicyVersion,
        down_timeout_s: float,
    ) -> None:
        self.replicas = Replicas(members.urls, version=version)
        self.labels = labels
        self.version = version
        """Of the slowest replica that serves; read from other threads."""
        self.newest_version = version
        """That any replica is known to have served; read from other threads."""
        self.published: PolicyVersion | None = None
        """The newest that this copy has published, or None where it publishes nothing."""
        self.context_length: int | None = None
        self.unseeded: Callable[[Replica], None] | None = None
        """Called where a replica is up without weights of this run."""
        self._members = members
        self._down_timeout_s = down_timeout_s
        self._changed = asyncio.Event()
        self._confirming = asyncio.Lock()
        self._scopes: dict[Replica, set[asyncio.Timeout]] = {}
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self.http = Http(api_key)

    async def run(self) -> None:
        """Watch the servers until cancelled."""
        try:
            while True:
                self._follow()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._watchers.values():
                task.cancel()
            await self.http.close()

    async def first_look(self) -> None:
        """Ask every server once what it serves."""
        await asyncio.gather(*(self.look(replica) for replica in self.replicas))

    # ---- watching ----

    def _follow(self) -> None:
        """Watch those who joined, and no longer those who left."""
        try:
            if self._members.changed():
                urls = self._members.urls
                for url in urls:
                    self.replicas.join(url)
                for replica in self.replicas:
                    if replica.url not in urls:
                        self.replicas.leave(replica.url)
                        log.info("%s left", replica.url)
        except Exception as error:  # whatever a file can do: the watch goes on
            log.error("the replicas stay as they were: %s", summary(error))
        present = set(self.replicas)
        for replica in present - set(self._watchers):
            self._watchers[replica] = asyncio.create_task(self._watch(replica))
        for replica in set(self._watchers) - present:
            self._watchers.pop(replica).cancel()
        self.tell()

    async def _watch(self, replica: Replica) -> None:
        while True:
            try:
                await self.look(replica)
            except Exception as error:  # nobody else would see it, and the replica would serve on
                if replica.alive:  # once, not at every look
                    log.exception("%s could not be watched", replica.url)
                self.lost(replica, f"it could not be watched: {summary(error)}")
                self._withdraw(replica)
            await asyncio.sleep(POLL_S)

    async def look(self, replica: Replica) -> None:
        """Ask a server what it serves."""
        try:
            label = await self._label(replica)
            if self.context_length is None:
                await self._read_context(replica)
        except (Unreachable, Refused, ServerFailed, RuntimeError, TimeoutError) as error:
            self.lost(replica, str(error) or f"no answer for {SILENT_S:.0f} s")
            # The connections of a host that vanished stay open.
            if isinstance(error, TimeoutError) or replica.lost_s > SILENT_S:
                self._withdraw(replica)
            return
        self.heard(replica, label)
        if replica.version is None and self.unseeded is not None:
            self.unseeded(replica)

    def heard(self, replica: Replica, label: str | None) -> None:
        """A server calls its weights ``label``."""
        if self.replicas.heard(replica, label, self.number(label)):
            self._withdraw(replica)
        self.tell()

    def number(self, label: str | None) -> PolicyVersion | None:
        """The version that a label names; None where it is no version that this run published."""
        version = self.labels.number(label)
        if version is None or self.published is None or version <= self.published:
            return version
        return None

    async def confirm(self, replica: Replica, version: PolicyVersion) -> None:
        """Ask a server what it serves, where one of its answers is newer than all that is known."""
        async with self._confirming:  # the first of many answers asks
            if version > self.newest_version:
                await self.look(replica)

    def failed(self, replica: Replica) -> None:
        """A server failed to load weights: until it has some, what it says does not count."""
        if self.replicas.failed(replica):
            self._withdraw(replica)
        self.tell()

    async def _label(self, replica: Replica) -> str | None:
        # Answered between two steps of the engine, so not while weights are loaded, and refused
        # while its data-parallel ranks have two labels: that server is healthy, and serves what it
        # served.
        try:
            async with asyncio.timeout(SILENT_S):
                content = await self.http.get(replica.url, WEIGHT_INFO)
        except (TimeoutError, ServerFailed):
            async with asyncio.timeout(SILENT_S):
                await self.http.get(replica.url, HEALTH)
            return replica.label
        return answers.decode(answers.weight_infos, content, replica.url).weight_version

    async def _read_context(self, replica: Replica) -> None:
        async with asyncio.timeout(SILENT_S):
            content = await self.http.get(replica.url, MODELS)
        cards = answers.decode(answers.model_cards, content, replica.url).data
        lengths = [card.max_model_len for card in cards]
        self.context_length = min([one for one in lengths if one], default=None)

    def lost(self, replica: Replica, error: str) -> None:
        """A server can't be reached."""
        if replica.alive:
            log.warning("%s is lost: %s", replica.url, error)
        self.replicas.lost(replica, error)
        self.tell()

    def _withdraw(self, replica: Replica) -> None:
        """Send what a replica has in flight to another one."""
        for scope in self._scopes.get(replica, ()):
            scope.reschedule(0)

    def tell(self) -> None:
        """Something is known that was not: wake who waits for a replica."""
        self.version = self.replicas.version
        self.newest_version = max(self.newest_version, self.version, self.replicas.newest or 0)
        self._changed.set()
        self._changed = asyncio.Event()

    def learn(self, version: PolicyVersion) -> None:
        """Another copy saw ``version`` served by every replica in use."""
        self.replicas.learn(version)
        if self.published is not None:
            self.published = max(self.published, version)
        self.tell()

    async def context(self) -> int:
        """The context length, as soon as a server says it.

        Raises:
            RuntimeError: none did for ``down_timeout_s``.
        """
        await self.wait(lambda: self.context_length, "no server has said its context length")
        assert self.context_length is not None
        return self.context_length

    async def report(self) -> list[dict[str, Any]]:
        """Each replica, as it is known."""
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
        """The servers that can be reached, as soon as one can.

        Raises:
            RuntimeError: none could for ``down_timeout_s``.
        """
        return await self.wait(lambda: self.replicas.live() or None, "no server has answered")

    async def wait(
        self, look: Callable[[], T | None], what: str, *, patient: Callable[[], bool] = bool
    ) -> T:
        """What ``look`` finds, as soon as it finds anything.

        Raises:
            RuntimeError: it found nothing for ``down_timeout_s``, in which it was not ``patient``.
        """
        deadline = time.monotonic() + self._down_timeout_s
        while (found := look()) is None:
            if patient():
                deadline = time.monotonic() + self._down_timeout_s
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise RuntimeError(
                    f"{what} for {self._down_timeout_s:g} s: {self.replicas.describe()}"
                ) from None
        return found

    # ---- requests ----

    async def ask(self, replica: Replica, body: bytes, *, max_bytes: int) -> bytes:
        """The answer of one replica to a request of a completion."""
        return await self.http.post(replica.url, GENERATE, body, keep=True, max_bytes=max_bytes)

    @contextlib.asynccontextmanager
    async def holding(self, replica: Replica) -> AsyncIterator[None]:
        """The replica has a request; raises TimeoutError in the body when that is withdrawn."""
        scopes = self._scopes.setdefault(replica, set())
        replica.in_flight += 1
        try:
            async with asyncio.timeout(None) as scope:
                scopes.add(scope)
                yield
        finally:
            replica.in_flight -= 1
            scopes.discard(scope)
