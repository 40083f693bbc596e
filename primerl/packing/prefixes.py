"""Prefix sharing, which computes the tokens that several samples begin with only once.

The rollouts of a group share a prompt, and the samples of a rollout share a history. A family is a
tree of samples, laid out depth first. The first sample is whole. Every other sample shares its
first tokens with the sample before it, which may itself share tokens. Only the other rows of the
sample are packed. They include the row that predicts the first trained token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from primerl.packing.binning import assign, check, costs_of, lockstep_cost
from primerl.types import TrainingSample

Member = tuple[int, int]
"""A sample's index, and the number of its first tokens that it shares with the sample before it."""

WORTHWHILE = 16
"""The minimum number of tokens to share: computing fewer is cheaper than gathering their keys."""

HALVINGS = 6
"""Number of maximum family sizes that ``family_bins`` tries, each half the previous size."""


def family_bins(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    ranks: int,
    cost: Callable[..., Any] | None,
    too_long: str,
) -> list[list[list[Member]]]:
    """Assign samples like ``bins``, but keep families together.

    ``result[rank][micro_step]`` is a list of members of families. Large families save the most
    computation, but are hard to balance over ranks. So this function tries smaller and smaller
    families, down to single samples, and returns the cheapest packing. A sample that shares n
    tokens costs ``cost(its length) - cost(n)``.
    """
    whole = [len(sample.token_ids) for sample in samples]
    lengths = check(whole, max_tokens=max_tokens, ranks=ranks, too_long=too_long)
    if not samples:
        return [[] for _ in range(ranks)]
    whole_costs = costs_of(cost, lengths)

    def attempt(units: list[list[Member]]) -> tuple[float, list[list[list[Member]]]]:
        members = [(unit, *member) for unit, family in enumerate(units) for member in family]
        unit, index, shared = np.array(members, np.int64).reshape(-1, 3).T
        saved = np.zeros(len(shared))
        saved[shared > 0] = costs_of(cost, shared[shared > 0])
        costs = np.bincount(unit, np.maximum(whole_costs[index] - saved, 0.0))
        tokens = np.bincount(unit, lengths[index] - shared).astype(np.int64)
        plan = assign(tokens, costs, max_tokens=max_tokens, ranks=ranks)
        placed = [
            [[member for one in sorted(ones) for member in units[one]] for ones in steps]
            for steps in plan
        ]
        return lockstep_cost(plan, costs), placed

    attempts = [attempt(families(samples, capacity=max_tokens / 2**n)) for n in range(HALVINGS)]
    attempts.append(attempt([[(index, 0)] for index in range(len(samples))]))
    return min(attempts, key=lambda one: one[0])[1]


def families(samples: Sequence[TrainingSample], *, capacity: float) -> list[list[Member]]:
    """Partition samples into families of at most ``capacity`` rows.

    The first sample of a family is whole. In sorted order, the direct predecessor of a sample has
    the longest common prefix with it, so each sample shares tokens with its predecessor or starts a
    new family. A sample never shares a token that it trains or that has a weight: each of these is
    predicted in a separate row.
    """

    def tokens(index: int) -> bytes:
        return samples[index].token_ids.astype(">i4").tobytes()

    result: list[list[Member]] = []
    rows = 0
    for index in sorted(range(len(samples)), key=tokens):
        own = samples[index].token_ids
        shared = 0
        if result:
            before = samples[result[-1][-1][0]]
            shared = _common(before.token_ids, own[: _untrained(samples[index])])
        if shared >= WORTHWHILE and rows + len(own) - shared <= capacity:
            result[-1].append((index, shared))
            rows += len(own) - shared
        else:
            result.append([(index, 0)])
            rows = len(own)
    return result


def _untrained(sample: TrainingSample) -> int:
    """Return the number of first tokens that a sample can share.

    Row j predicts token j + 1, so the row before the first used token can't be shared. Neither can
    the last row.
    """
    used = sample.loss_mask
    if sample.weights is not None:
        used = used | (np.nan_to_num(sample.weights) != 0)
    trained = np.flatnonzero(used)
    return int(trained[0] if len(trained) else len(sample.token_ids)) - 1


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
