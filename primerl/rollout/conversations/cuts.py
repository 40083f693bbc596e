"""Replies that end before the policy ended them: at a stop string, or after the first tool call.

A reply is cut after a token. The tokens before the cut were sampled as they would have been without
the rest, so they are trained with their own logprobs; the tokens after the cut are dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from primerl.types import Completion

Decode = Callable[[list[int]], str]
Parse = Callable[[list[int]], Any]
Usable = Callable[[Any], bool]


@attrs.frozen
class Cut:
    """Where a reply ends: after ``count`` tokens, and because of the string ``stop``, if any."""

    count: int
    stop: str | None = None


def cut_at_strings(token_ids: list[int], stops: Sequence[str], decode: Decode) -> Cut | None:
    """Return the cut after the token that completes the first stop string, or None."""
    text = decode(token_ids)
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    _, first = min(found)
    count = _first_count(len(token_ids), lambda count: first in decode(token_ids[:count]))
    return Cut(count, first)


def cut_after_call(token_ids: list[int], parse: Parse, is_usable: Usable) -> Cut | None:
    """Return the cut after the first usable tool call, or None if no other call follows it."""

    def has_call(ids: list[int]) -> bool:
        return any(is_usable(call) for call in parse(ids).tool_calls)

    if len(parse(token_ids).tool_calls) < 2 or not has_call(token_ids):
        return None
    return Cut(_first_count(len(token_ids), lambda count: has_call(token_ids[:count])))


def cut_completion(completion: Completion, cut: Cut) -> Completion:
    """Return a completion up to the cut."""
    return attrs.evolve(
        completion,
        token_ids=completion.token_ids[: cut.count],
        logprobs=completion.logprobs[: cut.count],
        versions=completion.versions[: cut.count],
        finish_reason="stop",
    )


def _first_count(most: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest number of tokens for which ``holds``; it does for ``most``."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
