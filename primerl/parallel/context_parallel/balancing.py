"""Load balancing of context-parallel attention: assignment of rows to ranks.

The query at position p of a document sees p + 1 keys, or fewer in layers with windows. So ranks
with equal numbers of rows have unequal work.
"""

import numpy as np
from jaxtyping import Float64, Int

TOLERANCE = 0.01
"""A rank keeps all its rows if its work exceeds the mean by at most this fraction."""


def divide_attention(cost: Float64[np.ndarray, " t"], parts: int) -> Int[np.ndarray, " t"]:
    """Return, for each row of a pack, the part (0 to ``parts - 1``) that computes its attention.

    ``cost[j]`` is the number of keys that row j sees, the mean over layers (``flops.seen_keys``).

    Part j holds the j-th of ``parts`` equal blocks of rows; ``parts`` must divide their number. A
    part with more than the mean work gives away its surplus, starting with its most expensive rows.
    These are the last rows of its longest documents, so only a few contiguous ranges move. They
    are assigned in order to the parts with less than the mean work, in proportion to what each
    lacks.
    """
    if len(cost) % parts:
        raise ValueError(f"{len(cost)} rows cannot be divided equally by parts={parts}")
    by_part = cost.reshape(parts, -1)
    surplus = by_part.sum(1) - cost.sum() / parts
    workers = np.repeat(np.arange(parts), by_part.shape[1])
    given = np.zeros(by_part.shape, dtype=bool)
    for part in np.flatnonzero(surplus > TOLERANCE * cost.sum() / parts):
        most_expensive = np.argsort(-by_part[part], kind="stable")
        taken = np.cumsum(by_part[part][most_expensive])
        # Give the number of rows with total work nearest to the surplus: possibly none, never all.
        number = np.abs(np.append(0, taken[:-1]) - surplus[part]).argmin()
        given[part, most_expensive[:number]] = True
    rows = np.flatnonzero(given)
    if len(rows):
        takers = np.flatnonzero(surplus < 0)
        lacking = np.cumsum(-surplus[takers])
        middles = np.cumsum(cost[rows]) - cost[rows] / 2
        shares = middles * (lacking[-1] / cost[rows].sum())
        workers[rows] = takers[np.searchsorted(lacking[:-1], shares)]
    return workers
