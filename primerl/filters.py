"""Filters that decide which groups are worth training on.

A filter is a function ``Group -> bool``, named for the groups that it keeps. A group that it
refuses is counted under the filter's name and replaced, so batches keep their size. ``has_signal``
is a filter. The other functions take hyperparameters and return a filter:

    keep=[filters.has_signal, filters.completed(), filters.within_tokens(max_tokens=8192)]

``completed``, ``within_tokens`` and ``fluent`` are conditions on every rollout, so they keep a
group without rollouts. ``has_signal`` and ``reward_in`` refuse such a group.
"""

import functools
from collections.abc import Callable, Collection
from math import log
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from primerl.types import Group

__all__ = ["completed", "fluent", "has_signal", "reward_in", "within_tokens"]

Filter = Callable[[Group], bool]


def has_signal(group: Group) -> bool:
    """Keep groups whose rewards differ: equal rewards give zero advantages and no gradient.

    This is the dynamic sampling of DAPO (arXiv:2503.14476, section 3.2).
    """
    rewards = group.rewards
    return bool(len(rewards) > 1 and rewards.max() > rewards.min())


def completed(*, cut: Collection[str] = ("length", "context")) -> Filter:
    """Keep groups in which no rollout was cut short, that is, none has a ``stop`` in ``cut``.

    An environment may define other reasons to stop, such as ``"max_turns"``; add them to ``cut``.

    Raises:
        ValueError: ``cut`` is one string.
    """
    if isinstance(cut, str):
        raise ValueError(f"cut is {cut!r}, expected a list: [{cut!r}]")
    return _filter("completed", _is_completed, cut=frozenset(cut))


def within_tokens(*, max_tokens: int) -> Filter:
    """Keep groups in which no rollout has more than ``max_tokens`` tokens, over all its samples.

    All tokens count: prompts, tools' replies and sampled tokens.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
    return _filter("within_tokens", _is_within_tokens, max_tokens=max_tokens)


def reward_in(*, low: float, high: float) -> Filter:
    """Keep groups whose mean reward is in ``[low, high]``: tasks neither too hard nor too easy.

    Raises:
        ValueError: ``low`` is above ``high``.
    """
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high}, expected low <= high")
    return _filter("reward_in", _is_reward_in, low=low, high=high)


def fluent(
    *,
    certainty: float = 0.99,
    certain_tokens: int = 3000,
    ngram: int = 20,
    max_repeated: float = 0.5,
    window: int = 64,
    max_entropy: float = 6.0,
) -> Filter:
    """Keep groups without degenerate text: no loops and no gibberish in any sample.

    Only trained tokens are examined. Tokens count as consecutive only if no prompt or tool's reply
    lies between them. A sample is degenerate if any of these holds:

    - *certain*: ``certain_tokens`` tokens in a row each had a probability above ``certainty``.
      A model in a loop is certain of every token (MiniMax-M1, arXiv:2506.13585, section 3.2).
    - *repeated*: more than the share ``max_repeated`` of its n-grams of ``ngram`` tokens have
      occurred before in the sample.
    - *gibberish*: over some ``window`` tokens in a row, the mean of ``-logprob`` is above
      ``max_entropy`` nats. Its expectation is the entropy of the sampled distribution.

    A sample that is too short for a criterion passes it. To disable a criterion, set ``certainty``
    or ``max_repeated`` to 1, or ``max_entropy`` to infinity. The time is linear in the number of
    tokens, except for a sort.

    Raises:
        ValueError: a hyperparameter is outside its range.
    """
    for name, count in (("certain_tokens", certain_tokens), ("ngram", ngram), ("window", window)):
        if count < 1:
            raise ValueError(f"{name} is {count}, expected at least 1 token")
    for name, share in (("certainty", certainty), ("max_repeated", max_repeated)):
        if not 0 < share <= 1:
            raise ValueError(f"{name} is {share}, expected 0 < {name} <= 1")
    if not max_entropy > 0:
        raise ValueError(f"max_entropy is {max_entropy}, expected a number of nats above 0")

    return _filter(
        "fluent",
        _is_fluent,
        certainty=certainty,
        certain_tokens=certain_tokens,
        ngram=ngram,
        max_repeated=max_repeated,
        window=window,
        max_entropy=max_entropy,
    )


def _filter(name: str, keeps: Callable[..., bool], **hyperparameters: Any) -> Filter:
    """Make a filter that has a name and can be pickled."""
    made = functools.partial(keeps, **hyperparameters)
    made.__name__ = name  # type: ignore[attr-defined]
    return made


def _is_completed(group: Group, *, cut: frozenset[str]) -> bool:
    return all(rollout.stop not in cut for rollout in group.rollouts)


def _is_within_tokens(group: Group, *, max_tokens: int) -> bool:
    return all(
        sum(len(sample.token_ids) for sample in rollout.samples) <= max_tokens
        for rollout in group.rollouts
    )


def _is_reward_in(group: Group, *, low: float, high: float) -> bool:
    rewards = group.rewards
    if not len(rewards):
        return False
    # The mean of equal rewards may have a rounding error; the mean of zeros has none.
    least = rewards.min()
    return bool(low <= least + (rewards - least).mean() <= high)


def _is_fluent(
    group: Group,
    *,
    certainty: float,
    certain_tokens: int,
    ngram: int,
    max_repeated: float,
    window: int,
    max_entropy: float,
) -> bool:
    for sample in group.samples:
        ids, logprobs, mask = sample.token_ids, sample.behavior_logprobs, sample.loss_mask
        if (
            _longest_run(mask & (logprobs > log(certainty))) >= certain_tokens
            or _repeated_share(ids, mask, ngram) > max_repeated
            or _highest_entropy(logprobs, mask, window) > max_entropy
        ):
            return False
    return True


def _longest_run(flags: Bool[np.ndarray, " t"]) -> int:
    """The length of the longest run of true entries."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _repeated_share(
    token_ids: Int32[np.ndarray, " t"], mask: Bool[np.ndarray, " t"], n: int
) -> float:
    """The share of n-grams that have occurred before, of those with all tokens in the mask."""
    starts = _starts(mask, n)
    if not len(starts):
        return 0.0
    hashes = np.zeros(len(starts), np.uint64)
    for offset in range(n):  # a polynomial hash, modulo 2**64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + token_ids[starts + offset].astype("u8")
    hashes.sort()
    return float((hashes[1:] == hashes[:-1]).sum()) / len(starts)


def _highest_entropy(
    logprobs: Float32[np.ndarray, " t"], mask: Bool[np.ndarray, " t"], window: int
) -> float:
    """The largest mean of ``-logprob`` over ``window`` tokens in a row, all in the mask."""
    starts = _starts(mask, window)
    surprise = np.where(mask, -logprobs.astype(np.float64), 0.0)
    sums = np.concatenate([[0.0], np.cumsum(surprise)])
    return float(((sums[starts + window] - sums[starts]) / window).max(initial=0.0))


def _starts(mask: Bool[np.ndarray, " t"], length: int) -> np.ndarray:
    """Start indices of the windows of ``length`` tokens that lie entirely in the mask."""
    counts = np.concatenate([[0], np.cumsum(mask)])
    starts: np.ndarray = np.flatnonzero(counts[length:] - counts[:-length] == length)
    return starts
