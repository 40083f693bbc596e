"""Assignment of advantages and weights to the tokens of training samples."""

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
    """Compute the advantages of all tokens, and return the samples with tokens to train.

    Samples without a trained token are left out, but the reward of their rollout still counts in
    its group.

    Args:
        groups: finished groups. The estimator is called once for each, in order.
        estimator: returns one entry per rollout of a group. A number applies to all trained tokens
            of the rollout. A sequence holds one array ``[t]`` or number per sample of the rollout.

    Raises:
        ValueError: the estimator returned the wrong number of entries, an array of the wrong
            length, or a value for a trained token that is not finite in float32. The message names
            the estimator and the task.
    """
    samples: list[TrainingSample] = []
    for group in groups:
        values = estimator(group)
        said = f"for task {group.task_id!r}, {name_of(estimator)} returned"
        if len(values) != len(group.rollouts):
            raise ValueError(
                f"{said} {len(values)} values for {len(group.rollouts)} rollouts; "
                "expected one per rollout"
            )
        for rollout, value in zip(group.rollouts, values, strict=True):
            per_sample = _per_sample(rollout.samples, value, said)
            for sample, advantages in zip(rollout.samples, per_sample, strict=True):
                if sample.loss_mask.any():
                    samples.append(_training_sample(sample, advantages, said))
    return samples


def whitened(samples: Iterable[TrainingSample], *, epsilon: float = 1e-8) -> list[TrainingSample]:
    """Normalize advantages to mean 0 and standard deviation 1 over all trained tokens.

    ``A = (A - mean(A)) / (std(A) + epsilon)`` over the tokens of the whole batch, so call it
    before the batch is divided into minibatches. If all advantages are equal, they become 0. After
    ``assign`` with the rewards themselves as advantages, this is the normalization of REINFORCE++;
    after ``centered``, it is that of REINFORCE++-baseline (arXiv:2501.03262).

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
    """Set ``weights`` of the tokens that the environment answered, for an observation loss.

    ECHO (arXiv:2605.24517) adds the cross-entropy of these tokens to the policy's loss, so that the
    policy learns to predict the consequences of its actions, in failed rollouts too:
    ``L = L_policy + c * mean_i (1/|o_i|) sum_{t in o_i} -log p_t``. The paper uses c = 0.05.
    ``packing.pack`` copies the weights to ``PackedBatch.weights``. All other tokens have weight 0.

    Args:
        samples: samples of agents. ``observation_mask`` marks the tokens of observations; a sample
            without a mask has none.
        weight: the weight of each observation token: a number, or a function of the sample that
            returns a number, or an array ``[t]``, which may be 0 for lines that only warn.

    Raises:
        ValueError: a weight is negative or not finite, or an array of weights does not have one
            entry per token.
    """
    result: list[TrainingSample] = []
    for sample in samples:
        value = np.asarray(weight(sample) if callable(weight) else weight, np.float32)
        if value.shape not in ((), sample.token_ids.shape):
            raise ValueError(
                f"weight returned an array of shape {value.shape} for a sample of shape "
                f"{sample.token_ids.shape}; expected a number, or one number per token"
            )
        mask = sample.observation_mask
        weights = np.zeros(len(sample.token_ids), np.float32)
        if mask is not None:
            weights[mask] = np.broadcast_to(value, weights.shape)[mask]
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError(
                "the weight of an observation is negative or not finite; expected a number >= 0"
            )
        result.append(attrs.evolve(sample, weights=weights))
    return result


def _per_sample(samples: tuple[Sample, ...], value: Any, said: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) and np.ndim(value) == 0:
        return [float(value)] * len(samples)
    if len(value) != len(samples):
        raise ValueError(
            f"{said} {len(value)} arrays for a rollout of {len(samples)} samples; "
            "expected a number, or one array [t] or number per sample"
        )
    return value  # type: ignore[no-any-return]


def _training_sample(sample: Sample, value: Any, said: str) -> TrainingSample:
    advantages = np.asarray(value, np.float64)
    if advantages.shape not in ((), sample.loss_mask.shape):
        raise ValueError(
            f"{said} an array of shape {advantages.shape} for a sample of shape "
            f"{sample.loss_mask.shape}; expected one advantage per token"
        )
    advantages = np.where(sample.loss_mask, advantages, 0.0)
    refused = ~(np.abs(advantages) <= LARGEST)  # this form refuses NaN too
    if refused.any():
        raise ValueError(
            f"{said} {advantages[refused][0]} for a token to be trained, which is not finite in "
            "float32; expected a finite advantage"
        )
    return TrainingSample(**attrs.asdict(sample, recurse=False), advantages=advantages)
