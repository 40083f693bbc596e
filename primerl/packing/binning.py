"""Which samples share a micro-batch, and which rank gets it."""

import heapq
from collections.abc import Callable, Sequence

import numpy as np


def bins(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    ranks: int,
    cost: Callable[[int], float] | None = None,
) -> list[list[list[int]]]:
    """Assign samples to micro-batches of at most ``max_tokens``, equally many for each rank.

    Samples are placed longest first, each into the fullest bin that still has room (best fit
    decreasing). Ranks run in lockstep, so a micro-step costs as much as its dearest rank: bins
    are sorted by cost, and each run of ``ranks`` bins makes one micro-step.

    Args:
        lengths: tokens of each sample.
        max_tokens: the capacity of a micro-batch, in tokens.
        ranks: how many ranks run in lockstep.
        cost: of a sample of the given length; the length itself by default.

    Returns:
        ``result[rank][micro_step]`` is a list of sample indices. Every index appears once. A list
        may be empty, where there are fewer samples than ranks to feed.

    Raises:
        ValueError: a sample is longer than ``max_tokens``, or a count is below one.
    """
    _check(lengths, max_tokens, ranks)
    price = cost or float
    filled = _best_fit(lengths, max_tokens)
    while filled and len(filled) % ranks:
        filled.append([])
    _feed_empty(filled, lengths)

    def total(members: list[int]) -> float:
        return sum((price(lengths[index]) for index in members), start=0.0)

    dearest_first = sorted(filled, key=lambda members: (-total(members), members))
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    for start in range(0, len(dearest_first), ranks):
        # The rank that has done least so far gets the dearest bin, so that totals stay level too.
        for rank, members in zip(
            np.argsort(spent, kind="stable").tolist(),
            dearest_first[start : start + ranks],
            strict=True,
        ):
            result[rank].append(sorted(members))
            spent[rank] += total(members)
    return result


def _check(lengths: Sequence[int], max_tokens: int, ranks: int) -> None:
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens={max_tokens} and ranks={ranks} must be at least 1")
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sample {index} has {length} tokens, more than max_tokens={max_tokens}; "
                "raise max_tokens, or filter such groups before packing"
            )


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    filled: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in longest_first:
        length = lengths[index]
        room = min((room for room in by_room if room >= length), default=None)
        if room is None:
            number, room = len(filled), max_tokens
            filled.append([])
        else:
            number = heapq.heappop(by_room[room])
            if not by_room[room]:
                del by_room[room]
        filled[number].append(index)
        heapq.heappush(by_room.setdefault(room - length, []), number)
    return filled


def _feed_empty(filled: list[list[int]], lengths: Sequence[int]) -> None:
    """Give empty bins a sample from the bin that has most to spare."""
    for members in filled:
        if members:
            continue
        donor = max(
            (other for other in filled if len(other) > 1),
            key=lambda other: sum(lengths[index] for index in other),
            default=None,
        )
        if donor is None:
            return
        half = len(donor) // 2
        members.extend(donor[half:])
        del donor[half:]
