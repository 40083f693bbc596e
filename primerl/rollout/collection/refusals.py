"""What filters refuse, and the rewards of it."""

import logging
from collections import Counter

import attrs

from primerl.types import Group

log = logging.getLogger(__name__)

AT_LEAST = 4
SHOWN = 5


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
        count = self.filters.total()
        if count == max(AT_LEAST, self.warn_after):
            names = ", ".join(f"{name!r} {times}" for name, times in self.filters.most_common())
            log.warning(
                "filters refused %d groups in a row (%s), and nothing is learned; rewards: %s",
                count,
                names,
                self.describe_rewards(),
            )

    def clear(self) -> None:
        """A group was kept."""
        self.filters.clear()
        self.rewards.clear()

    def describe_rewards(self) -> str:
        """The most frequent rewards of these groups."""
        most = [f"{reward:g} ({times}x)" for reward, times in self.rewards.most_common(SHOWN)]
        others = len(self.rewards) - len(most)
        return ", ".join(most) + (f" and {others} others" if others else "")
