"""Bin packing of samples into micro-batches, balanced over ranks."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int64

RAISES = 160
"""Approximate number of rounds in ``_balance``. More rounds balance better but take longer."""


def bins(
    lengths: Sequence[Any] | np.ndarray,
    *,
    max_tokens: int,
    ranks: int,
    cost: Callable[..., Any] | None = None,
    too_long: Literal["raise", "alone"] = "raise",
) -> list[list[list[int]]]:
    """Assign samples to micro-batches of at most ``max_tokens``, equally many for each rank.

    Ranks run in lockstep, so a micro-step takes as long as its most expensive rank. The cost of a
    packing is

        sum over micro-steps of max over ranks of (the cost of the rank's samples),

    which is at best the total cost / ``ranks``. Best fit decreasing determines the number of
    micro-steps. A second packing, with equally many micro-steps, places samples where ranks would
    otherwise wait (``_balance``). The cheapest packing is returned; this is best fit if
    micro-batches are too full to balance. The same arguments give the same packing.

    Args:
        lengths: number of tokens of each sample, at least 1.
        max_tokens: the capacity of a micro-batch, in tokens.
        ranks: number of ranks that run in lockstep.
        cost: maps an int64 array of sample lengths to costs, such as
            ``lambda n: n + n * n / 8192``, or one length to one cost. By default, the length.
        too_long: what to do with a sample longer than ``max_tokens``: ``"raise"`` an error, or pack
            it ``"alone"`` in a micro-batch.

    Returns:
        ``result[rank][micro_step]`` is a list of sample indices. Every index appears once. Lists
        are empty if there are fewer samples than micro-batches.

    Raises:
        ValueError: a length is not a whole number above 0, a cost is negative or not finite, a
            sample is longer than ``max_tokens`` (unless ``too_long="alone"``), ``too_long`` is
            neither ``"raise"`` nor ``"alone"``, or ``max_tokens`` or ``ranks`` is below 1.
    """
    tokens = check(lengths, max_tokens=max_tokens, ranks=ranks, too_long=too_long)
    return assign(tokens, costs_of(cost, tokens), max_tokens=max_tokens, ranks=ranks)


def assign(
    tokens: Int64[np.ndarray, " n"],
    costs: Float64[np.ndarray, " n"],
    *,
    max_tokens: int,
    ranks: int,
) -> list[list[list[int]]]:
    """Assign samples as ``bins`` does, given their costs and lengths that have been checked."""
    if len(tokens) == 0:
        return [[] for _ in range(ranks)]
    longest_first = np.argsort(-tokens, kind="stable")
    tokens, costs = tokens[longest_first], costs[longest_first]

    fitted = _best_fit(tokens, max_tokens)
    steps = int(fitted.max()) // ranks + 1
    # The candidates: best fit without empty micro-batches, and a balanced packing.
    plans = [_fed(fitted, tokens, steps * ranks, halves) for halves in (True, False)]
    if len(tokens) < steps * ranks:  # some stay empty; cost decides which
        plans.append(fitted)
    for spread in (True, False) if ranks > 1 else ():  # a single rank never waits
        balanced = _balance(tokens, costs, max_tokens, ranks, steps, spread)
        if balanced is not None:
            plans.append(balanced)
            break

    def totals(plan: np.ndarray) -> np.ndarray:
        return np.bincount(plan, costs, minlength=steps * ranks)

    def in_lockstep(plan: np.ndarray) -> float:
        return float(np.sort(totals(plan))[::-1][::ranks].sum())

    cheapest = min(plans, key=in_lockstep)
    return _to_ranks(cheapest, totals(cheapest), longest_first, ranks)


def lockstep_cost(plan: Sequence[Sequence[Sequence[int]]], costs: np.ndarray) -> float:
    """Return the cost of a packing: the sum over micro-steps of the most expensive rank's cost."""
    by_rank = [[float(costs[members].sum()) for members in steps] for steps in plan]
    return float(sum(max(step) for step in zip(*by_rank, strict=True)))


def check(
    lengths: Sequence[Any] | np.ndarray, *, max_tokens: int, ranks: int, too_long: str
) -> Int64[np.ndarray, " n"]:
    """Return the lengths as an array, after checking the arguments as ``bins`` documents."""
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens={max_tokens} and ranks={ranks} must be at least 1")
    if too_long not in ("raise", "alone"):
        raise ValueError(f'too_long is {too_long!r}; expected "raise" or "alone"')
    given = np.asarray(lengths)
    if given.ndim != 1:
        raise ValueError(f"lengths has shape {given.shape}; expected one number per sample")
    wrong = np.ones(len(given), bool)
    if given.dtype.kind in "iuf":
        wrong = ~(np.isfinite(given) & (given >= 1) & (given == np.floor(given)))
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"lengths[{index}] is {lengths[index]!r}; expected a whole number of tokens, at least 1"
        )
    if too_long == "raise" and (given > max_tokens).any():
        index = int((given > max_tokens).argmax())
        raise ValueError(
            f"sample {index} has {given[index]} tokens, more than max_tokens={max_tokens}; raise "
            'max_tokens, leave such samples out, or pass too_long="alone" to pack each by itself'
        )
    return given.astype(np.int64)


def costs_of(
    cost: Callable[..., Any] | None, tokens: Int64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Compute the cost of each length, and check that it is finite and not negative."""
    if cost is None:
        return tokens.astype(np.float64)
    costs = None
    if len(tokens) > 1:  # a function of one length may accept an array of one
        try:
            costs = np.asarray(cost(tokens), np.float64)
        except (TypeError, ValueError):  # cost takes one length, or raises again below
            costs = None
    if costs is None or costs.shape != tokens.shape:
        costs = np.array([float(cost(length)) for length in tokens.tolist()])
    wrong = ~(np.isfinite(costs) & (costs >= 0))
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"cost({tokens[index]}) is {costs[index]}; expected a finite number, at least 0"
        )
    return costs


def _best_fit(tokens: Int64[np.ndarray, " n"], max_tokens: int) -> Int64[np.ndarray, " n"]:
    """Best fit decreasing: put the longest sample first into the fullest micro-batch with room."""
    numbers: list[int] = []
    rooms: list[int] = []  # room * len(tokens) + micro-batch, ascending: integers compare fast
    base, opened = len(tokens), 0
    for length in tokens.tolist():
        place = bisect_left(rooms, length * base)
        if place < len(rooms):
            entry = rooms.pop(place)
        else:
            entry = max_tokens * base + opened
            opened += 1
        numbers.append(entry % base)
        insort(rooms, entry - length * base)
    return np.array(numbers, np.int64)


def _fed(
    plan: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"], size: int, halves: bool
) -> Int64[np.ndarray, " n"]:
    """Fill each empty micro-batch with samples of the micro-batch that has the most tokens.

    The empty micro-batch gets half of these samples if ``halves``, otherwise only the shortest.
    """
    plan = plan.copy()
    counts = np.bincount(plan, minlength=size)
    held = np.bincount(plan, tokens, minlength=size)
    for number in range(int(plan.max()) + 1, size):
        donor = int(np.where(counts > 1, held, -1.0).argmax())
        if counts[donor] < 2:
            break
        members = np.flatnonzero(plan == donor)
        given = members[len(members) // 2 :] if halves else members[-1:]
        plan[given] = number
        for changed, sign in ((donor, -1), (number, 1)):
            counts[changed] += sign * len(given)
            held[changed] += sign * tokens[given].sum()
    return plan


def _balance(
    tokens: Int64[np.ndarray, " n"],
    costs: Float64[np.ndarray, " n"],
    max_tokens: int,
    ranks: int,
    steps: int,
    spread: bool,
) -> Int64[np.ndarray, " n"] | None:
    """Place samples where a rank would wait; return their micro-batches, or None if room is short.

    The longest samples come first, beginning with one per micro-batch. A rank waits for the most
    expensive rank of its micro-step; the wait is the difference of their costs. If a wait covers
    the cost of the next sample, the sample is placed there for free. Otherwise, a micro-step is
    made more expensive, with one sample for each of its ranks. With ``spread``, this is the
    micro-step with the fewest tokens, which is cheapest while there is room. Without ``spread``, it
    is the micro-step with the longest wait, which keeps the remaining room together.
    """
    size, start = steps * ranks, min(steps * ranks, len(tokens))
    plan = np.arange(len(tokens))
    spent, room = np.zeros(size), np.full(size, max_tokens)
    spent[:start] = costs[:start]
    room[:start] -= tokens[:start]
    raised = -(-len(tokens) // (RAISES * ranks))  # micro-steps per round
    while start < len(tokens):
        by_step = spent.reshape(steps, ranks)
        wait = by_step.max(1, keepdims=True) - by_step
        wait[room.reshape(steps, ranks) < tokens[start]] = -1.0
        places = np.flatnonzero(wait >= costs[start])
        if not len(places):
            longest = wait.max(1)
            unused = room.reshape(steps, ranks).sum(1)
            first = np.where(longest >= 0, unused, -np.inf) if spread else longest
            chosen = np.argsort(-first, kind="stable")[:raised, None]
            places = chosen * ranks + np.argsort(-wait[chosen[:, 0]], 1, kind="stable")
            places = places[wait.ravel()[places] >= 0]
            if not len(places):
                return None
        places = places[: len(tokens) - start]
        end = start + len(places)
        plan[start:end] = places
        spent[places] += costs[start:end]
        room[places] -= tokens[start:end]
        start = end
    return plan


def _to_ranks(
    plan: Int64[np.ndarray, " n"],
    totals: Float64[np.ndarray, " b"],
    longest_first: Int64[np.ndarray, " n"],
    ranks: int,
) -> list[list[list[int]]]:
    """Distribute micro-batches over ranks, so that those of similar cost share a micro-step."""
    counts = np.bincount(plan, minlength=len(totals))
    by_number = np.split(longest_first[np.argsort(plan, kind="stable")], np.cumsum(counts)[:-1])
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    spent = np.zeros(ranks)
    for numbers in np.argsort(-totals, kind="stable").reshape(-1, ranks):
        # To balance the totals too, the rank with the least cost so far gets the most expensive.
        least_first = np.argsort(spent, kind="stable")
        for rank, number in zip(least_first.tolist(), numbers.tolist(), strict=True):
            result[rank].append(sorted(by_number[number].tolist()))
        spent[least_first] += totals[numbers]
    return result
