"""Counts of rollouts, tokens and failures; quarantined tasks; and groups that filters refused."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import attrs

from primerl.rollout.collection.groups import Progress
from primerl.rollout.environments.environment import Task
from primerl.types import Group

log = logging.getLogger(__name__)

_WARN_AT_LEAST = 4
_SHOWN = 5


def default_limit(groups_per_step: int) -> int:
    """Return the default of ``max_refused``: how many refused groups in a row stop a run."""
    return max(512, 32 * groups_per_step)


@attrs.define
class Refusals:
    """Groups that filters refused in a row, since the last kept group.

    Args:
        warn_after: log a warning at this many groups in a row: one step's worth.
    """

    warn_after: int
    filters: Counter[str] = attrs.Factory(Counter)
    rewards: Counter[float] = attrs.Factory(Counter)

    def add(self, name: str, group: Group) -> None:
        """Record that the filter ``name`` refused a group."""
        self.filters[name] += 1
        self.rewards.update(group.rewards.tolist())
        if self.in_a_row == max(_WARN_AT_LEAST, self.warn_after):
            log.warning("%s, and nothing is learned; %s", self.describe(), self.describe_rewards())

    @property
    def in_a_row(self) -> int:
        """The number of groups refused in a row."""
        return self.filters.total()

    def describe(self) -> str:
        """Return how many groups were refused, and by which filters."""
        names = ", ".join(f"{name!r} {times}" for name, times in self.filters.most_common())
        return f"filters refused {self.in_a_row} groups in a row ({names})"

    def clear(self) -> None:
        """Start again at 0: a group was kept."""
        self.filters.clear()
        self.rewards.clear()

    def describe_rewards(self) -> str:
        """Return the most frequent rewards of the refused groups' rollouts."""
        most = [f"{reward:g} ({times}x)" for reward, times in self.rewards.most_common(_SHOWN)]
        others = len(self.rewards) - len(most)
        return "rewards: " + ", ".join(most) + (f" and {others} others" if others else "")


MANY_FAILURES = 12  # the fewest failed groups in a row that stop a run
_NO_COUNTS = {"groups": 0, "failed": 0, "rollouts": 0, "tokens": 0, "reward_sum": 0.0}


class Counters:
    """Counts that the buffer does not keep: rollouts, errors, environments and failed tasks."""

    def __init__(self, *, groups_per_step: int, quarantine_after: int) -> None:
        self.tokens = 0
        self.retried = 0
        self.skipped = 0
        self.errors: Counter[str] = Counter()
        self.environments: dict[str, dict[str, float]] = defaultdict(_NO_COUNTS.copy)
        self._quarantine_after = quarantine_after
        self._too_many = max(MANY_FAILURES, 2 * groups_per_step)
        self._failures: Counter[str] = Counter()
        self._failures_in_a_row = 0

    @property
    def quarantined(self) -> list[str]:
        """The ids of tasks that are no longer played."""
        return [name for name in self._failures if self.is_quarantined(name)]

    @property
    def too_many_failures(self) -> bool:
        """Whether so many groups have failed in a row that the run should stop."""
        return self._failures_in_a_row >= self._too_many

    @property
    def max_skips(self) -> int:
        """How many quarantined draws in a row mean that every task is in quarantine."""
        return 1000 + 2 * len(self._failures)

    def is_quarantined(self, task_id: str) -> bool:
        """Return whether a task has failed too often to be played again."""
        return self._failures[task_id] >= self._quarantine_after

    def add_attempts(self, progress: Progress) -> None:
        """Count the retries and errors of a group that has ended."""
        self.retried += progress.retried
        self.errors.update(progress.errors)

    def add_success(self, group: Group) -> None:
        """Count a group that closed with enough rollouts."""
        self._failures_in_a_row = 0
        self._failures.pop(group.task_id, None)
        tokens = len(group.versions)
        self.tokens += tokens
        counts = self.environments[group.environment]
        counts["groups"] += 1
        counts["rollouts"] += len(group.rollouts)
        counts["tokens"] += tokens
        counts["reward_sum"] += float(group.rewards.sum())

    def add_failure(self, task: Task) -> bool:
        """Count a failed group; return whether this puts its task into quarantine."""
        self._failures_in_a_row += 1
        self._failures[task["id"]] += 1
        self.environments[str(task.get("environment", ""))]["failed"] += 1
        return self._failures[task["id"]] == self._quarantine_after

    def stats(self) -> dict[str, Any]:
        """Return these counts as entries of ``Worker.stats``."""
        return {
            "rollout_tokens": self.tokens,
            "retried": self.retried,
            "errors": dict(self.errors),
            "quarantined": len(self.quarantined),
            "skipped": self.skipped,
            "environments": {name: dict(counts) for name, counts in self.environments.items()},
        }

    def state(self) -> dict[str, Any]:
        """Return all counts, as values of built-in types."""
        return {
            "counts": [self.tokens, self.retried, self.skipped],
            "errors": dict(self.errors),
            "environments": {name: dict(counts) for name, counts in self.environments.items()},
            "failures": dict(self._failures),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        self.tokens, self.retried, self.skipped = state["counts"]
        self.errors.update(state["errors"])
        self._failures.update(state["failures"])
        for name, counts in state["environments"].items():
            self.environments[name].update(counts)
