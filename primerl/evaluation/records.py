"""Records of evaluation rollouts, and the scores of a policy computed from them."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl.evaluation.intervals import (
    UNBOUNDED,
    Comparison,
    Interval,
    compare,
    mean_interval,
    pass_at_k,
    share_interval,
    usual_bounds,
)
from primerl.types import Outcome, Rollout

CUT_SHORT = ("length", "context")  # stop reasons of rollouts that ran out of tokens or context


@attrs.frozen(kw_only=True)
class Record:
    """The outcome of one evaluation rollout, in JSON's types.

    A file of records has one per line, and ``primerl.data`` can read it too. ``reward`` is None if
    the rollout ended with an ``error``. ``tokens`` is the number of sampled tokens; ``seconds``
    includes retries. ``messages`` and ``tools`` are those of the rollout's ``conversation``, if it
    has one.
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
        """The reward, or 0 if the rollout ended with an error."""
        return 0.0 if self.reward is None else self.reward

    def passed(self, reward: float) -> bool:
        """Return whether the rollout ended without an error and with at least this reward."""
        return self.reward is not None and self.reward >= reward

    @classmethod
    def of(cls, played: Outcome, *, environment: str = "") -> "Record":
        """Return the record of an ``Outcome``."""
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
        """Parse the record that ``as_line`` returned.

        Raises:
            ValueError: an entry is missing or has the wrong type.
        """
        try:
            return msgspec.convert(dict(line), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{line!r:.80} is not a record of a rollout: {error}") from None

    def as_line(self) -> dict[str, Any]:
        """Return the record as a mapping, in JSON's types."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class Scores:
    """The scores of a policy on one environment.

    ``reward`` is the mean over tasks of each task's mean reward, and ``pass_at[k]`` the mean of
    pass@k. A rollout that ended with an error counts as reward 0 and as not passed; ``errors``
    counts errors by name. The other fields describe rollouts without an error: ``tokens`` and
    ``seconds`` are means, ``truncated`` is the share that ran out of tokens or context, ``stops``
    counts the reasons why they ended, and ``metrics`` has each metric's mean over the rollouts that
    have it.
    """

    environment: str
    tasks: int
    rollouts: int
    reward: Interval
    pass_at: dict[int, Interval]
    tokens: float
    seconds: float
    truncated: float
    stops: dict[str, int]
    errors: dict[str, int]
    metrics: dict[str, float]


def scores(
    records: Iterable[Record],
    *,
    passing_reward: float = 1.0,
    bounds: tuple[float, float] | None = None,
    confidence: float = 0.95,
) -> dict[str, Scores]:
    """Return the scores of a policy on each environment, in the order of first appearance.

    If a rollout was repeated, the last record counts.

    pass@k is given for k of 1, 2, 4 and so on, up to the number of rollouts that every task has.
    The intervals are those of ``share_interval``, or of ``mean_interval`` for rewards without known
    bounds.

    Args:
        records: records of one or more environments.
        passing_reward: the least reward with which a rollout passes.
        bounds: the lowest and the highest possible reward, including the 0 of rollouts with an
            error; by default 0 and 1 if all rewards lie between them, otherwise unknown.
        confidence: the confidence of the intervals.

    Raises:
        ValueError: there are no records, or a reward is not finite or not within the bounds.
    """
    found = _by_environment(records)
    if not found:
        raise ValueError("there are no rollouts to compute scores from")
    return {
        name: _scores(
            name, rollouts, passing_reward=passing_reward, bounds=bounds, confidence=confidence
        )
        for name, rollouts in found.items()
    }


def compare_records(
    first: Iterable[Record],
    second: Iterable[Record],
    *,
    passing_reward: float | None = None,
    bounds: tuple[float, float] | None = None,
    confidence: float = 0.95,
) -> dict[str, Comparison]:
    """Compare two results as pairs (``compare``), by environment, on the tasks that both have.

    Args:
        first: records of one policy.
        second: records of the other policy; differences are second minus first.
        passing_reward: compare the shares of rollouts with at least this reward; by default,
            compare the rewards.
        bounds: the lowest and the highest possible reward, as for ``scores``.
        confidence: the confidence of the intervals.

    Raises:
        ValueError: the results have no task in common, or a reward is not finite or not within the
            bounds.
    """
    values = [_task_values(records, passing_reward) for records in (first, second)]
    bounds = bounds if passing_reward is None else (0.0, 1.0)
    shared = [name for name in values[0] if values[0][name].keys() & values[1].get(name, {}).keys()]
    if not shared:
        raise ValueError("the two results have no task in common, so nothing can be compared")
    return {
        name: _compare_tasks(values[0][name], values[1][name], bounds=bounds, confidence=confidence)
        for name in shared
    }


def _sampled_tokens(rollout: Rollout) -> int:
    if not rollout.samples:  # a chat endpoint only reports how many tokens it sampled
        return int(rollout.metrics.get("completion_tokens", 0))
    return sum(int(sample.loss_mask.sum()) for sample in rollout.samples)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that JSON can hold: the finite ones."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _compare_tasks(
    first: Mapping[str, list[float]],
    second: Mapping[str, list[float]],
    *,
    bounds: tuple[float, float] | None,
    confidence: float,
) -> Comparison:
    tasks = sorted(first.keys() & second.keys())
    results = [[np.array(result[task]) for task in tasks] for result in (first, second)]
    means = [np.array([values.mean() for values in result]) for result in results]
    # The means can lie between 0 and 1 though the values do not.
    bounds = usual_bounds(np.concatenate(results[0] + results[1])) if bounds is None else bounds
    return compare(*means, bounds=bounds, confidence=confidence)


def _task_values(
    records: Iterable[Record], passing_reward: float | None
) -> dict[str, dict[str, list[float]]]:
    """Return each task's scores, or for each of its rollouts whether it passed, by environment."""
    return {
        name: {
            task: [
                float(one.score if passing_reward is None else one.passed(passing_reward))
                for one in rollouts
            ]
            for task, rollouts in _by_task(records).items()
        }
        for name, records in _by_environment(records).items()
    }


def _scores(
    name: str,
    records: Sequence[Record],
    *,
    passing_reward: float,
    bounds: tuple[float, float] | None,
    confidence: float,
) -> Scores:
    tasks = _by_task(records).values()
    rewards = np.array([_mean(rollout.score for rollout in rollouts) for rollouts in tasks])
    passed = np.array(
        [sum(rollout.passed(passing_reward) for rollout in rollouts) for rollouts in tasks]
    )
    samples = np.array([len(rollouts) for rollouts in tasks])
    if bounds is None:
        bounds = usual_bounds(np.array([record.score for record in records], dtype=np.float64))
    ended = [record for record in records if record.error is None]
    return Scores(
        environment=name,
        tasks=len(tasks),
        rollouts=len(records),
        reward=mean_interval(rewards, confidence=confidence)
        if bounds == UNBOUNDED
        else share_interval(rewards, bounds=bounds, confidence=confidence),
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
        if not math.isfinite(record.score):
            raise ValueError(
                f"the reward of rollout {record.index} of task {record.task!r} is {record.reward}; "
                "expected a finite number"
            )
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
    """Return 1, 2, 4 and so on up to ``most``, and ``most`` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return float(np.mean(known)) if known else 0.0
