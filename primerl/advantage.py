"""Advantages: how much better a rollout did than its group.

An estimator is a function of a ``Group`` that returns one value per rollout, or per-token values;
``assign`` turns groups and an estimator into training samples:

    samples = advantage.assign(groups, advantage.centered)
    samples = advantage.assign(groups, lambda group: group.rewards - 0.5)

Estimators that need only the rewards are written on ``rewards[g]`` and lifted with ``of_rewards``,
so that they can be tested on a bare array: ``centered(np.array([1.0, 0.0]))``.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
from jaxtyping import Float64

from primerl.types import Group, Sample, TrainingSample

__all__ = ["assign", "centered", "of_rewards"]

Rewards = Float64[np.ndarray, " g"]


def of_rewards(fn: Callable[[Rewards], Rewards]) -> Callable[[Group | Any], Rewards]:
    """Lift a function of ``rewards[g]`` to one of a ``Group``; bare arrays still work."""

    @functools.wraps(fn)
    def estimator(group: Group | Any) -> Rewards:
        rewards = group.rewards if isinstance(group, Group) else group
        return fn(np.asarray(rewards, dtype=np.float64))

    return estimator


@of_rewards
def centered(rewards: Rewards) -> Rewards:
    """The reward minus the group's mean: ``A_i = R_i - mean(R)``.

    Without division by the standard deviation, which would weigh tasks by their difficulty
    (Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    advantages: np.ndarray = rewards - rewards.mean()
    return advantages


def assign(
    groups: Iterable[Group], estimator: Callable[[Group], Sequence[Any] | np.ndarray]
) -> list[TrainingSample]:
    """Give every sequence its advantages; sequences without a token to train are left out.

    Args:
        groups: finished groups.
        estimator: called with each group; returns one entry per rollout. A number goes to all of
            the rollout's trained tokens; a sequence holds one array ``[t]`` per sample.

    Raises:
        ValueError: the estimator returned another number of entries, or a value is not finite.
    """
    samples: list[TrainingSample] = []
    for group in groups:
        values = estimator(group)
        if len(values) != len(group.rollouts):
            raise ValueError(
                f"{_name(estimator)} returned {len(values)} values for the {len(group.rollouts)} "
                f"rollouts of task {group.task_id!r}; expected one for each"
            )
        for rollout, value in zip(group.rollouts, values, strict=True):
            per_sample = _per_sample(rollout.samples, value, _name(estimator))
            for sample, advantages in zip(rollout.samples, per_sample, strict=True):
                if sample.loss_mask.any():
                    samples.append(_training_sample(sample, advantages))
    return samples


def _per_sample(samples: tuple[Sample, ...], value: Any, name: str) -> Sequence[Any]:
    if np.ndim(value) == 0 and not isinstance(value, Sequence):
        return [float(value)] * len(samples)
    if len(value) != len(samples):
        raise ValueError(
            f"{name} returned {len(value)} arrays for a rollout of {len(samples)} samples; "
            "expected a number, or one array [t] per sample"
        )
    return value  # type: ignore[no-any-return]


def _training_sample(sample: Sample, advantages: Any) -> TrainingSample:
    fields = attrs.asdict(sample, recurse=False)
    per_token = np.broadcast_to(np.asarray(advantages, np.float32), sample.loss_mask.shape)
    return TrainingSample(**fields, advantages=np.where(sample.loss_mask, per_token, 0.0))


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))
