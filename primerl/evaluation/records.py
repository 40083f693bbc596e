"""Plays as records, and what they say about a policy."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl.evaluation.intervals import (
    Comparison,
    Interval,
    compare,
    mean_interval,
    pass_at_k,
    share_interval,
)
from primerl.types import Played, Rollout

CUT_SHORT = ("length", "context")  # how plays end that had no room for more


@attrs.frozen(kw_only=True)
class Record:
    """How one play ended, in JSON's types: a line of a file that ``primerl.data`` reads, too.

    ``reward`` is None where the play ended with an ``error``. ``tokens`` were sampled, and
    ``seconds`` include retries. ``messages`` and ``tools`` are the rollout's ``conversation``, if
    it has one.
    """

    environment: str
    task: str
    index: int
    reward: float | None
    tokens: int
    seconds: float
    stop: str | None
    metrics: dict[str, float] = attrs.Factory(dict)
    error: str | None = None
    message: str | None = None
    messages: list[dict[str, Any]] = attrs.Factory(list)
    tools: list[dict[str, Any]] | None = None

    @property
    def score(self) -> float:
        """The reward; 0 where the play ended with an error."""
        return 0.0 if self.reward is None else self.reward

    def passed(self, reward: float) -> bool:
        """Whether the play ended with at least this reward."""
        return self.reward is not None and self.reward >= reward

    @classmethod
    def of(cls, played: Played, *, environment: str = "") -> "Record":
        """The record of a play."""
        rollout = played.rollout
        conversation = (rollout.conversation if rollout is not None else None) or {}
        return cls(
            environment=environment,
            task=str(played.task.get("id", "")),
            index=played.index,
            reward=None if rollout is None else rollout.reward,
            tokens=0 if rollout is None else _sampled_tokens(rollout),
            seconds=round(played.seconds, 3),
            stop=None if rollout is None else rollout.stop,
            metrics={} if rollout is None else _finite(rollout.metrics),
            error=played.error,
            message=played.message,
            messages=list(conversation.get("messages", ())),
            tools=conversation.get("tools"),
        )

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> "Record":
        """The record that ``as_line`` wrote.

        Raises:
            ValueError: an entry is missing, or is not what it should be.
        """
        try:
            return msgspec.convert(dict(line), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{line!r:.80} is no record of a play: {error}") from None

    def as_line(self) -> dict[str, Any]:
        """The record as a mapping, in JSON's types."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class Scores:
    """What a policy scored on one environment.

    ``reward`` is the mean over tasks of each task's mean, and ``pass_at[k]`` that of pass@k. A play
    that ended with an error counts as a reward of 0 and as not passed; ``errors`` counts them by
    name. ``tokens`` and ``seconds`` are means over the other plays, ``truncated`` is the share of
    those that tokens or context cut short, ``stops`` says how they ended, and ``metrics`` are means
    over those that have them.
    """

    environment: str
    tasks: int
    plays: int
    reward: Interval
    pass_at: dict[int, Interval]
    tokens: float
    seconds: float
    truncated: float
    stops: dict[str, int]
    errors: dict[str, int]
    metrics: dict[str, float]


def scores(
    records: Iterable[Record], *, passing_reward: float = 1.0, confidence: float = 0.95
) -> dict[str, Scores]:
    """What a policy scored, by environment, in the order in which they come.

    Where a play was repeated, the last one counts.

    pass@k is given for k of 1, 2, 4 and so on up to the number of plays that every task has. The
    intervals are those of ``share_interval``, and of ``mean_interval`` for rewards that are not all
    between 0 and 1.

    Args:
        records: of any number of environments.
        passing_reward: the least reward with which a play has passed.
        confidence: of the intervals.

    Raises:
        ValueError: there are no records.
    """
    found = _by_environment(records)
    if not found:
        raise ValueError("there are no plays to make scores of")
    return {
        name: _scores(name, plays, passing_reward=passing_reward, confidence=confidence)
        for name, plays in found.items()
    }


def compare_records(
    first: Iterable[Record],
    second: Iterable[Record],
    *,
    passing_reward: float | None = None,
    confidence: float = 0.95,
) -> dict[str, Comparison]:
    """A paired comparison (``compare``) of two results, by environment, on the tasks of both.

    Args:
        first: of the one policy.
        second: of the other: differences are second minus first.
        passing_reward: compares the shares of plays with at least this reward; by default the
            rewards.
        confidence: of the intervals.

    Raises:
        ValueError: they have no task in common.
    """
    values = [_task_means(records, passing_reward) for records in (first, second)]
    shared = [name for name in values[0] if values[0][name].keys() & values[1].get(name, {}).keys()]
    if not shared:
        raise ValueError("the two results have no task in common, so nothing can be compared")
    return {
        name: _compare_tasks(values[0][name], values[1][name], confidence=confidence)
        for name in shared
    }


def _sampled_tokens(rollout: Rollout) -> int:
    if not rollout.samples:  # an endpoint that takes messages says how many tokens it sampled
        return int(rollout.metrics.get("completion_tokens", 0))
    return sum(int(sample.loss_mask.sum()) for sample in rollout.samples)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers that JSON has."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _compare_tasks(
    first: Mapping[str, float], second: Mapping[str, float], *, confidence: float
) -> Comparison:
    tasks = sorted(first.keys() & second.keys())
    return compare(
        np.array([first[task] for task in tasks]),
        np.array([second[task] for task in tasks]),
        confidence=confidence,
    )


def _task_means(
    records: Iterable[Record], passing_reward: float | None
) -> dict[str, dict[str, float]]:
    """What is compared of each task, by environment."""
    return {
        name: {
            task: _mean(
                one.score if passing_reward is None else one.passed(passing_reward) for one in plays
            )
            for task, plays in _by_task(records).items()
        }
        for name, records in _by_environment(records).items()
    }


def _scores(
    name: str, records: Sequence[Record], *, passing_reward: float, confidence: float
) -> Scores:
    tasks = _by_task(records).values()
    rewards = np.array([_mean(play.score for play in plays) for plays in tasks])
    passed = np.array([sum(play.passed(passing_reward) for play in plays) for plays in tasks])
    samples = np.array([len(plays) for plays in tasks])
    bounded = all(0 <= record.score <= 1 for record in records)
    interval = share_interval if bounded else mean_interval
    ended = [record for record in records if record.error is None]
    return Scores(
        environment=name,
        tasks=len(tasks),
        plays=len(records),
        reward=interval(rewards, confidence=confidence),
        pass_at={
            k: share_interval(pass_at_k(passed, samples, k=k), confidence=confidence)
            for k in _powers_of_two(int(samples.min()))
        },
        tokens=_mean(record.tokens for record in ended),
        seconds=_mean(record.seconds for record in ended),
        truncated=_mean(record.stop in CUT_SHORT for record in ended),
        stops=dict(Counter(str(record.stop) for record in ended).most_common()),
        errors=dict(Counter(one.error for one in records if one.error is not None).most_common()),
        metrics=_mean_metrics(ended),
    )


def _by_environment(records: Iterable[Record]) -> dict[str, list[Record]]:
    last = {(record.environment, record.task, record.index): record for record in records}
    found: dict[str, list[Record]] = defaultdict(list)
    for record in last.values():
        found[record.environment].append(record)
    return found


def _by_task(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record.task].append(record)
    return found


def _mean_metrics(records: Sequence[Record]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.metrics.items():
            found[name].append(value)
    return {name: _mean(values) for name, values in found.items()}


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on, and ``most`` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return float(np.mean(known)) if known else 0.0
