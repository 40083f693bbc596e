"""From groups and an estimator to training samples."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.advantage.estimators import name_of, standardized
from primerl.types import Group, Sample, TrainingSample

LARGEST = float(np.finfo(np.float32).max)


def assign(
    groups: Iterable[Group], estimator: Callable[[Group], Sequence[Any] | np.ndarray]
) -> list[TrainingSample]:
    """Give every sequence its advantages; sequences without a token to be trained are left out.

    The reward of a rollout without such a token still counts in its group.

    Args:
        groups: finished groups; the estimator is called once for each, in order.
        estimator: called with each group; returns one entry per rollout. A number goes to all of
            the rollout's trained tokens; a sequence holds one array ``[t]`` or number per sample.

    Raises:
        ValueError: the estimator returned another number of entries, an array of another length,
            or a value for a trained token that is not finite in float32. The message names the
            estimator and the task.
    """
    samples: list[TrainingSample] = []
    for group in groups:
        values = estimator(group)
        said = f"for task {group.task_id!r}, {name_of(estimator)} returned"
        if len(values) != len(group.rollouts):
            raise ValueError(
                f"{said} {len(values)} values for {len(group.rollouts)} rollouts; "
                "expected one for each"
            )
        for rollout, value in zip(group.rollouts, values, strict=True):
            per_sample = _per_sample(rollout.samples, value, said)
            for sample, advantages in zip(rollout.samples, per_sample, strict=True):
                if sample.loss_mask.any():
                    samples.append(_training_sample(sample, advantages, said))
    return samples


def whitened(samples: Iterable[TrainingSample], *, epsilon: float = 1e-8) -> list[TrainingSample]:
    """The samples with advantages of mean 0 and standard deviation 1 over all trained tokens.

    ``A = (A - mean(A)) / (std(A) + epsilon)`` over the tokens of the whole batch, so call it
    before the batch is divided. Equal advantages become 0. After ``assign`` with the rewards
    themselves it is the normalization of REINFORCE++, after ``centered`` that of
    REINFORCE++-baseline (arXiv:2501.03262).

    Raises:
        ValueError: ``epsilon`` is negative.
    """
    batch = list(samples)
    trained = [sample.advantages[sample.loss_mask] for sample in batch]
    tokens = standardized(np.concatenate([np.zeros(0), *trained]), epsilon=epsilon)
    ends = np.cumsum([0, *map(len, trained)])
    result: list[TrainingSample] = []
    for sample, start, end in zip(batch, ends, ends[1:], strict=False):
        advantages = np.zeros(len(sample.token_ids))
        advantages[sample.loss_mask] = tokens[start:end]
        result.append(attrs.evolve(sample, advantages=advantages))
    return result


def with_observation_weights(
    samples: Iterable[TrainingSample],
    weight: float | Callable[[TrainingSample], Any] = 1.0,
) -> list[TrainingSample]:
    """The samples with ``weights`` of what the environment answered, for an observation loss.

    ECHO (arXiv:2605.24517) adds the cross-entropy of these tokens to the policy's loss, so that the
    policy learns to predict what its actions lead to, in failed rollouts too:
    ``L = L_policy + c * mean_i (1/|o_i|) sum_{t in o_i} -log p_t``, with c = 0.05 there.
    ``packing`` carries the weights to ``PackedBatch.weights``; every other token has 0.

    Args:
        samples: of agents; those without an ``observation_mask`` have no such token.
        weight: of each such token: a number, or a function of the sample that returns one, or one
            for each token ``[t]``, such as 0 for lines that only warn.

    Raises:
        ValueError: a weight is negative or not finite, or there are weights of another number of
            tokens.
    """
    result: list[TrainingSample] = []
    for sample in samples:
        value = np.asarray(weight(sample) if callable(weight) else weight, np.float32)
        if value.shape not in ((), sample.token_ids.shape):
            raise ValueError(
                f"weight returned an array of shape {value.shape} for a sample of shape "
                f"{sample.token_ids.shape}; expected a number, or one for each token"
            )
        mask = sample.observation_mask
        weights = np.zeros(len(sample.token_ids), np.float32)
        if mask is not None:
            weights[mask] = np.broadcast_to(value, weights.shape)[mask]
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("the weight of an observation is negative or not finite")
        result.append(attrs.evolve(sample, weights=weights))
    return result


def _per_sample(samples: tuple[Sample, ...], value: Any, said: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) and np.ndim(value) == 0:
        return [float(value)] * len(samples)
    if len(value) != len(samples):
        raise ValueError(
            f"{said} {len(value)} arrays for a rollout of {len(samples)} samples; "
            "expected a number, or one array [t] per sample"
        )
    return value  # type: ignore[no-any-return]


def _training_sample(sample: Sample, value: Any, said: str) -> TrainingSample:
    advantages = np.asarray(value, np.float64)
    if advantages.shape not in ((), sample.loss_mask.shape):
        raise ValueError(
            f"{said} an array of shape {advantages.shape} for a sample of shape "
            f"{sample.loss_mask.shape}; expected one advantage for each token"
        )
    advantages = np.where(sample.loss_mask, advantages, 0.0)
    refused = ~(np.abs(advantages) <= LARGEST)  # written so that nan is refused, too
    if refused.any():
        raise ValueError(
            f"{said} {advantages[refused][0]} for a token to be trained, which is not finite in "
            "float32; expected a finite advantage"
        )
    return TrainingSample(**attrs.asdict(sample, recurse=False), advantages=advantages)
