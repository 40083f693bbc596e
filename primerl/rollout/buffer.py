"""The buffer between rollouts and training: finished groups, oldest version first."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from primerl.rollout.staleness import may_start, oldest_version
from primerl.types import Group, PolicyVersion

STALE = "stale"
"""The name under which ``take`` counts groups that are too old."""


class Buffer:
    """Holds finished groups, bounds their staleness, and accounts for every group ever started.

    Always ``started == trained + sum(dropped.values()) + in_flight + buffered``.

    Not thread-safe: the worker guards it. ``start`` comes before a group is sampled; then each
    started group ends exactly once, by ``put`` or ``drop``.

        buffer = Buffer(groups_per_step=8, max_staleness=2)
        while buffer.may_start(served=engine.version):
            buffer.start()
        buffer.put(group)
        groups = buffer.take(version=0)  # None until a whole step is there
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        keep: Sequence[Callable[[Group], bool]] = (),
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.started = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._keep = tuple(keep)
        self._finished: list[tuple[int, int, Group]] = []
        self._arrivals = 0

    @property
    def buffered(self) -> int:
        """Finished groups that wait to be trained."""
        return len(self._finished)

    @property
    def in_flight(self) -> int:
        """Started groups that have not ended."""
        return self.started - self.trained - self.dropped.total() - self.buffered

    def may_start(self, *, served: int) -> bool:
        """Whether a group may be started while engines serve version ``served``."""
        return may_start(
            started=self.started,
            dropped=self.dropped.total(),
            served=served,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
        )

    def start(self) -> None:
        """Account for a group that is being started."""
        self.started += 1

    def put(self, group: Group) -> bool:
        """Store a finished group, unless a filter refuses it; returns whether it was kept.

        A refused group counts as dropped under the filter's name; one without a token to train,
        as ``"empty"``.
        """
        self._require_in_flight()
        version = oldest_version(group)
        if version is None:
            self.drop("empty")
            return False
        for keeps in self._keep:
            if not keeps(group):
                self.drop(getattr(keeps, "__name__", repr(keeps)))
                return False
        heapq.heappush(self._finished, (version, self._arrivals, group))
        self._arrivals += 1
        return True

    def drop(self, reason: str) -> None:
        """Account for a started group that will never be stored."""
        self._require_in_flight()
        self.dropped[reason] += 1

    def take(self, version: PolicyVersion) -> list[Group] | None:
        """The groups of one step, oldest version first; None while there are too few.

        Groups with a token older than ``version - max_staleness`` are dropped as ``"stale"``
        first, so no returned token exceeds the bound.
        """
        while self._finished and version - self._finished[0][0] > self.max_staleness:
            heapq.heappop(self._finished)
            self.dropped[STALE] += 1
        if len(self._finished) < self.groups_per_step:
            return None
        taken = [heapq.heappop(self._finished)[2] for _ in range(self.groups_per_step)]
        self.trained += len(taken)
        return taken

    def _require_in_flight(self) -> None:
        if self.in_flight < 1:
            raise ValueError("a group ended that was never started: call start() for each group")
