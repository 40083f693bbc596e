"""Which rank attends for which rows, so that all ranks attend equally much.

The query at position p of a document sees p + 1 keys. So ranks with equally many rows, but later
ones in longer documents, have more to do than the others.
"""

import numpy as np
from jaxtyping import Int

TOLERANCE = 0.01
"""A rank within this share of the mean keeps its rows: moving them would cost more."""


def divide_attention(
    position_ids: Int[np.ndarray, " t"], parts: int, *, tolerance: float = TOLERANCE
) -> Int[np.ndarray, " t"]:
    """The part, 0 to ``parts - 1``, that attends for each row of a pack.

    Part j has the j-th equal share of the rows. It attends for them, except that one with more than
    the mean work gives its dearest rows away, until it is left with the mean: no fewer rows could
    do it. These are the last rows of its longest documents, so few ranges travel. In order, they
    go to the parts with less than the mean, as much work as each one lacks.

    Args:
        position_ids: each row's place in its document; its work is that plus one.
        parts: they divide the rows equally.
        tolerance: a part with at most this share more than the mean gives none.

    Raises:
        ValueError: the rows cannot be divided equally.
    """
    if len(position_ids) % parts:
        raise ValueError(f"{len(position_ids)} rows cannot be divided equally by {parts}")
    cost = position_ids.astype(np.int64) + 1
    by_part = cost.reshape(parts, -1)
    surplus = by_part.sum(1) - cost.sum() / parts
    workers = np.repeat(np.arange(parts), by_part.shape[1])
    given = np.zeros(by_part.shape, dtype=bool)
    for part in np.flatnonzero(surplus > tolerance * cost.sum() / parts):
        dearest = np.argsort(-by_part[part], kind="stable")
        taken = np.cumsum(by_part[part][dearest])
        # As many of them as come nearest to the surplus, perhaps none, but not all.
        number = np.abs(np.append(0, taken[:-1]) - surplus[part]).argmin()
        given[part, dearest[:number]] = True
    rows = np.flatnonzero(given)
    if len(rows):
        takers = np.flatnonzero(surplus < 0)
        lacking = np.cumsum(-surplus[takers])
        middles = np.cumsum(cost[rows]) - cost[rows] / 2
        shares = middles * (lacking[-1] / cost[rows].sum())
        workers[rows] = takers[np.searchsorted(lacking[:-1], shares)]
    return workers
