"""Which versions are proven: that engines which say so really serve the trainer's weights."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from primerl.types import NOT_SAMPLED, Group, PolicyVersion

UNPROVEN = "unproven"
"""The name under which groups of a rejected version are counted."""


class Proofs:
    """What has been found of each version; every version is provisional until it is settled.

    Args:
        required: without, every version counts as proven.
    """

    def __init__(self, *, required: bool) -> None:
        self.required = required
        self._proven: set[PolicyVersion] = set()
        self._rejected: set[PolicyVersion] = set()

    def settle(self, version: PolicyVersion, *, proven: bool) -> None:
        """Note what was found of a version.

        Raises:
            ValueError: nothing awaits proof.
        """
        if not self.required:
            raise ValueError("the worker awaits no proof; make it with await_proof=True")
        kept, other = (self._proven, self._rejected)[:: 1 if proven else -1]
        kept.add(version)
        other.discard(version)

    @property
    def halted(self) -> bool:
        """Whether the newest settled version was rejected: engines serve what can't be trained."""
        if not self._rejected:
            return False
        return max(self._rejected) > max(self._proven, default=-1)

    def rejected(self, versions: Iterable[PolicyVersion]) -> bool:
        """Whether one of the versions was rejected."""
        return not self._rejected.isdisjoint(versions)

    def awaited(self, versions: Iterable[PolicyVersion]) -> set[PolicyVersion]:
        """Those of the versions that are not settled."""
        return set(versions) - self._proven - self._rejected if self.required else set()

    def versions_of(self, group: Group) -> frozenset[PolicyVersion]:
        """Every version that sampled a token of the group, trained or not; none without need."""
        if not self.required:
            return frozenset()
        found = {int(v) for sample in group.samples for v in np.unique(sample.versions)}
        return frozenset(found - {NOT_SAMPLED})

    def state(self) -> dict[str, Any]:
        """What has been settled, as builtins."""
        return {"proven": sorted(self._proven), "rejected": sorted(self._rejected)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._proven, self._rejected = set(state["proven"]), set(state["rejected"])
