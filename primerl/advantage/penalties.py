"""Reward penalties for the cost of a rollout in tokens and turns."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from jaxtyping import Float64

from primerl.advantage.estimators import centered
from primerl.types import NOT_SAMPLED, Group, Rollout


def penalized(
    group: Group,
    *,
    baseline: Callable[[Group], Any] = centered,
    completion_tokens: float = 0.0,
    prompt_tokens: float = 0.0,
    turns: float = 0.0,
) -> Any:
    """The advantages by ``baseline``, after each reward is reduced by the cost of its rollout.

    With c_i, p_i and n_i the completion tokens, prompt tokens and turns of rollout i::

        R_i - max(mean(R), 0) * (completion_tokens * c_i / max(c)
                                 + prompt_tokens * p_i / max(p) + turns * n_i / max(n))

    Completion tokens are those that the policy sampled, prompt tokens are all others (such as a
    tool's reply), and a turn is an unbroken run of sampled tokens. They are counted over all
    samples of the rollout. The penalty is proportional to the mean reward, so that a group that
    failed does not learn to be short.

    Args:
        group: the rollouts that are compared.
        baseline: any estimator. It is called with the group after its rewards are reduced.
        completion_tokens: weight of completion tokens; 0 for no penalty.
        prompt_tokens: weight of prompt tokens; 0 for no penalty.
        turns: weight of turns; 0 for no penalty.

    Raises:
        ValueError: a weight is negative.
    """
    weights = {
        "completion_tokens": completion_tokens,
        "prompt_tokens": prompt_tokens,
        "turns": turns,
    }
    for name, weight in weights.items():
        if not weight >= 0:
            raise ValueError(f"{name} is {weight}, expected a weight >= 0")
    if not group.rollouts:
        return baseline(group)
    rewards = group.rewards
    counts = np.array([_counts(rollout) for rollout in group.rollouts], np.float64)
    shares = counts / np.maximum(counts.max(axis=0), 1)  # avoids 0/0 where all counts are 0
    reduced = rewards - max(float(rewards.mean()), 0.0) * (shares @ np.array([*weights.values()]))
    paid = zip(group.rollouts, reduced.tolist(), strict=True)
    rollouts = [attrs.evolve(rollout, reward=reward) for rollout, reward in paid]
    return baseline(attrs.evolve(group, rollouts=rollouts))


def _counts(rollout: Rollout) -> Float64[np.ndarray, " 3"]:
    """Numbers of completion tokens, prompt tokens and turns of a rollout."""
    counts = np.zeros(3)
    for sample in rollout.samples:
        # Not the loss mask, which leaves out sampled tokens that are too stale to train.
        sampled = sample.versions != NOT_SAMPLED
        starts = sampled & ~np.concatenate([[False], sampled[:-1]])
        counts += [sampled.sum(), (~sampled).sum(), starts.sum()]
    return counts
