"""The buffer between rollouts and training, which holds finished groups, oldest version first."""

import bisect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import attrs

from primerl.rollout.collection.counters import Refusals
from primerl.rollout.collection.recording import decode_group, encode_group
from primerl.rollout.collection.staleness import (
    may_start,
    must_wait,
    oldest_version,
    without_stale_tokens,
)
from primerl.rollout.collection.verification import UNVERIFIED, VersionVerification
from primerl.rollout.errors import located
from primerl.types import Group, PolicyVersion

ON_STALE = ("drop", "wait", "mask_tokens")
_BY_AGE = operator.attrgetter("oldest")


@attrs.frozen(eq=False)
class _Finished:
    """A group that waits to be trained."""

    oldest: PolicyVersion
    """The oldest version of its tokens to be trained."""
    group: Group
    versions: frozenset[PolicyVersion]
    """All versions that sampled its tokens, trained or not; empty without verification."""


class Buffer:
    """Holds finished groups, bounds their staleness, and accounts for every group ever started.

    Always ``started == trained + sum(dropped.values()) + in_flight + buffered``.

    ``on_stale`` decides what happens to a group that is too old for a step:

    - ``"drop"``: a group with any token beyond the bound is dropped as ``"stale"``.
    - ``"wait"``: no group is dropped as stale. A step waits for stragglers if the groups that it
      would leave behind could not all be trained in time, at ``groups_per_step`` per later step.
      Admission bounds the number of groups, so waiting always helps.
    - ``"mask_tokens"``: tokens beyond the bound are removed from the loss mask and the rest is
      trained; a group without any token left is dropped as ``"stale"``.

    Call ``start`` before a group is sampled. Each started group then ends exactly once, by ``put``
    or ``drop``.

        buffer = Buffer(groups_per_step=8, max_staleness=2)
        while buffer.may_start(served=engine.version):
            buffer.start()
        buffer.put(group)
        groups = buffer.take(version=0)  # None until there are enough for a step

    With ``await_verification``, or, if it is None, from the first ``mark_version`` on, a group with
    a token of a version that is not marked yet stays buffered: ``take`` does not return it. A group
    with a token of a rejected version is dropped as ``"unverified"``.

    Steps are counted from the first ``take``, so a run that begins at version 1000 starts no more
    groups than a run that begins at 0. ``tokens`` counts the sampled tokens of trained groups under
    ``"trained"`` and those of dropped groups under the reason; ``masked_tokens`` counts the tokens
    that ``"mask_tokens"`` masked. ``on_drop`` is called with each finished group that is dropped.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        keep: Sequence[Callable[[Group], bool]] = (),
        on_stale: Literal["drop", "wait", "mask_tokens"] = "drop",
        await_verification: bool | None = None,
        on_drop: Callable[[Group], None] = lambda _: None,
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
        self._on_drop = on_drop
        self._keep = tuple(keep)
        self.filters = [getattr(keeps, "__name__", repr(keeps)) for keeps in keep]
        self.refusals = Refusals(warn_after=groups_per_step)
        self.verification = VersionVerification(required=await_verification)
        self._finished: list[_Finished] = []  # oldest version first
        self._reserved: list[_Finished] = []

    @property
    def buffered(self) -> int:
        """Finished groups that wait to be trained, including reserved ones."""
        return len(self._finished) + len(self._reserved)

    @property
    def ready(self) -> int:
        """Finished groups without a provisional version; after ``take``, those its step can use."""
        return sum(not self._provisional(one) for one in self._finished)

    @property
    def awaiting_verification(self) -> dict[PolicyVersion, int]:
        """Provisional versions, with the number of finished groups that wait for each."""
        found: Counter[PolicyVersion] = Counter()
        for one in self._finished:
            found.update(self._provisional(one))
        return dict(sorted(found.items()))

    @property
    def in_flight(self) -> int:
        """Started groups that have not ended."""
        return self.started - self.trained - self.dropped.total() - self.buffered

    def may_start(self, *, served: int) -> bool:
        """Return whether a group may be started while engines serve version ``served``."""
        return may_start(
            started=self.started,
            dropped=self.dropped.total(),
            served=0 if self.first_version is None else served - self.first_version,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
        )

    def start(self) -> None:
        """Count a group that is about to start."""
        self.started += 1

    def put(self, group: Group) -> bool:
        """Store a finished group, unless a filter refuses it; return whether it was kept.

        A refused group counts as dropped under the filter's name; a group without a token to train,
        as ``"empty"``.

        Raises:
            RuntimeError: a filter raised; the message names it.
        """
        self._require_in_flight()
        if oldest_version(group) is None:
            self.drop_group("empty", group)
            return False
        sampled = self.verification.versions_of(group)
        if self.verification.any_rejected(sampled):
            self.drop_group(UNVERIFIED, group)
            return False
        for name, keeps in zip(self.filters, self._keep, strict=True):
            try:
                kept = keeps(group)
            except Exception as error:  # user code may raise anything
                raise RuntimeError(f"the filter {name!r} raised {located(error)}") from error
            if not kept:
                self.drop_group(name, group)
                self.refusals.add(name, group)
                return False
        self.refusals.clear()
        self._store(group, sampled)
        return True

    def drop_group(self, reason: str, group: Group) -> None:
        """Count a finished group that will never be trained, and pass it to ``on_drop``."""
        self.drop(reason, tokens=len(group.versions))
        self._on_drop(group)

    def drop(self, reason: str, *, tokens: int = 0) -> None:
        """Count a started group that will never be trained, and its sampled tokens."""
        self._require_in_flight()
        self.dropped[reason] += 1
        self.tokens[reason] += tokens

    def has_rejected_tokens(self, group: Group) -> bool:
        """Return whether a rejected version sampled a token of the group."""
        return self.verification.any_rejected(self.verification.versions_of(group))

    def mark_version(self, version: PolicyVersion, *, verified: bool) -> None:
        """Record whether a version is verified; drop groups with tokens of a rejected version.

        Raises:
            ValueError: the buffer was made with ``await_verification=False``.
        """
        self.verification.mark(version, verified=verified)
        if not verified:
            self._retain(lambda one: version not in one.versions, UNVERIFIED)

    def take(
        self, version: PolicyVersion, *, in_flight: Iterable[PolicyVersion] = ()
    ) -> list[Group] | None:
        """Return the groups of one step, oldest version first; None while there are too few.

        No token to be trained in them is older than ``version - max_staleness``. ``in_flight``
        holds, for each group in flight, the oldest version that may have sampled it; only
        ``on_stale="wait"`` uses it.
        """
        groups = self.reserve(version, in_flight=in_flight)
        self.deliver()
        return groups

    def reserve(
        self, version: PolicyVersion, *, in_flight: Iterable[PolicyVersion] = ()
    ) -> list[Group] | None:
        """Return the groups of one step, as ``take`` does, but keep them buffered.

        Use it if the groups may fail to reach the trainer: ``deliver`` counts them as trained,
        ``give_back`` or the next ``reserve`` puts them back.
        """
        self.give_back()
        if self.first_version is None:
            self.first_version = version
        self._retain(lambda one: one.group.versions.max() <= version, "future")
        self._expire(version - self.max_staleness)
        step = self._step(version, self._finished, in_flight=in_flight)
        if step is None:
            return None
        chosen = set(step)
        self._finished = [one for one in self._finished if one not in chosen]
        self._reserved = step
        return [one.group for one in step]

    def would_fill(
        self, version: PolicyVersion, *, in_flight: Iterable[PolicyVersion] = ()
    ) -> bool:
        """Return whether ``take(version)`` would return groups; nothing changes."""
        oldest = version - self.max_staleness
        usable = []
        for one in self._finished:
            if one.group.versions.max() > version:
                continue
            if one.oldest >= oldest:
                usable.append(one)
            elif (masked := self._masked(one, oldest)) is not None:
                usable.append(masked)
        usable.sort(key=_BY_AGE)
        return self._step(version, usable, in_flight=in_flight) is not None

    def _step(
        self,
        version: PolicyVersion,
        usable: Sequence[_Finished],
        *,
        in_flight: Iterable[PolicyVersion],
    ) -> list[_Finished] | None:
        """Choose the groups of one step among those that it may use; None if it has to wait."""
        ready = [one for one in usable if not self._provisional(one)]
        step = ready[: self.groups_per_step]
        if len(step) < self.groups_per_step:
            return None
        if self.on_stale == "wait":
            chosen = set(step)
            # Groups in flight, and groups that await verification, may become ready late.
            behind = [
                (one.oldest, bool(self._provisional(one))) for one in usable if one not in chosen
            ]
            behind += [(oldest, True) for oldest in in_flight]
            if must_wait(
                behind,
                version=version,
                groups_per_step=self.groups_per_step,
                max_staleness=self.max_staleness,
            ):
                return None
        return step

    def deliver(self) -> None:
        """Count the reserved groups as trained: they have reached the trainer."""
        self.trained += len(self._reserved)
        self.tokens["trained"] += sum(len(one.group.versions) for one in self._reserved)
        self._reserved = []

    def give_back(self) -> None:
        """Put the reserved groups back: they have not reached the trainer."""
        if self._reserved:
            self._finished = sorted(self._reserved + self._finished, key=_BY_AGE)
            self._reserved = []
            # A version may have been rejected meanwhile.
            self._retain(lambda one: not self.verification.any_rejected(one.versions), UNVERIFIED)

    def state(self) -> dict[str, Any]:
        """Return the counts and the finished groups, as values of built-in types."""
        finished = sorted(self._reserved + self._finished, key=_BY_AGE)
        return {
            "first_version": self.first_version,
            "groups_per_step": self.groups_per_step,
            "started": self.started,
            "trained": self.trained,
            "masked_tokens": self.masked_tokens,
            "dropped": dict(self.dropped),
            "tokens": dict(self.tokens),
            "groups": [encode_group(one.group) for one in finished],
            "verification": self.verification.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; groups that were in flight have to be started again.

        Groups with a token of a provisional version are dropped as ``"unverified"``: what engines
        served under it can no longer be checked.

        Raises:
            ValueError: the state was taken with another ``groups_per_step``.
        """
        if state["groups_per_step"] != self.groups_per_step:
            raise ValueError(
                f"the state was taken with groups_per_step={state['groups_per_step']}, not "
                f"{self.groups_per_step}: its count of steps is valid for that size only; resume "
                "without the worker's state"
            )
        self.first_version = state["first_version"]
        self.trained = state["trained"]
        self.masked_tokens = state["masked_tokens"]
        self.dropped = Counter(state["dropped"])
        self.tokens = Counter(state["tokens"])
        self._finished.clear()
        self._reserved.clear()
        self.verification.restore(state["verification"])
        for content in state["groups"]:
            group = decode_group(content)
            versions = self.verification.versions_of(group)
            if self.verification.provisional(versions):
                self.dropped[UNVERIFIED] += 1
                self.tokens[UNVERIFIED] += len(group.versions)
            else:
                self._store(group, versions)
        self.started = self.trained + self.dropped.total() + self.buffered

    def _provisional(self, finished: _Finished) -> set[PolicyVersion]:
        return self.verification.provisional(finished.versions)

    def _store(self, group: Group, versions: frozenset[PolicyVersion]) -> None:
        oldest = oldest_version(group)
        assert oldest is not None
        bisect.insort(self._finished, _Finished(oldest, group, versions), key=_BY_AGE)

    def _expire(self, oldest: PolicyVersion) -> None:
        """Drop or mask groups with tokens of versions before ``oldest``."""
        expired = [one for one in self._finished if one.oldest < oldest]
        self._finished = [one for one in self._finished if one.oldest >= oldest]
        for one in expired:
            masked = self._masked(one, oldest)
            if masked is None:
                self.drop_group("stale", one.group)
            else:
                self.masked_tokens += len(one.group.versions) - len(masked.group.versions)
                bisect.insort(self._finished, masked, key=_BY_AGE)

    def _masked(self, one: _Finished, oldest: PolicyVersion) -> _Finished | None:
        """Return a group without its stale tokens; None if nothing of it may be trained."""
        if self.on_stale != "mask_tokens":
            return None
        masked = without_stale_tokens(one.group, oldest)
        left = None if masked is None else oldest_version(masked)
        if masked is None or left is None:
            return None
        return _Finished(left, masked, one.versions)  # masked tokens still need verification

    def _retain(self, keeps: Callable[[_Finished], Any], reason: str) -> None:
        """Drop the finished groups for which ``keeps`` is false."""
        dropped = [one for one in self._finished if not keeps(one)]
        if dropped:
            gone = set(dropped)
            self._finished = [one for one in self._finished if one not in gone]
            for one in dropped:
                self.drop_group(reason, one.group)

    def _require_in_flight(self) -> None:
        if self.in_flight < 1:
            raise ValueError("a group ended that was never started; call start() before each group")
