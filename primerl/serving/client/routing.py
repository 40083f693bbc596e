"""The choice of a place for a request, such as a server or one of its data-parallel ranks.

A policy is a pure function of the loads of all places: the number of requests in flight at each.
"""

import hashlib
from collections.abc import Mapping

# A session moves when its place has more than OVERLOAD times the least load plus SPARE requests.
OVERLOAD = 1.5
SPARE = 4


def least_loaded(loads: Mapping[str, int]) -> str:
    """Return the place with the fewest requests; the first of several."""
    return min(loads, key=loads.__getitem__)


def of_session(session: str, loads: Mapping[str, int]) -> str:
    """Return the place of a session, which has its earlier turns cached.

    Each session has a home, by rendezvous hashing: it changes only if its home leaves, or if a new
    place becomes its home. While its home has much more load than another place, a session goes to
    the least loaded place.
    """
    home = max(loads, key=lambda place: _weight(session, place))
    least = least_loaded(loads)
    return least if loads[home] > loads[least] * OVERLOAD + SPARE else home


def _weight(session: str, place: str) -> bytes:
    return hashlib.blake2b(f"{place}\0{session}".encode(), digest_size=8).digest()
