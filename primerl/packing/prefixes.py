"""Which samples begin with the same tokens, so that these are computed once.

The rollouts of a group begin with one prompt, and the sequences of a rollout with one history. A
family is a tree of samples, laid out depth first: the first is whole, and each other one continues
the first tokens of the one before it, which may do so itself. For these only their own rows are
packed, from the row that predicts their first trained token on, or sooner.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from primerl.packing.binning import assign, check, costs_of, lockstep_cost
from primerl.types import TrainingSample

Member = tuple[int, int]
"""A sample's index, and how many of its first tokens the family's samples before it hold."""

WORTHWHILE = 16
"""Fewer tokens than this are not shared: they cost less than looking them up."""

HALVINGS = 6
"""How many sizes of families are tried."""


def family_bins(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    ranks: int,
    cost: Callable[..., Any] | None,
    too_long: str,
) -> list[list[list[Member]]]:
    """As ``bins``, with families kept together: ``result[rank][micro_step]`` are their members.

    Large families save most, but leave ranks waiting where there are few. So smaller and smaller
    ones are tried, down to none at all, and the packing that costs least is taken. The cost of a
    sample that continues n shared tokens is ``cost(its length) - cost(n)``.
    """
    whole = [len(sample.token_ids) for sample in samples]
    lengths = check(whole, max_tokens=max_tokens, ranks=ranks, too_long=too_long)
    if not samples:
        return [[] for _ in range(ranks)]
    of_whole = costs_of(cost, lengths)

    def attempt(units: list[list[Member]]) -> tuple[float, list[list[list[Member]]]]:
        members = [(unit, *member) for unit, family in enumerate(units) for member in family]
        unit, index, shared = np.array(members, np.int64).reshape(-1, 3).T
        spared = np.zeros(len(shared))
        spared[shared > 0] = costs_of(cost, shared[shared > 0])
        costs = np.bincount(unit, np.maximum(of_whole[index] - spared, 0.0))
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
    """Partition samples into families of at most ``capacity`` rows; the first of each is whole.

    In sorted order, no earlier sample begins more like a sample than the one just before it, so
    each continues that one, or begins a family. A trained token is never shared by the sample that
    trains it, so each is predicted in a row of its own.
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
    """How many tokens can be left out: row j predicts token j + 1, and the last row stays."""
    trained = np.flatnonzero(sample.loss_mask)
    return int(trained[0] if len(trained) else len(sample.token_ids)) - 1


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
