"""Advantage estimators that need only the rewards of a group."""

import functools
from collections.abc import Callable
from math import comb, sqrt
from typing import Any

import numpy as np
from jaxtyping import Float64

from primerl.types import Group

Rewards = Float64[np.ndarray, " g"]


def of_rewards(fn: Callable[..., Any]) -> Callable[..., Rewards]:
    """Decorate a function of ``rewards[g]`` so that it accepts a ``Group`` or a bare array.

    Hyperparameters are passed by keyword. For a group without rollouts, the result is empty.

    Raises (when the estimator is called):
        ValueError: the rewards are not of shape (g,), or one of them is not finite.
    """

    @functools.wraps(fn)
    def estimator(rewards: Group | Any, **hyperparameters: Any) -> Rewards:
        if isinstance(rewards, Group):
            rewards = rewards.rewards
        rewards = np.asarray(rewards, dtype=np.float64)
        if rewards.ndim != 1:
            raise ValueError(
                f"{name_of(fn)} got rewards of shape {rewards.shape}, expected (g,): "
                "one reward per rollout of a group"
            )
        if not np.isfinite(rewards).all():
            index = int((~np.isfinite(rewards)).argmax())
            raise ValueError(f"rewards[{index}] is {rewards[index]}, expected a finite number")
        if not len(rewards):
            return rewards
        return np.asarray(fn(rewards, **hyperparameters), dtype=np.float64)

    estimator.__name__ = name_of(fn)
    return estimator


def name_of(fn: Callable[..., Any]) -> str:
    """The name of an estimator for errors, such as ``pass_at_k(k=4)`` for a partial function."""
    if isinstance(fn, functools.partial):
        hyperparameters = ", ".join(
            f"{key}={name_of(value) if callable(value) else repr(value)}"
            for key, value in fn.keywords.items()
        )
        return f"{name_of(fn.func)}({hyperparameters})"
    return getattr(fn, "__name__", repr(fn))


@of_rewards
def centered(rewards: Rewards) -> Rewards:
    """The reward minus the group's mean: ``A_i = R_i - mean(R)``.

    It is not divided by the standard deviation, which would weight tasks by their difficulty
    (Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    # The mean of equal rewards may have a rounding error; the mean of zeros has none.
    shifted = rewards - rewards.min()
    advantages: np.ndarray = shifted - shifted.mean()
    return advantages


@of_rewards
def standardized(rewards: Rewards, *, epsilon: float = 1e-6) -> Rewards:
    """The centered reward in standard deviations: ``A_i = (R_i - mean(R)) / (std(R) + epsilon)``.

    ``std`` divides by g. Some implementations divide by g - 1, which makes advantages smaller by
    the factor ``sqrt((g - 1) / g)``. Source: GRPO (arXiv:2402.03300, section 4.1.2).

    Raises:
        ValueError: ``epsilon`` is negative.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}, expected a number >= 0")
    advantages = centered(rewards)
    spread = float(advantages.std()) + epsilon
    return advantages / spread if spread > 0 else advantages


@of_rewards
def leave_one_out(rewards: Rewards) -> Rewards:
    """The reward minus the mean of the others: ``A_i = R_i - sum_{j != i} R_j / (g - 1)``.

    This is ``g / (g - 1)`` times the centered reward, and 0 for a group of one rollout. Source:
    RLOO (arXiv:2402.14740).
    """
    return centered(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


@of_rewards
def max_rl(rewards: Rewards) -> Rewards:
    """The centered reward over the mean: ``A_i = (R_i - mean(R)) / mean(R)``; 0 if the mean is 0.

    With rewards of 0 and 1, the policy gradient is that of the logarithm of the success rate, not
    of the rate itself, so tasks that are rarely solved weigh more. Source: MaxRL
    (arXiv:2602.02710, algorithm 1).

    Raises:
        ValueError: a reward is negative: the mean would not be a success rate, and could be close
            to 0 for any rewards.
    """
    if rewards.min() < 0:
        raise ValueError(
            f"max_rl got a reward of {rewards.min()}, expected rewards >= 0, such as 0 and 1; "
            "shift them, or use centered"
        )
    mean = float(rewards.mean())
    return centered(rewards) / mean if mean > 0 else np.zeros_like(rewards)


@of_rewards
def pass_at_k(rewards: Rewards, *, k: int) -> Rewards:
    """The advantage for pass@k, where k rollouts drawn from the group earn 1 if any is right.

    With g rollouts of which w are wrong (reward 0; the others have reward 1)::

        mean = 1 - C(w, k) / C(g, k)        std = sqrt(mean * (1 - mean))
        A = (1 - mean) / std                                              where right
        A = (1 - mean - C(w - 1, k - 1) / C(g - 1, k - 1)) / std          where wrong

    Both are 0 if every draw earns the same, because fewer than k rollouts are wrong, or all are.
    With k = 1 it is ``standardized`` without epsilon. Source: Pass@k training (arXiv:2508.10751,
    section 2.4).

    Raises:
        ValueError: a reward is neither 0 nor 1, or k is not within 1..g.
    """
    g = len(rewards)
    if not 1 <= k <= g:
        raise ValueError(
            f"pass_at_k got k={k} for a group of {g} rollouts, expected 1 <= k <= {g}; groups that "
            "lost rollouts are smaller: choose k for the smallest group that you accept"
        )
    right = rewards == 1
    if not (right | (rewards == 0)).all():
        other = rewards[~right & (rewards != 0)][0]
        raise ValueError(
            f"pass_at_k got a reward of {other}, expected 0 or 1; compare with a threshold first, "
            "as in of_rewards(lambda rewards: pass_at_k(rewards > 0.5, k=4))"
        )
    w = g - int(right.sum())
    missed = comb(w, k) / comb(g, k)
    if missed in (0.0, 1.0):
        return np.zeros(g)
    std = sqrt(missed * (1 - missed))
    missed_with = comb(w - 1, k - 1) / comb(g - 1, k - 1)  # over draws with a given wrong rollout
    return np.where(right, missed, missed - missed_with) / std
