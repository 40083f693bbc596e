"""Which replica gets a request: which are alive, which version each serves, sessions.

State only, no I/O: the client of the servers reports what it learns.
"""

import bisect
import hashlib
import time
from collections.abc import Collection, Iterable, Iterator

import attrs

from primerl.types import PolicyVersion

OVERLOAD = 1.5  # a session moves when its replica has this many times the least load
SPARE = 4  # plus this many requests
FAILED = "failed"  # the label of a server that failed to load weights


@attrs.define(eq=False)
class Replica:
    """What is known of a server.

    ``version`` is None while its weights are not a known version of this run: its own checkpoint,
    another run's weights, or weights that failed to load.
    """

    url: str
    alive: bool = False
    version: PolicyVersion | None = None
    label: str | None = None
    """The server's own label of its weights."""
    in_flight: int = 0
    error: str = "not reached yet"
    failed: bool = False
    """Whether it failed to load weights, so that its reported version is not trusted."""

    lost_at: float | None = None
    """When it was lost, by the monotonic clock."""

    @property
    def lost_s(self) -> float:
        """Seconds since it was lost; 0 while it is alive."""
        return 0.0 if self.lost_at is None else time.monotonic() - self.lost_at

    def describe(self) -> str:
        """Its state, for messages."""
        if not self.alive:
            return f"{self.url} is down ({self.error})"
        if self.version is None:
            return (
                f"{self.url} is up, but its weights ({self.label!r:.80}) are not this run's: "
                "publish to it, or declare what it holds with adopt(version)"
            )
        return f"{self.url} serves version {self.version}"


class Replicas:
    """The servers of one engine.

    A replica serves when it is alive and has a version of this run that is neither older than the
    second-newest publication nor older than ``version``.

    Args:
        urls: of the servers.
        version: reported until weights are published.
    """

    def __init__(self, urls: Iterable[str], *, version: PolicyVersion = 0) -> None:
        self._by_url: dict[str, Replica] = {}
        self._floor = version
        self._published: list[PolicyVersion] = []
        for url in urls:
            self.join(url)

    # ---- membership ----

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._by_url.values()))

    def get(self, url: str) -> Replica | None:
        """The replica at ``url``, or None."""
        return self._by_url.get(url)

    def join(self, url: str) -> Replica:
        """Add a server; it serves once it is reached and has weights of this run."""
        return self._by_url.setdefault(url, Replica(url))

    def leave(self, url: str) -> None:
        """Remove a server; its requests in flight may finish."""
        self._by_url.pop(url, None)

    # ---- news ----

    def reported(self, replica: Replica, label: str | None, version: PolicyVersion | None) -> bool:
        """A replica reported its weights; returns whether its requests in flight are lost.

        They are if it had weights of this run and now has others.
        """
        replica.alive, replica.error, replica.lost_at = True, "", None
        if version is None and label != FAILED:
            replica.failed = False  # it was restarted
        if version is not None and not replica.failed:
            self.serves(replica, label, version)
            return False
        lost = replica.version is not None
        replica.version, replica.label = None, label
        return lost

    def serves(self, replica: Replica, label: str | None, version: PolicyVersion) -> None:
        """A replica sampled with or reported ``version``; an older, delayed report is ignored."""
        if not replica.failed and (replica.version is None or version >= replica.version):
            replica.version, replica.label = version, label
        self.learn_publication(version)

    def loaded(self, replica: Replica, label: str | None, version: PolicyVersion) -> None:
        """A replica has loaded ``version``."""
        replica.failed = False
        self.serves(replica, label, version)

    def failed(self, replica: Replica) -> bool:
        """A replica failed to load weights; returns whether its requests in flight are lost."""
        lost = replica.version is not None
        replica.failed, replica.version, replica.label = True, None, FAILED
        return lost

    def lost(self, replica: Replica, error: str) -> None:
        """A replica can't be reached; its weights are unknown until it returns."""
        replica.alive, replica.version, replica.label, replica.error = False, None, None, error
        replica.lost_at = replica.lost_at or time.monotonic()

    def learn_publication(self, version: PolicyVersion) -> None:
        """``version`` was published."""
        at = bisect.bisect_left(self._published, version)
        if at == len(self._published) or self._published[at] != version:
            self._published.insert(at, version)
            del self._published[:-2]

    def learn(self, version: PolicyVersion) -> None:
        """Another copy of the engine saw ``version`` served by every replica in use."""
        self._floor = max(self._floor, version)

    # ---- what is served ----

    @property
    def version(self) -> PolicyVersion:
        """The version of the slowest replica that serves; it never decreases."""
        served = [one.version for one in self.serving() if one.version is not None]
        self._floor = max([self._floor, min(served)] if served else [self._floor])
        return self._floor

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest published version that is known."""
        return self._published[-1] if self._published else None

    @property
    def unpublished(self) -> bool:
        """Whether servers are alive and no publication of this run is known."""
        return not self._published and bool(self.live())

    def serving(self) -> list[Replica]:
        """The replicas that are given requests."""
        oldest = max(self._floor, self._published[0] if self._published else self._floor)
        return [
            one for one in self if one.alive and one.version is not None and one.version >= oldest
        ]

    def live(self) -> list[Replica]:
        """The replicas that can be reached."""
        return [one for one in self if one.alive]

    def choose(self, session: str | None = None, *, avoid: Collection[str] = ()) -> Replica | None:
        """The replica for a request: that of its session, or the least loaded; None if none serves.

        A session moves while its replica has much more load than the least loaded.

        Args:
            session: of the conversation.
            avoid: urls that are used only if there is no other.
        """
        serving = self.serving()
        candidates = [one for one in serving if one.url not in avoid] or serving
        if not candidates:
            return None
        least = min(candidates, key=lambda one: one.in_flight)
        if session is None:
            return least
        home = max(candidates, key=lambda one: _weight(session, one.url))
        busy = home.in_flight > least.in_flight * OVERLOAD + SPARE
        return least if busy else home

    def describe(self) -> str:
        """The state of every replica, for messages."""
        return "; ".join(one.describe() for one in self) or "there are no replicas"


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing: the url of greatest weight gets the session, whichever others exist."""
    return hashlib.blake2b(f"{url}\0{session}".encode(), digest_size=8).digest()
