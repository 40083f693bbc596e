"""The state of an engine's servers, and the choice of a server for each request.

This module does no I/O. ``Fleet`` and its callers report to it what they learn about the servers.
"""

import bisect
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import attrs

from primerl.rollout.processes.running_clock import running_time
from primerl.serving.client.circuit_breaker import CircuitBreaker
from primerl.serving.client.held_prefixes import HeldPrefixes
from primerl.serving.client.routing import RoutedPlace, RoutedRequest, RoutingPolicy, of_session
from primerl.types import PolicyVersion

Role: TypeAlias = Literal["prefill", "decode"]
"""What a server does: compute prompts for other servers, or answer requests."""

QUIET_S = 5.0  # a server that has not answered a poll for so long gets no requests if others do
IDLE_S = 15.0  # the same for a server that has not worked on its requests for so long
STALLED_S = 60.0  # then others get these requests, too
FAILED = "failed"  # the label of a server that failed to load weights


@attrs.define(eq=False)
class RankState:
    """The requests of one data-parallel rank; for a server that has only one, all its requests."""

    requests: int = 0
    tokens: int = 0
    """The length of the prompts in flight, in all."""
    held: HeldPrefixes = attrs.field(factory=HeldPrefixes)


@attrs.define(eq=False)
class ServerState:
    """The known state of a server.

    ``version`` is None while the server's weights are not a known version of this run: its own
    checkpoint, another run's weights, or weights that failed to load.
    """

    url: str
    role: Role = "decode"
    alive: bool = False
    version: PolicyVersion | None = None
    label: str | None = None
    """The label that the server reports for its weights."""
    in_flight: int = 0
    ranks: list[RankState] | None = None
    """The requests that were sent to each data-parallel rank; None while their number is unknown.
    """
    error: str = "not reached yet"
    failed: bool = False
    """Whether the server failed to load weights, so that its reported version is not trusted."""

    lost_at: float | None = None
    """When the server was lost, by the clock of this process."""

    polled_at: float = -math.inf
    """When the server answered a poll last."""
    worked_at: float = attrs.field(factory=running_time)
    """When the server was last known to work on its requests, or had none."""
    breaker: CircuitBreaker = attrs.field(factory=CircuitBreaker)

    @property
    def lost_s(self) -> float:
        """Seconds since the server was lost; 0 while it is alive."""
        return 0.0 if self.lost_at is None else running_time() - self.lost_at

    @property
    def sound(self) -> bool:
        """Whether the server answers polls, works on its requests and does not fail them."""
        quiet = running_time() - self.polled_at > QUIET_S
        return not quiet and self._idle_s < IDLE_S and self.breaker.allows(self.in_flight)

    @property
    def stalled(self) -> bool:
        """Whether the server has not worked on its requests for so long that others should."""
        on_trial = bool(self.breaker.reason)
        return self._idle_s > (IDLE_S if on_trial else STALLED_S)

    @property
    def _idle_s(self) -> float:
        return running_time() - self.worked_at if self.in_flight else 0.0

    def rank_state(self, rank: int | None) -> RankState | None:
        """Return the state of a rank; None if it is unknown, or the server chooses the rank."""
        ranks = self.ranks or []
        if len(ranks) == 1:
            return ranks[0]
        return ranks[rank] if rank is not None and rank < len(ranks) else None

    def places(self, hashes: Sequence[int]) -> list[RoutedPlace]:
        """Return the server's ranks as places for a prompt whose blocks have these hashes."""
        ranks = self.ranks or [RankState()]
        several = len(ranks) > 1
        return [
            RoutedPlace(
                url=self.url,
                rank=number if several else None,
                requests=rank.requests if several else self.in_flight,
                server_requests=self.in_flight,
                tokens=rank.tokens,
                held=rank.held.tokens(hashes),
            )
            for number, rank in enumerate(ranks)
        ]

    def describe(self) -> str:
        """Describe the server's state, for messages."""
        if not self.alive:
            return f"{self.url} is down ({self.error})"
        if self.version is None:
            return (
                f"{self.url} is up, but its weights ({self.label!r:.80}) are not this run's: "
                "publish weights to it, or declare their version with adopt(version)"
            )
        avoided = f", but is avoided ({self.breaker.reason})" if self.breaker.reason else ""
        return f"{self.url} serves version {self.version}{avoided}"


class KnownServers:
    """The state of all servers of one engine.

    A server is in use while it is alive and has a version of this run that is neither older than
    the second-newest publication nor older than ``version``.

    Args:
        urls: the servers' urls.
        prefill: the urls of servers that compute prompts for them.
        version: the version to report until weights are published.
        routing: the policy by which a request's place is chosen.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        prefill: Iterable[str] = (),
        version: PolicyVersion = 0,
        routing: RoutingPolicy = of_session,
    ) -> None:
        self._routing = routing
        self._by_url: dict[str, ServerState] = {}
        self._floor = version
        self._published: list[PolicyVersion] = []
        for url in urls:
            self.join(url)
        for url in prefill:
            self.join(url, "prefill")

    # ---- membership ----

    def __iter__(self) -> Iterator[ServerState]:
        return iter(list(self._by_url.values()))

    def get(self, url: str) -> ServerState | None:
        """Return the server at ``url``, or None."""
        return self._by_url.get(url)

    def join(self, url: str, role: Role = "decode") -> ServerState:
        """Add a server; it is used once it is reached and has weights of this run."""
        return self._by_url.setdefault(url, ServerState(url, role))

    def leave(self, url: str) -> None:
        """Remove a server; its requests in flight may finish."""
        self._by_url.pop(url, None)

    # ---- news ----

    def reported(
        self, server: ServerState, label: str | None, version: PolicyVersion | None
    ) -> bool:
        """Record a server's report of its weights; return whether its requests in flight are lost.

        They are lost if the server had weights of this run and now has others.
        """
        server.alive, server.error, server.lost_at = True, "", None
        server.polled_at = running_time()
        if version is None and label != FAILED:
            server.failed = False  # the server was restarted
            server.breaker.close()
        if version is not None and not server.failed:
            self.serves(server, label, version)
            return False
        lost = server.version is not None
        server.version, server.label = None, label
        return lost

    def serves(self, server: ServerState, label: str | None, version: PolicyVersion) -> None:
        """Record that a server sampled with or reported ``version``; ignore older, late reports."""
        if not server.failed and (server.version is None or version >= server.version):
            if label != server.label:  # nothing that other weights cached is reused
                for rank in server.ranks or ():
                    rank.held.clear()
            server.version, server.label = version, label
        self.learn_publication(version)

    def loaded(self, server: ServerState, label: str | None, version: PolicyVersion) -> None:
        """Record that a server has loaded ``version``."""
        server.failed = False
        self.serves(server, label, version)

    def failed(self, server: ServerState) -> bool:
        """Record that a server failed to load weights.

        Returns whether its requests in flight are lost.
        """
        lost = server.version is not None
        server.failed, server.version, server.label = True, None, FAILED
        return lost

    def lost(self, server: ServerState, error: str) -> None:
        """Record that a server can't be reached; its weights are unknown until it returns."""
        server.alive, server.version, server.label, server.error = False, None, None, error
        server.ranks = None  # it may return with another number of ranks, and has nothing cached
        server.lost_at = server.lost_at or running_time()

    def learn_publication(self, version: PolicyVersion) -> None:
        """Record that ``version`` was published."""
        at = bisect.bisect_left(self._published, version)
        if at == len(self._published) or self._published[at] != version:
            self._published.insert(at, version)
            del self._published[:-2]

    def learn(self, version: PolicyVersion) -> None:
        """Record ``version``, which another copy of the engine saw on every server in use."""
        self._floor = max(self._floor, version)

    # ---- what is served ----

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that a server in use samples with; it never decreases."""
        sampling = self.in_use("decode")
        served = [one.version for one in sampling if one.version is not None]
        self._floor = max([self._floor, min(served)] if served else [self._floor])
        return self._floor

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest known publication; None before the first."""
        return self._published[-1] if self._published else None

    @property
    def unpublished(self) -> bool:
        """Whether servers are alive but no publication of this run is known."""
        return not self._published and bool(self.live())

    def serving(self) -> list[ServerState]:
        """Return the servers in use: those that requests may be sent to."""
        oldest = max(self._floor, self._published[0] if self._published else self._floor)
        return [
            one for one in self if one.alive and one.version is not None and one.version >= oldest
        ]

    def live(self) -> list[ServerState]:
        """Return the servers that can be reached."""
        return [one for one in self if one.alive]

    def in_use(self, role: Role) -> list[ServerState]:
        """Return the servers in use that have a role."""
        return [one for one in self.serving() if one.role == role]

    def sound(self) -> list[ServerState]:
        """Return the decode servers in use that are sound; all of them if none is."""
        decode = self.in_use("decode")
        return [one for one in decode if one.sound] or decode

    def choose(
        self,
        request: RoutedRequest,
        *,
        hashes: Sequence[int] = (),
        avoid: Collection[str] = (),
    ) -> tuple[ServerState, int | None] | None:
        """Choose a server for a request, and one of its data-parallel ranks.

        Returns None if no server is in use. A server that is not sound is used only if no other is.
        The rank is None if the server has only one, or if it chooses the rank by itself.

        Args:
            request: the request.
            hashes: the hashes of the prompt's blocks, if the policy needs them.
            avoid: urls to use only if there is no other server.

        Raises:
            ValueError: the policy chose a place that is not one of those it was given.
        """
        sound = self.sound()
        candidates = [one for one in sound if one.url not in avoid] or sound
        return self._choose(request, candidates, hashes)

    def choose_prefill(
        self, request: RoutedRequest, *, label: str | None, hashes: Sequence[int] = ()
    ) -> tuple[ServerState, int | None] | None:
        """Choose a prefill server with the weights ``label``, and one of its ranks.

        Returns None if there is none.
        """
        sound = [one for one in self.in_use("prefill") if one.label == label and one.sound]
        return self._choose(request, sound, hashes)

    def prefill_differs(self, label: str | None) -> bool:
        """Return whether a live prefill server has another version of this run than ``label``."""
        return any(
            one.role == "prefill" and one.version is not None and one.label != label
            for one in self.live()
        )

    def _choose(
        self, request: RoutedRequest, candidates: Sequence[ServerState], hashes: Sequence[int]
    ) -> tuple[ServerState, int | None] | None:
        if not candidates:
            return None
        places = [place for one in candidates for place in one.places(hashes)]
        url, rank = self._routing(request, places)
        known = {rank for place in places if place.url == url for rank in (place.rank, None)}
        if rank not in known:
            raise ValueError(
                f"the routing policy chose the server {url!r} and rank {rank!r}, expected the url "
                "and rank of one of its places, or its url and None"
            )
        return self._by_url[url], rank

    def describe(self) -> str:
        """Describe the state of every server, for messages."""
        return "; ".join(one.describe() for one in self) or "the engine has no servers"
