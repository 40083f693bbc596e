"""The buffer between rollouts and training: finished groups, oldest version first."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from primerl.rollout.collection.proofs import UNPROVEN, Proofs
from primerl.rollout.collection.recording import decode_group, encode_group
from primerl.rollout.collection.staleness import may_start, oldest_version
from primerl.rollout.errors import summary
from primerl.types import Group, PolicyVersion, Rollout, Sample

STALE = "stale"
"""The name under which ``take`` counts groups that are too old."""

FUTURE = "future"
"""The name under which ``take`` counts groups sampled by weights newer than the trainer's."""

ON_STALE = ("drop", "wait", "mask_tokens")

_Entry: TypeAlias = tuple[PolicyVersion, int, Group, frozenset[PolicyVersion]]
"""A finished group: its oldest version to train, when it came, itself, and all versions that
sampled it."""


class Buffer:
    """Holds finished groups, bounds their staleness, and accounts for every group ever started.

    Always ``started == trained + sum(dropped.values()) + in_flight + buffered``.

    What is too old for a step, ``on_stale`` says:

    - ``"drop"``: a group with any token beyond the bound is dropped as ``"stale"``.
    - ``"wait"``: a step waits for stragglers while the groups that it would leave behind could
      not all be trained before they are too old, ``groups_per_step`` at each step to come.
      Admission bounds their number, so waiting always helps, and none is dropped.
    - ``"mask_tokens"``: tokens beyond the bound leave the loss mask and the rest is trained; a
      group of which nothing remains is dropped as ``"stale"``.

    ``start`` comes before a group is sampled; then each started group ends exactly once, by
    ``put`` or ``drop``.

        buffer = Buffer(groups_per_step=8, max_staleness=2)
        while buffer.may_start(served=engine.version):
            buffer.start()
        buffer.put(group)
        groups = buffer.take(version=0)  # None until a whole step is there

    With ``await_proof``, ``take`` gives no group with a token of a version that ``settle`` has not
    named yet: it stays. A group with one of a rejected version is dropped as ``"unproven"``.

    Steps are counted from the first ``take``, so a run that begins at version 1000 starts no more
    groups than one that begins at 0. ``tokens`` has the sampled tokens of trained groups under
    ``"trained"`` and of dropped ones under their reason; ``masked_tokens`` those that were masked.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        keep: Sequence[Callable[[Group], bool]] = (),
        on_stale: str = "drop",
        await_proof: bool = False,
    ) -> None:
        if on_stale not in ON_STALE:
            raise ValueError(f"on_stale={on_stale!r}; expected one of {', '.join(ON_STALE)}")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.first_version: PolicyVersion | None = None
        self.started = 0
        self.trained = 0
        self.masked_tokens = 0
        self.dropped: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._keep = tuple(keep)
        self.filters = [getattr(keeps, "__name__", repr(keeps)) for keeps in keep]
        self.proofs = Proofs(required=await_proof)
        self._finished: list[_Entry] = []
        self._reserved: list[_Entry] = []
        self._arrivals = 0

    @property
    def buffered(self) -> int:
        """Finished groups that wait to be trained, with those that are reserved."""
        return len(self._finished) + len(self._reserved)

    @property
    def ready(self) -> int:
        """Finished groups that wait for no proof; after a ``take``, those that its step can use."""
        return sum(not self.proofs.awaited(versions) for *_, versions in self._finished)

    @property
    def awaited(self) -> dict[PolicyVersion, int]:
        """Versions that are not settled, with the number of finished groups that wait for each."""
        found: Counter[PolicyVersion] = Counter()
        for *_, versions in self._finished:
            found.update(self.proofs.awaited(versions))
        return dict(sorted(found.items()))

    @property
    def in_flight(self) -> int:
        """Started groups that have not ended."""
        return self.started - self.trained - self.dropped.total() - self.buffered

    def may_start(self, *, served: int) -> bool:
        """Whether a group may be started while engines serve version ``served``."""
        return may_start(
            started=self.started,
            dropped=self.dropped.total(),
            served=0 if self.first_version is None else served - self.first_version,
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

        Raises:
            RuntimeError: a filter raised; the message names it.
        """
        self._require_in_flight()
        if oldest_version(group) is None:
            self.drop("empty")
            return False
        if self.proofs.rejected(self.proofs.versions_of(group)):
            self.drop(UNPROVEN, tokens=len(group.versions))
            return False
        for name, keeps in zip(self.filters, self._keep, strict=True):
            try:
                kept = keeps(group)
            except Exception as error:  # a stranger's function may raise anything
                raise RuntimeError(f"the filter {name!r} raised {summary(error)}") from error
            if not kept:
                self.drop(name, tokens=len(group.versions))
                return False
        self._store(group)
        return True

    def drop(self, reason: str, *, tokens: int = 0) -> None:
        """Account for a started group that will never be stored, and for what it had sampled."""
        self._require_in_flight()
        self.dropped[reason] += 1
        self.tokens[reason] += tokens

    def settle(self, version: PolicyVersion, *, proven: bool) -> None:
        """Say what was found of a version; what a rejected one has sampled is dropped.

        Raises:
            ValueError: the buffer awaits no proof.
        """
        self.proofs.settle(version, proven=proven)
        if not proven:
            self._sift(lambda entry: version not in entry[3], UNPROVEN)

    def take(
        self, version: PolicyVersion, *, in_flight: Iterable[PolicyVersion] = ()
    ) -> list[Group] | None:
        """The groups of one step, oldest version first; None while there are too few.

        No token to be trained in them is older than ``version - max_staleness``. ``in_flight``
        has the oldest version that each group in flight may have sampled with; it matters for
        ``on_stale="wait"``.
        """
        groups = self.reserve(version, in_flight=in_flight)
        self.deliver()
        return groups

    def reserve(
        self, version: PolicyVersion, *, in_flight: Iterable[PolicyVersion] = ()
    ) -> list[Group] | None:
        """As ``take``, but the groups stay buffered until ``deliver`` counts them as trained.

        For a consumer that they may fail to reach: ``give_back`` puts them back, as does the next
        ``reserve``.
        """
        self.give_back()
        if self.first_version is None:
            self.first_version = version
        oldest = version - self.max_staleness
        self._drop_future(version)
        while self._finished and self._finished[0][0] < oldest:
            _, _, group, versions = heapq.heappop(self._finished)
            if self.on_stale == "mask_tokens":
                self._masked(group, oldest, versions)
            else:
                self._stale(group)
        ready = [one for one in sorted(self._finished) if not self.proofs.awaited(one[3])]
        step = ready[: self.groups_per_step]
        if len(step) < self.groups_per_step:
            return None
        chosen = {arrival for _, arrival, *_ in step}
        left = [one for one in self._finished if one[1] not in chosen]
        if self.on_stale == "wait" and self._must_wait(version, left, in_flight):
            return None
        self._finished, self._reserved = left, step
        heapq.heapify(self._finished)
        return [group for _, _, group, _ in step]

    def deliver(self) -> None:
        """Count what was reserved as trained: it has arrived where it is trained."""
        self.trained += len(self._reserved)
        self.tokens["trained"] += sum(len(group.versions) for _, _, group, _ in self._reserved)
        self._reserved = []

    def give_back(self) -> None:
        """Put what was reserved back: it did not arrive."""
        reserved, self._reserved = self._reserved, []
        for entry in reserved:
            heapq.heappush(self._finished, entry)
        if reserved:  # a version may have been rejected meanwhile
            self._sift(lambda entry: not self.proofs.rejected(entry[3]), UNPROVEN)

    def state(self) -> dict[str, Any]:
        """The counts and the finished groups, as builtins and bytes."""
        return {
            "first_version": self.first_version,
            "groups_per_step": self.groups_per_step,
            "started": self.started,
            "trained": self.trained,
            "masked_tokens": self.masked_tokens,
            "dropped": dict(self.dropped),
            "tokens": dict(self.tokens),
            "groups": [
                encode_group(group) for _, _, group, _ in sorted(self._finished + self._reserved)
            ],
            "proofs": self.proofs.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Groups that were in flight then are to be started again.

        Raises:
            ValueError: the state was taken with another ``groups_per_step``.
        """
        if state["groups_per_step"] != self.groups_per_step:
            raise ValueError(
                f"the state was taken with groups_per_step={state['groups_per_step']}, not "
                f"{self.groups_per_step}: steps of another size can't continue its count; resume "
                "without the worker's state"
            )
        self.first_version = state["first_version"]
        self.trained = state["trained"]
        self.masked_tokens = state["masked_tokens"]
        self.dropped = Counter(state["dropped"])
        self.tokens = Counter(state["tokens"])
        self._finished.clear()
        self._reserved.clear()
        if "proofs" in state:
            self.proofs.restore(state["proofs"])
        for content in state["groups"]:
            self._store(decode_group(content))
        self.started = self.trained + self.dropped.total() + self.buffered

    def _must_wait(
        self,
        version: PolicyVersion,
        left: Iterable[_Entry],
        in_flight: Iterable[PolicyVersion],
    ) -> bool:
        """Whether a step now would leave more old groups behind than later steps can train."""
        # What awaits proof may come as late as what is in flight.
        waiting = [(v, int(bool(self.proofs.awaited(found)))) for v, _, _, found in left]
        behind = sorted(waiting + [(v, 1) for v in in_flight])
        expected = 0
        for position, (oldest, flies) in enumerate(behind, start=1):
            expected += flies
            steps_left = oldest + self.max_staleness - version
            if expected and position > steps_left * self.groups_per_step:
                return True
        return False

    def _store(self, group: Group, versions: frozenset[PolicyVersion] | None = None) -> None:
        version = oldest_version(group)
        assert version is not None
        sampled = self.proofs.versions_of(group) if versions is None else versions
        heapq.heappush(self._finished, (version, self._arrivals, group, sampled))
        self._arrivals += 1

    def _drop_future(self, version: PolicyVersion) -> None:
        """Drop groups of weights that are newer than the trainer's: of a run that was set back."""
        self._sift(lambda entry: entry[2].versions.max() <= version, FUTURE)

    def _sift(self, keeps: Callable[[Any], Any], reason: str) -> None:
        """Drop the finished groups that are not to be kept."""
        gone = [one for one in self._finished if not keeps(one)]
        if gone:
            arrivals = {arrival for _, arrival, *_ in gone}
            self._finished = [one for one in self._finished if one[1] not in arrivals]
            heapq.heapify(self._finished)
            for _, _, group, _ in gone:
                self.dropped[reason] += 1
                self.tokens[reason] += len(group.versions)

    def _stale(self, group: Group) -> None:
        self.dropped[STALE] += 1
        self.tokens[STALE] += len(group.versions)

    def _masked(self, group: Group, oldest: int, versions: frozenset[PolicyVersion]) -> None:
        """Put a group back without its tokens that are older than ``oldest``."""
        masked = attrs.evolve(group, rollouts=[_fresh(one, oldest) for one in group.rollouts])
        if oldest_version(masked) is None:
            return self._stale(group)
        self.masked_tokens += len(group.versions) - len(masked.versions)
        self._store(masked, versions)  # a masked token was sampled all the same

    def _require_in_flight(self) -> None:
        if self.in_flight < 1:
            raise ValueError("a group ended that was never started: call start() for each group")


def _fresh(rollout: Rollout, oldest: int) -> Rollout:
    """The rollout with only tokens of ``oldest`` or later to train; emptied samples leave."""
    samples: list[Sample] = []
    for sample in rollout.samples:
        mask = sample.loss_mask & (sample.versions >= oldest)
        if mask.any():
            samples.append(attrs.evolve(sample, loss_mask=np.asarray(mask)))
    return attrs.evolve(rollout, samples=samples)
