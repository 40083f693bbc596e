"""What filters refuse, and the rewards of it."""

import logging
from collections import Counter

import attrs

from primerl.types import Group

log = logging.getLogger(__name__)

AT_LEAST = 4
SHOWN = 5


def default_limit(groups_per_step: int) -> int:
    """How many refused groups in a row stop a run, unless it says otherwise."""
    return max(512, 32 * groups_per_step)


@attrs.define
class Refusals:
    """Groups in a row that filters refused, since one was kept.

    Args:
        warn_after: logged as a warning when they are that many: a step's worth.
    """

    warn_after: int
    filters: Counter[str] = attrs.Factory(Counter)
    rewards: Counter[float] = attrs.Factory(Counter)

    def add(self, name: str, group: Group) -> None:
        """A filter refused a group."""
        self.filters[name] += 1
        self.rewards.update(group.rewards.tolist())
        if self.in_a_row == max(AT_LEAST, self.warn_after):
            log.warning("%s, and nothing is learned; %s", self.describe(), self.describe_rewards())

    @property
    def in_a_row(self) -> int:
        """How many there are."""
        return self.filters.total()

    def describe(self) -> str:
        """How many were refused, and by which filters."""
        names = ", ".join(f"{name!r} {times}" for name, times in self.filters.most_common())
        return f"filters refused {self.in_a_row} groups in a row ({names})"

    def clear(self) -> None:
        """A group was kept."""
        self.filters.clear()
        self.rewards.clear()

    def describe_rewards(self) -> str:
        """The most frequent rewards of their rollouts."""
        most = [f"{reward:g} ({times}x)" for reward, times in self.rewards.most_common(SHOWN)]
        others = len(self.rewards) - len(most)
        return "rewards: " + ", ".join(most) + (f" and {others} others" if others else "")
