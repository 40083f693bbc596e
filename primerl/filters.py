"""Filters: which groups are worth training on.

A filter is a function ``Group -> bool`` named for what it keeps. A group that it refuses is
counted under the filter's name, and another is started in its place, so batches keep their size.
"""

from primerl.types import Group

__all__ = ["has_signal"]


def has_signal(group: Group) -> bool:
    """Keep groups whose rewards differ: equal rewards give zero advantages and no gradient.

    This is the dynamic sampling of DAPO (arXiv:2503.14476, section 3.2).
    """
    rewards = group.rewards
    return bool(len(rewards) > 1 and rewards.max() > rewards.min())
