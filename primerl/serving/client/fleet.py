"""``Fleet``, which polls the servers of an engine for their liveness and versions."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np

from primerl.rollout.errors import summary
from primerl.rollout.processes.running_clock import running_time
from primerl.serving import names
from primerl.serving.client.http import (
    BadResponse,
    Http,
    Refused,
    ServerFailed,
    Unreachable,
)
from primerl.serving.client.server_urls import ServerUrls
from primerl.serving.client.servers import KnownServers, RankState, Role, ServerState
from primerl.serving.client.settings import ConnectionSettings
from primerl.serving.client.stalls import StallDetector
from primerl.serving.protocol import metrics, responses
from primerl.types import PolicyVersion

POLL_S = 0.15  # interval of asking each server for its version
METRICS_BYTES = 1 << 24
SILENT_S = 30.0  # timeout of a poll, after which a server counts as lost

T = TypeVar("T")
log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _InFlight:
    """A request in flight on a server."""

    scope: asyncio.Timeout
    since: float
    """When it was sent, or when the server last answered a request that was sent before it."""
    late: bool = False


class Fleet:
    """The servers of one copy of an engine; used on one event loop only."""

    def __init__(
        self,
        members: ServerUrls,
        settings: ConnectionSettings,
        *,
        version: PolicyVersion,
        prefill: ServerUrls | None = None,
    ) -> None:
        self.settings = settings
        self.labels = settings.labels
        self.servers = KnownServers(
            members.urls,
            prefill=() if prefill is None else prefill.urls,
            version=version,
            routing=settings.routing,
        )
        self.version = version
        """The oldest version that a server in use serves; read from other threads."""
        self.newest_version = version
        """The newest version that any server is known to serve; read from other threads."""
        self.published: PolicyVersion | None = None
        """The newest version that this copy of the engine published; None before the first."""
        self.context_length: int | None = None
        self.on_unseeded: Callable[[ServerState], None] | None = None
        """Called when a server is reachable but has no weights of this run."""
        self._members = members
        self._prefill = prefill
        self.prefills = prefill is not None
        """Whether the fleet may have prefill servers."""
        self._changed = asyncio.Event()
        self._confirming = asyncio.Lock()
        self._sent: dict[ServerState, dict[_InFlight, None]] = {}  # in the order of sending
        self._calls: dict[ServerState, set[asyncio.Timeout]] = {}
        self._watchers: dict[ServerState, asyncio.Task[None]] = {}
        self.http = Http(settings.api_key)

    async def watch(self) -> None:
        """Poll the servers until cancelled."""
        try:
            while True:
                self._follow()
                self._end_late()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._watchers.values():
                task.cancel()
            await self.http.close()

    async def poll_all(self) -> None:
        """Poll every server once."""
        await asyncio.gather(*(self.poll(server) for server in self.servers))

    # ---- watching ----

    def _follow(self) -> None:
        """Start polling servers that joined, and stop polling servers that left."""
        try:
            self._follow_lists()
        except Exception as error:  # whatever is wrong with the file, keep polling
            log.error("the list of servers can't be read and stays as it was: %s", summary(error))
        present = set(self.servers)
        for server in present - set(self._watchers):
            self._watchers[server] = asyncio.create_task(self._watch(server))
        for server in set(self._watchers) - present:
            self._watchers.pop(server).cancel()
        self.tell()

    def _follow_lists(self) -> None:
        lists: list[tuple[ServerUrls | None, Role]]
        lists = [(self._members, "decode"), (self._prefill, "prefill")]
        changed = [(one.urls, role) for one, role in lists if one is not None and one.changed()]
        for urls, role in changed:
            for server in self.servers:
                if server.role == role and server.url not in urls:
                    self.servers.leave(server.url)
                    log.info("%s was removed from the list of servers", server.url)
        for urls, role in changed:  # after all departures: a server may change its role
            for url in urls:
                self.servers.join(url, role)

    async def _watch(self, server: ServerState) -> None:
        detector = StallDetector(self.http, server)
        while True:
            try:
                await self.poll(server)
                await detector.look()
                self._end_stall(server)
            except Exception as error:  # otherwise the server would be used without being polled
                if server.alive:  # log once, not at every poll
                    log.exception("%s could not be polled", server.url)
                self.lost(server, f"it could not be polled: {summary(error)}")
                self._withdraw(server)
            await asyncio.sleep(POLL_S)

    def _end_stall(self, server: ServerState) -> None:
        """Take the requests from a server that does not work on them, if others can."""
        if server.stalled and any(one is not server for one in self.servers.sound()):
            reason = f"it works on none of its {server.in_flight} requests"
            server.breaker.open(reason)
            log.warning("%s loses its requests to other servers: %s", server.url, reason)
            self._withdraw(server)

    async def poll(self, server: ServerState) -> None:
        """Ask a server which weights it serves, and record the answer."""
        try:
            label = await self._label(server)
            if self.context_length is None and server.role == "decode":
                await self._read_context(server)
            if server.ranks is None:
                count = await self._count_ranks(server)
                server.ranks = server.ranks or [RankState() for _ in range(count)]
        except (Unreachable, Refused, ServerFailed, RuntimeError, TimeoutError) as error:
            self.lost(server, str(error) or f"no answer for {SILENT_S:.0f} s")
            # Requests to a host that vanished would hang: their connections stay open.
            if isinstance(error, TimeoutError) or server.lost_s > SILENT_S:
                self._withdraw(server)
                for scope in self._calls.get(server, ()):
                    scope.reschedule(0)
            return
        self.reported(server, label)
        if server.version is None and self.on_unseeded is not None:
            self.on_unseeded(server)

    def reported(self, server: ServerState, label: str | None) -> None:
        """Record the label that a server reported for its weights."""
        if self.servers.reported(server, label, self.number(label)):
            self._withdraw(server)
        self.tell()

    def number(self, label: str | None) -> PolicyVersion | None:
        """Return the policy version that a label names, or None if this run did not publish it."""
        version = self.labels.number(label)
        if version is None or self.published is None or version <= self.published:
            return version
        return None

    async def confirm(self, server: ServerState, version: PolicyVersion) -> None:
        """Poll a server if a response has a version that is newer than all known versions."""
        async with self._confirming:  # of several responses, only the first polls
            if version > self.newest_version:
                await self.poll(server)

    def answered(self, server: ServerState) -> None:
        """Record that a server answered a request as it should."""
        if server.breaker.reason:
            log.warning("%s answers requests again", server.url)
        server.breaker.close()
        server.worked_at = running_time()

    def request_failed(self, server: ServerState, reason: str) -> None:
        """Record that a server failed a request, or answered it wrongly."""
        if open_s := server.breaker.add_failure(reason):
            log.warning(
                "%s gets no requests for %g s, because it failed several in a row: %s",
                server.url,
                open_s,
                reason,
            )

    def failed(self, server: ServerState) -> None:
        """Record that a server failed to load weights; ignore its reports until a load succeeds."""
        if self.servers.failed(server):
            self._withdraw(server)
        self.tell()

    async def _label(self, server: ServerState) -> str | None:
        # vLLM answers between two engine steps, so it does not answer while it loads weights. While
        # its data-parallel ranks have different labels, it answers with an error. If the server is
        # healthy in these cases, keep the label.
        try:
            async with asyncio.timeout(SILENT_S / 2):
                if self.labels.adapter is not None:
                    return await self._adapter_label(server)
                content = await self.http.get(server.url, names.WEIGHT_INFO)
        except (TimeoutError, ServerFailed):
            async with asyncio.timeout(SILENT_S / 2):
                await self.http.get(server.url, names.HEALTH)
            return server.label
        return responses.decode(responses.weight_infos, content, server.url).weight_version

    async def _adapter_label(self, server: ServerState) -> str:
        """Return the label of the newest version of the adapter that a server has loaded."""
        held = [name for name in await self.models(server) if self.number(name) is not None]
        newest = max(held, key=lambda name: self.number(name) or 0, default=None)
        return f"without the adapter {self.labels.adapter!r}" if newest is None else newest

    async def models(self, server: ServerState) -> list[str]:
        """Return the names of a server's model and of the adapters that it has loaded."""
        content = await self.http.get(server.url, names.MODELS)
        cards = responses.decode(responses.model_cards, content, server.url).data
        return [card.id for card in cards]

    def no_routes(self, token_ids: np.ndarray) -> int | None:
        """Return the ``routes_start`` with which a server sends no expert routes of a prompt."""
        return None if self.settings.routes is None else len(token_ids)

    def adapter_of(self, server: ServerState) -> str | None:
        """Return the adapter's name in requests to a server; None for the server's own weights."""
        return None if self.labels.adapter is None else server.label

    async def _read_context(self, server: ServerState) -> None:
        async with asyncio.timeout(SILENT_S):
            content = await self.http.get(server.url, names.MODELS)
        cards = responses.decode(responses.model_cards, content, server.url).data
        lengths = [card.max_model_len for card in cards]
        self.context_length = min([one for one in lengths if one], default=None)

    async def _count_ranks(self, server: ServerState) -> int:
        """Return the number of a server's data-parallel ranks: 1 if it does not report them."""
        try:
            async with asyncio.timeout(SILENT_S):
                page = await self.http.get(server.url, names.METRICS, max_bytes=METRICS_BYTES)
        except (Refused, ServerFailed, BadResponse) as error:
            log.info("%s reports no data-parallel ranks: %s", server.url, error)
            return 1
        return max(1, len(metrics.by_rank(page.decode(errors="replace"))))

    def lost(self, server: ServerState, error: str) -> None:
        """Record that a server can't be reached."""
        if server.alive:
            log.warning("%s is lost: %s", server.url, error)
        self.servers.lost(server, error)
        self.tell()

    def _withdraw(self, server: ServerState) -> None:
        """Cancel the requests in flight on a server, so that they are sent to another one."""
        for request in self._sent.get(server, ()):
            request.scope.reschedule(0)

    def _end_late(self) -> None:
        """End the requests whose time is up."""
        latest = running_time() - self.settings.request_timeout_s
        for sent in self._sent.values():
            for request in sent:
                if request.since < latest:
                    request.late = True
                    request.scope.reschedule(0)

    def tell(self) -> None:
        """Publish the servers' state to other threads, and wake waiting requests."""
        self.version = self.servers.version
        self.newest_version = max(self.newest_version, self.version, self.servers.newest or 0)
        self._changed.set()
        self._changed = asyncio.Event()

    def learn(self, version: PolicyVersion) -> None:
        """Record ``version``, which another copy of the engine saw on every server in use."""
        self.servers.learn(version)
        if self.published is not None:
            self.published = max(self.published, version)
        self.tell()

    async def context(self) -> int:
        """Wait until a server has reported the context length, and return it.

        Raises:
            RuntimeError: no server reported it within ``down_timeout_s``.
        """
        what = "no server has reported its context length"
        return await self.wait(lambda: self.context_length, what)

    async def report(self) -> list[dict[str, Any]]:
        """Return the status of each server."""
        serving = self.servers.serving()
        return [
            {
                "url": one.url,
                "role": one.role,
                "alive": one.alive,
                "serving": one in serving,
                "version": one.version,
                "in_flight": one.in_flight,
                "ranks": len(one.ranks or [0]),
                "failures": one.breaker.failures,
                "error": one.error or one.breaker.reason,
            }
            for one in self.servers
        ]

    async def live(self) -> list[ServerState]:
        """Wait until at least one server can be reached, and return those that can.

        Raises:
            RuntimeError: no server could be reached for ``down_timeout_s``.
        """
        return await self.wait(lambda: self.servers.live() or None, "no server has answered")

    async def wait(
        self, find: Callable[[], T | None], what: str, *, patient: Callable[[], bool] = bool
    ) -> T:
        """Wait until ``find`` returns something other than None, and return it.

        Raises:
            RuntimeError: ``find`` returned None for ``down_timeout_s``, not counting the time in
                which ``patient()`` was true.
        """
        timeout_s = self.settings.down_timeout_s
        deadline = running_time() + timeout_s
        while (found := find()) is None:
            if patient():
                deadline = running_time() + timeout_s
            try:
                async with asyncio.timeout(deadline - running_time()):
                    await self._changed.wait()
            except TimeoutError:
                raise RuntimeError(
                    f"{what} for {timeout_s:g} s: {self.servers.describe()}"
                ) from None
        return found

    @contextlib.asynccontextmanager
    async def until_lost(self, server: ServerState) -> AsyncIterator[None]:
        """Cancel the body if the server falls silent.

        Raises:
            Unreachable: the server fell silent.
        """
        calls = self._calls.setdefault(server, set())
        scope = asyncio.timeout(None)
        try:
            async with scope:
                calls.add(scope)
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise Unreachable(f"{server.url} is lost: {server.error}", sent=True) from error
        finally:
            calls.discard(scope)

    @contextlib.asynccontextmanager
    async def holding(
        self, server: ServerState, rank: int | None, *, tokens: int, hashes: Sequence[int] = ()
    ) -> AsyncIterator[None]:
        """Count a request in flight on a server, and on one of its data-parallel ranks.

        A lost server raises TimeoutError in the body. Time spent behind earlier requests does not
        count as the request's: an overloaded server answers it later.

        Args:
            server: the server.
            rank: the rank; None if the server has only one or chooses it.
            tokens: the length of the prompt.
            hashes: the hashes of the prompt's blocks, which the rank will have cached.

        Raises:
            RuntimeError: the time of the request is up.
        """
        sent = self._sent.setdefault(server, {})
        request = _InFlight(asyncio.timeout(None), running_time())
        state = server.rank_state(rank) or RankState()
        if not server.in_flight:
            server.worked_at = running_time()
        server.in_flight += 1
        state.requests += 1
        state.tokens += tokens
        # vLLM shares a prefix from the moment on that its prefill begins, not when it has ended.
        state.held.add(hashes)
        try:
            async with request.scope:
                sent[request] = None
                yield
            now = running_time()
            later = itertools.dropwhile(lambda one: one is not request, sent)
            for one in later:
                one.since = now
        except TimeoutError:
            if request.late:
                raise RuntimeError(
                    f"a request took longer than {self.settings.request_timeout_s:g} s: "
                    f"{self.servers.describe()}"
                ) from None
            raise
        finally:
            sent.pop(request, None)
            server.in_flight -= 1
            state.requests -= 1
            state.tokens -= tokens
