"""Routing policies: the choice of a server, and of one of its data-parallel ranks, for a request.

A policy is a pure function ``(request, places) -> (url, rank)``. It is called once per request and
attempt, with the places that may be used. The rank is None if the server chooses it by itself.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs

# A place is overloaded with more than OVERLOAD times the least requests of a place, plus SPARE.
OVERLOAD = 1.5
SPARE = 4

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class RoutedRequest:
    """A request, as a routing policy sees it."""

    tokens: int
    """The length of the prompt."""
    session: str | None = None
    """The id of the conversation, or None."""


@attrs.frozen(kw_only=True)
class RoutedPlace:
    """A server that may be used, or one of its data-parallel ranks."""

    url: str
    """The server's url."""
    rank: int | None = None
    """The rank; None if the server has only one."""
    requests: int
    """The requests in flight at this place, of this copy of the engine."""
    server_requests: int
    """The requests in flight at all ranks of the server."""
    tokens: int = 0
    """The length of the prompts in flight at this place, in all."""
    held: int = 0
    """How many of the first tokens of the request's prompt the place has probably cached; 0 for
    ``least_loaded`` and ``of_session``, which do not need it.
    """


RoutingPolicy = Callable[[RoutedRequest, Sequence[RoutedPlace]], tuple[str, int | None]]


def least_loaded(request: RoutedRequest, places: Sequence[RoutedPlace]) -> tuple[str, int | None]:  # noqa: ARG001
    """Choose the place with the fewest requests in flight; of several, that with fewest tokens."""
    chosen = min(places, key=_load)
    return chosen.url, chosen.rank


def of_session(request: RoutedRequest, places: Sequence[RoutedPlace]) -> tuple[str, int | None]:
    """Choose the place of the request's session, which has its earlier turns cached.

    Each session has a home, a server and one of its ranks, by rendezvous hashing. The home changes
    only if it leaves, or if a new place becomes the home. While the home has more than 1.5 times
    the least requests of a place, plus 4, the session goes to the place with the fewest.

    Requests without a session go to the server with the fewest, which chooses the rank.
    """
    servers = {place.url: place.server_requests for place in places}
    if request.session is None:
        return _least(servers), None
    url = _of_session(request.session, servers)
    ranks = {place.rank: place.requests for place in places if place.url == url}
    return url, _of_session(request.session, ranks)


def prefix_aware(request: RoutedRequest, places: Sequence[RoutedPlace]) -> tuple[str, int | None]:  # noqa: ARG001
    """Choose the place that has most of the prompt cached, unless it is overloaded.

    A place is overloaded with more than 1.5 times the least requests of a place, plus 4. Of several
    places with as much of the prompt, the least loaded one is chosen.
    """
    most = _most(min(place.requests for place in places))
    chosen = min(
        (place for place in places if place.requests <= most),
        key=lambda place: (-place.held, *_load(place)),
    )
    return chosen.url, chosen.rank


def cost_aware(
    request: RoutedRequest, places: Sequence[RoutedPlace], *, request_tokens: int = 1024
) -> tuple[str, int | None]:
    """Choose the place with the least cost: the tokens to prefill, and the requests in flight.

        cost = request.tokens - place.held + request_tokens * place.requests

    Args:
        request: the request.
        places: the places that may be used.
        request_tokens: how many tokens of prefill a request in flight counts for. A session leaves
            its place for one with n requests less if that costs less than n times this prefill.
    """
    chosen = min(
        places,
        key=lambda place: (
            request.tokens - place.held + request_tokens * place.requests,
            *_load(place),
        ),
    )
    return chosen.url, chosen.rank


# The policies that do not read ``RoutedPlace.held``, for which prompts need not be hashed.
WITHOUT_PREFIXES: tuple[RoutingPolicy, ...] = (least_loaded, of_session)


def _load(place: RoutedPlace) -> tuple[int, int]:
    return place.requests, place.tokens


def _most(least: int) -> float:
    """Return the most requests of a place that is not overloaded."""
    return least * OVERLOAD + SPARE


def _least(loads: Mapping[T, int]) -> T:
    return min(loads, key=loads.__getitem__)


def _of_session(session: str, loads: Mapping[T, int]) -> T:
    home = max(loads, key=lambda name: _weight(session, name))
    least = _least(loads)
    return least if loads[home] > _most(loads[least]) else home


def _weight(session: str, name: object) -> bytes:
    return hashlib.blake2b(f"{name}\0{session}".encode(), digest_size=8).digest()
