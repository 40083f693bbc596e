"""Verification of versions: whether an engine that reports a version really serves its weights."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from primerl.types import NOT_SAMPLED, Group, PolicyVersion

UNVERIFIED = "unverified"
"""The name under which groups with tokens of a rejected version are counted."""


class VersionVerification:
    """The sets of verified and rejected versions; all other versions are provisional.

    Args:
        required: whether versions must be verified. If False, every version counts as verified;
            if None, verification is required from the first ``mark`` on.
    """

    def __init__(self, *, required: bool | None) -> None:
        self.required = required
        self._verified: set[PolicyVersion] = set()
        self._rejected: set[PolicyVersion] = set()

    def mark(self, version: PolicyVersion, *, verified: bool) -> None:
        """Record whether a version is verified or rejected; a later call replaces the outcome.

        Raises:
            ValueError: no verification is required.
        """
        if self.required is False:
            raise ValueError(
                "await_verification=False: every version counts as verified, so none can be marked"
            )
        self.required = True
        if verified:
            self._verified.add(version)
            self._rejected.discard(version)
        else:
            self._rejected.add(version)
            self._verified.discard(version)

    @property
    def newest_rejected(self) -> bool:
        """Whether the newest marked version was rejected: then nothing may be sampled."""
        if not self._rejected:
            return False
        return max(self._rejected) > max(self._verified, default=-1)

    def any_rejected(self, versions: Iterable[PolicyVersion]) -> bool:
        """Return whether one of the versions was rejected."""
        return not self._rejected.isdisjoint(versions)

    def provisional(self, versions: Iterable[PolicyVersion]) -> set[PolicyVersion]:
        """Return the versions that are neither verified nor rejected yet."""
        return set(versions) - self._verified - self._rejected if self.required else set()

    def versions_of(self, group: Group) -> frozenset[PolicyVersion]:
        """Return every version that sampled a token of the group; none if ``required`` is False."""
        if self.required is False:
            return frozenset()
        found = {int(v) for sample in group.samples for v in np.unique(sample.versions)}
        return frozenset(found - {NOT_SAMPLED})

    def state(self) -> dict[str, Any]:
        """Return the outcomes, as values of built-in types."""
        return {
            "required": self.required,
            "verified": sorted(self._verified),
            "rejected": sorted(self._rejected),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``."""
        self._verified, self._rejected = set(state["verified"]), set(state["rejected"])
        if self.required is None:
            self.required = state["required"]
