"""The verdict on a run: whether it learns, and what keeps it from learning, by stated bounds."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import attrs

from primerl.track.mismatch_gate import BOUND

RECENT = 10
"""The number of last steps whose median is compared with a bound."""
FEWEST_STEPS = 6
"""The smallest number of steps from which a trend is read."""
TREND = 3.0
"""Smallest change of the reward from the first to the last third of the steps, in standard errors
of that difference."""
BOUNDS = {
    "mismatch_kl": BOUND,  # nats per token; also the bound of MismatchGate
    "off_policy_kl": 0.1,  # nats per token, for tokens of any one staleness
    "effective_sample_size": 0.5,  # a lower bound
    "dropped/stale": 0.5,  # groups per trained group
    "truncated": 0.25,  # share of the rollouts
    "trainer_wait_s": 0.75,  # share of step_s
    "reward_std": 1e-6,  # a lower bound
}
"""The bound of each metric, beyond which a run has a fault; ``docs/runs.md`` explains them."""
OF_EVALUATION = ("step", "evaluation", "evaluation_failed")
"""The metrics of an evaluation. The last one, of the final weights, has no step's metrics."""
LARGEST = 1e100
"""The largest number that is judged; squares and sums of such numbers are finite."""


@attrs.frozen
class RunVerdict:
    """A judgement of a run in one line."""

    name: str
    """``learning``, ``not learning yet``, ``mismatched``, ``stale``, ``truncated`` or
    ``starved``: the worst fault, or else whether the run learns."""
    reason: str
    """The numbers behind the name, with their bounds."""


def verdict(steps: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> RunVerdict:
    """Judge a run by its metrics: its worst fault, or else whether its reward rises.

    Faults are found in medians over the last ``RECENT`` steps that have the metric (of dropped
    groups, which come in bursts, in the mean over the last steps), and the trend in the means of
    the first and the last third of all steps. The noise of the trend is estimated
    from differences of neighboring steps. Supervised runs have no reward: their loss must fall.

    Args:
        steps: the metrics of each step, in order, with those of its evaluation.
        args: the run's arguments, of which ``groups_per_step`` is read.
    """
    trained = [line for line in steps if line.keys() - OF_EVALUATION]
    found = (_mismatched(trained), _stale(trained, args), _truncated(trained), _starved(trained))
    faults = [fault for fault in found if fault is not None]
    trend = _trend(steps)
    if not faults:
        return trend
    others = [f"{one.name}: {one.reason}" for one in (*faults[1:], trend)]
    return RunVerdict(faults[0].name, " Also ".join([faults[0].reason, *others]))


def _mismatched(steps: Sequence[Mapping[str, Any]]) -> RunVerdict | None:
    bound = BOUNDS["mismatch_kl"]
    value = _recent(steps, "mismatch_kl")
    if value is not None and value > bound:
        text = f"mismatch_kl is {value:.2g} nats (bound {bound:g}): sampler and trainer disagree."
        return RunVerdict("mismatched", text)
    alarm = str(steps[-1].get("alarm") or "") if steps else ""
    if "mismatch_kl has risen" in alarm:
        return RunVerdict("mismatched", "mismatch_kl has risen and stays there; see the alarm.")
    return None


def _stale(steps: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> RunVerdict | None:
    share = _recent(steps, "effective_sample_size")
    if share is not None and share < (bound := BOUNDS["effective_sample_size"]):
        text = f"the effective sample size is {share:.2f} (bound {bound:g}): few tokens dominate."
        return RunVerdict("stale", text)
    names = {name for line in steps[-RECENT:] for name in line if name.startswith("off_policy_kl/")}
    found = {name: _recent(steps[-RECENT:], name) for name in names}
    numbers = {name: value for name, value in found.items() if value is not None}
    if numbers:
        name = max(numbers, key=lambda one: numbers[one])
        if numbers[name] > (bound := BOUNDS["off_policy_kl"]):
            text = f"{name} is {numbers[name]:.2g} nats (bound {bound:g}): rollouts are too old."
            return RunVerdict("stale", text)
    trained = _number(args.get("groups_per_step"))
    dropped = [_number(line.get("dropped/stale")) or 0.0 for line in steps[-RECENT:]]
    if trained is None or trained <= 0 or not dropped:
        return None
    ratio = fmean(dropped) / trained
    if ratio > (bound := BOUNDS["dropped/stale"]):
        text = f"{ratio:.2f} groups are dropped as stale per trained group (bound {bound:g})."
        return RunVerdict("stale", text)
    return None


def _truncated(steps: Sequence[Mapping[str, Any]]) -> RunVerdict | None:
    bound = BOUNDS["truncated"]
    share = _recent(steps, "truncated")
    if share is None or share <= bound:
        return None
    text = f"{share:.0%} of the replies are cut at a length limit (bound {bound:.0%})."
    return RunVerdict("truncated", text)


def _starved(steps: Sequence[Mapping[str, Any]]) -> RunVerdict | None:
    bound = BOUNDS["trainer_wait_s"]
    shares = []
    for line in steps:
        waited, step_s = _number(line.get("trainer_wait_s")), _number(line.get("step_s"))
        if waited is not None and step_s:
            shares.append(waited / step_s)
    if not shares or (share := median(shares[-RECENT:])) <= bound:
        return None
    text = f"the trainer waits for rollouts in {share:.0%} of a step's time (bound {bound:.0%})."
    return RunVerdict("starved", text)


def _trend(steps: Sequence[Mapping[str, Any]]) -> RunVerdict:
    """Return whether the reward rises, or in supervised runs, whether the loss falls."""
    name, sign = "reward", 1
    values = _numbers(steps, name)
    if not values and _numbers(steps, "loss"):
        held_out = _numbers(steps, "evaluation_loss")
        name = "evaluation_loss" if len(held_out) >= FEWEST_STEPS else "loss"
        values, sign = _numbers(steps, name), -1
    if len(values) < FEWEST_STEPS:
        text = f"steps with a {name}: {len(values)}; a trend needs {FEWEST_STEPS}."
        return RunVerdict("not learning yet", text)
    third = len(values) // 3
    first, last = fmean(values[:third]), fmean(values[-third:])
    told = f"{name} {first:.3g} → {last:.3g} over {len(values)} steps"
    scores = _numbers(steps, "evaluation")
    if len(scores) > 1:
        told += f", evaluation {scores[0]:.3g} → {scores[-1]:.3g}"
    noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / third)
    if sign * (last - first) > TREND * noise:
        if len(scores) > 2 and scores[-1] <= scores[0]:
            return RunVerdict("not learning yet", f"{told}: only the training reward rises.")
        return RunVerdict("learning", f"{told}.")
    spread = _recent(steps, "reward_std")
    if spread is not None and spread < BOUNDS["reward_std"]:
        return RunVerdict("not learning yet", f"{told}; all rewards of a step are equal.")
    return RunVerdict("not learning yet", f"{told}, which is within the noise, or worse.")


def _recent(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the median of a metric over the last steps that have it; None if none has."""
    values = _numbers(steps, name)[-RECENT:]
    return median(values) if values else None


def _numbers(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = (_number(line.get(name)) for line in steps)
    return [value for value in found if value is not None]


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    """Return whether a value of a damaged or foreign record is a number up to ``LARGEST``."""
    return type(value) in (int, float) and abs(value) <= LARGEST
