"""Which of several servers gets a request: who is alive, what each serves, where a session lives.

Plain state, without input or output: whoever talks to the servers says what became of it.
"""

import bisect
import hashlib
import time
from collections.abc import Collection, Iterable, Iterator

import attrs

from primerl.types import PolicyVersion

OVERLOAD = 1.5  # a session leaves its home where that has so much more to do than the least loaded
SPARE = 4  # and at least so many more requests
FAILED = "failed"  # the label of weights that failed to load


@attrs.define(eq=False)
class Replica:
    """A server, as far as it is known.

    ``version`` is None while it serves weights of which nothing is known: its own checkpoint,
    another run's, or some that failed to load.
    """

    url: str
    alive: bool = False
    version: PolicyVersion | None = None
    label: str | None = None
    """What the server itself calls its weights."""
    in_flight: int = 0
    error: str = "not reached yet"
    failed: bool = False
    """Whether it failed to load weights, so that whatever it says it serves is not to be used."""

    lost_at: float | None = None
    """Since when it can't be reached, by the monotonic clock."""

    @property
    def lost_s(self) -> float:
        """For how long it can't be reached."""
        return 0.0 if self.lost_at is None else time.monotonic() - self.lost_at

    def describe(self) -> str:
        """Why it serves, or does not."""
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

    A replica serves when it is alive, holds a version of this run, and is not a laggard: older
    than the publication before the newest, or than a version that was reported as served.

    Args:
        urls: of the servers.
        version: reported until something was published.
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
        """The replica at ``url``, unless it left."""
        return self._by_url.get(url)

    def join(self, url: str) -> Replica:
        """Add a server; it serves once it was reached and holds weights of this run."""
        return self._by_url.setdefault(url, Replica(url))

    def leave(self, url: str) -> None:
        """Give a server no more requests; those that it has may end."""
        self._by_url.pop(url, None)

    # ---- news ----

    def heard(self, replica: Replica, label: str | None, version: PolicyVersion | None) -> bool:
        """A replica said what it serves; returns whether requests in flight there are lost.

        They are where it held weights of this run and now holds something else.
        """
        replica.alive, replica.error, replica.lost_at = True, "", None
        if version is None and label != FAILED:
            replica.failed = False  # it was started anew
        if version is not None and not replica.failed:
            self.serves(replica, label, version)
            return False
        lost = replica.version is not None
        replica.version, replica.label = None, label
        return lost

    def serves(self, replica: Replica, label: str | None, version: PolicyVersion) -> None:
        """A replica sampled with, or says it has, ``version``; news may overtake each other."""
        if not replica.failed and (replica.version is None or version >= replica.version):
            replica.version, replica.label = version, label
        self.learn_publication(version)

    def took(self, replica: Replica, label: str | None, version: PolicyVersion) -> None:
        """A replica was given ``version``, whatever it held before."""
        replica.failed = False
        self.serves(replica, label, version)

    def failed(self, replica: Replica) -> bool:
        """A replica failed to load weights; returns whether requests in flight there are lost."""
        lost = replica.version is not None
        replica.failed, replica.version, replica.label = True, None, FAILED
        return lost

    def lost(self, replica: Replica, error: str) -> None:
        """A replica can't be reached; what it holds when it returns is to be asked again."""
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
        """The version of the slowest replica that serves; it never goes back."""
        served = [one.version for one in self.serving() if one.version is not None]
        self._floor = max([self._floor, min(served)] if served else [self._floor])
        return self._floor

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest version that was published, as far as is known."""
        return self._published[-1] if self._published else None

    @property
    def unpublished(self) -> bool:
        """Whether servers are there, and nothing of this run was published to them so far."""
        return not self._published and bool(self.live())

    def serving(self) -> list[Replica]:
        """The replicas that are given requests."""
        oldest = max(self._floor, self._published[0] if self._published else self._floor)
        return [
            one for one in self if one.alive and one.version is not None and one.version >= oldest
        ]

    def live(self) -> list[Replica]:
        """The replicas that can be reached, whatever they serve."""
        return [one for one in self if one.alive]

    def choose(self, session: str | None = None, *, avoid: Collection[str] = ()) -> Replica | None:
        """The replica for a request: its session's home, or the one with least to do.

        A home that has far more to do than the least loaded is left. None where none serves.

        Args:
            session: a conversation.
            avoid: urls that are taken only where there is no other.
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
        """Every replica and why it serves, or does not."""
        return "; ".join(one.describe() for one in self) or "there are no replicas"


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing: who has the greatest weight is home, whoever else joins or leaves."""
    return hashlib.blake2b(f"{url}\0{session}".encode(), digest_size=8).digest()
