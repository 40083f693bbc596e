"""Counts of rollouts, tokens and failures since the start, and the tasks in quarantine."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from primerl.rollout.collection.rollouts import Progress
from primerl.rollout.environments.environment import Task
from primerl.types import Group

MANY_FAILURES = 12  # groups in a row that stop even a run of small steps
_NO_COUNTS = {"groups": 0, "failed": 0, "rollouts": 0, "tokens": 0, "reward_sum": 0.0}


class Counters:
    """Counts what the buffer does not: rollouts, errors, environments, and tasks that fail."""

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
        """The ids of tasks that are not played any more."""
        return [name for name in self._failures if self.is_quarantined(name)]

    @property
    def too_many_failures(self) -> bool:
        """Whether so many groups have failed in a row that the run should stop."""
        return self._failures_in_a_row >= self._too_many

    @property
    def max_skips(self) -> int:
        """How many draws in a row may be of tasks in quarantine before all are taken to be."""
        return 1000 + 2 * len(self._failures)

    def is_quarantined(self, task_id: str) -> bool:
        """Whether a task has failed too often."""
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
        """Count a failed group; returns whether its task is in quarantine from now on."""
        self._failures_in_a_row += 1
        self._failures[task["id"]] += 1
        self.environments[str(task.get("environment", ""))]["failed"] += 1
        return self._failures[task["id"]] == self._quarantine_after

    def stats(self) -> dict[str, Any]:
        """The part of ``Worker.stats`` that is counted here."""
        return {
            "rollout_tokens": self.tokens,
            "retried": self.retried,
            "errors": dict(self.errors),
            "quarantined": len(self.quarantined),
            "skipped": self.skipped,
            "environments": {name: dict(counts) for name, counts in self.environments.items()},
        }

    def state(self) -> dict[str, Any]:
        """All counts, as builtins."""
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
