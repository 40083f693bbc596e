"""Why a step can't be filled: at once, or after waiting for too long.

A wait for a step makes progress only when one more group is ready that the step can use. Groups
that are refused, too old, too new or failed make none, however many they are, so no mixture of
them can keep a trainer waiting past its deadline.
"""

import time
from collections import Counter

import attrs

from primerl.rollout.collection.buffer import Buffer
from primerl.types import PolicyVersion


def unfillable(
    version: PolicyVersion,
    *,
    served: PolicyVersion,
    buffer: Buffer,
    tasks_exhausted: bool,
    max_refused: int,
) -> str | None:
    """Why no waiting could fill step ``version``; None if waiting might.

    ``buffer.reserve`` has just found too few groups for it, and engines serve version ``served``.
    """
    if version - served > buffer.max_staleness:
        return (
            f"the engine still serves version {served}, so any rollout would be "
            f"{version - served} steps stale, more than max_staleness={buffer.max_staleness}; "
            "publish weights after the optimizer step (and check that publishing succeeds)"
        )
    if served > version:
        return (
            f"the engine serves version {served}, newer than the weights of version {version} "
            f"that the step is for, so no further rollout could be used; call take(version="
            f"{served}) if those are the trainer's weights, or resume from the checkpoint of "
            f"version {served}; to train from version {version}, start a new engine (and its "
            "servers anew) and publish to it"
        )
    if buffer.refusals.in_a_row >= max_refused:
        return (
            f"{buffer.refusals.describe()} and kept none; {buffer.refusals.describe_rewards()}. "
            "Expected groups that the filters keep: has_signal wants rewards that differ within a "
            "group. Where all are low, see whether the reward reads the replies rightly, and they "
            "are not cut (max_tokens); then take easier tasks, give part of the reward for part of "
            "the work, begin with supervised fine-tuning, or make groups larger. Where all are "
            f"high, take harder tasks. Where so few are kept, raise max_refused ({max_refused})"
        )
    if buffer.in_flight or buffer.awaiting_verification or buffer.verification.newest_rejected:
        return None
    if tasks_exhausted:
        return "the tasks ran out and could not be iterated again; pass a list, not an iterator"
    if not buffer.may_start(served=served):
        return (
            f"{buffer.trained} groups were taken since version {buffer.first_version}, "
            f"{buffer.buffered} of {buffer.groups_per_step} are there, and while the engine serves "
            f"version {served} the bound admits no others; take one step of each version, and "
            "publish before the next"
        )
    return None


@attrs.define
class StallTimer:
    """Measures how long a step has waited without progress."""

    timeout_s: float
    dropped: Counter[str]
    """The buffer's counts at the beginning of the wait."""
    _ready: int = 0
    _since: float = attrs.Factory(time.monotonic)

    def update(self, ready: int) -> bool:
        """Record how many groups the step can use; returns whether there is time left."""
        if ready > self._ready:
            self._since = time.monotonic()
        self._ready = ready
        return time.monotonic() - self._since <= self.timeout_s

    def describe(self, buffer: Buffer, served: PolicyVersion) -> str:
        """What became of the groups during the wait."""
        lost = dict(buffer.dropped - self.dropped)
        text = (
            f"{buffer.in_flight} groups are in flight, {buffer.buffered} buffered, and {lost} "
            f"were dropped meanwhile; the engine serves version {served}"
        )
        refused = {name: count for name, count in lost.items() if name in buffer.filters}
        if refused:
            names = ", ".join(f"{name!r} refused {count}" for name, count in refused.items())
            text += f"; of the filters, {names}; {buffer.refusals.describe_rewards()}"
        if buffer.verification.newest_rejected:
            text += "; the newest version was rejected: publish it again and verify it"
        if waiting := buffer.awaiting_verification:
            counts = ", ".join(f"{n} for version {v}" for v, n in waiting.items())
            text += (
                f"; groups that wait for verification: {counts}: "
                "call mark_version(version, verified=...)"
            )
        return text
