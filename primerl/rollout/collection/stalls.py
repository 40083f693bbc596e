"""Reasons why a step can't be filled: found at once, or after a timeout without progress.

A wait makes progress only when one more group is ready that the step can use. Groups that are
refused, too old, too new or failed are not progress, however many there are, so they can't keep a
trainer waiting past its deadline.
"""

from collections import Counter

import attrs

from primerl.rollout.collection.buffer import Buffer
from primerl.rollout.processes.running_clock import running_time
from primerl.types import PolicyVersion


def unfillable(
    version: PolicyVersion,
    *,
    served: PolicyVersion,
    buffer: Buffer,
    tasks_exhausted: bool,
    max_refused: int,
) -> str | None:
    """Return why waiting could never fill step ``version``; None if it might.

    ``buffer.reserve`` has just found too few groups for the step; engines serve version ``served``.
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
            f"{served}) if the trainer has those weights, or resume from the checkpoint of "
            f"version {served}; to train from version {version}, restart the servers, create a "
            "new engine and publish to it"
        )
    if buffer.refusals.in_a_row >= max_refused:
        return (
            f"{buffer.refusals.describe()} and kept none; {buffer.refusals.describe_rewards()}. "
            "Expected groups that the filters keep; has_signal keeps groups whose rewards differ. "
            "If all rewards are low, check that the reward parses the replies correctly and that "
            "replies are not cut (max_tokens); then use easier tasks, give partial rewards, begin "
            "with supervised fine-tuning, or make groups larger. If all rewards are high, use "
            "harder tasks. If filters are meant to keep so few groups, raise max_refused "
            f"({max_refused})"
        )
    if buffer.in_flight or buffer.awaiting_verification or buffer.verification.newest_rejected:
        return None
    if tasks_exhausted:
        return "the tasks ran out and can't be iterated again; pass a list, not an iterator"
    if not buffer.may_start(served=served):
        return (
            f"{buffer.trained} groups were taken since version {buffer.first_version}, "
            f"{buffer.buffered} of {buffer.groups_per_step} are buffered, and while the engine "
            f"serves version {served} the staleness bound admits no others; take one step per "
            "version, and publish before the next step"
        )
    return None


@attrs.define
class StallTimer:
    """Measures how long a step has waited without progress."""

    timeout_s: float
    dropped: Counter[str]
    """The buffer's counts of dropped groups at the beginning of the wait."""
    _ready: int = 0
    _since: float = attrs.Factory(running_time)

    def update(self, ready: int) -> bool:
        """Record how many groups the step can use; return whether there is time left."""
        if ready > self._ready:
            self._since = running_time()
        self._ready = ready
        return running_time() - self._since <= self.timeout_s

    def describe(self, buffer: Buffer, served: PolicyVersion) -> str:
        """Return what happened to the groups during the wait, for an error message."""
        lost = dict(buffer.dropped - self.dropped)
        text = (
            f"{buffer.in_flight} groups are in flight, {buffer.buffered} buffered, and {lost} "
            f"were dropped meanwhile; the engine serves version {served}"
        )
        refused = {name: count for name, count in lost.items() if name in buffer.filters}
        if refused:
            names = ", ".join(f"{name!r} refused {count}" for name, count in refused.items())
            text += f"; filters: {names}; {buffer.refusals.describe_rewards()}"
        if buffer.verification.newest_rejected:
            text += "; the newest version was rejected: publish it again and verify it"
        if waiting := buffer.awaiting_verification:
            counts = ", ".join(f"{n} for version {v}" for v, n in waiting.items())
            text += (
                f"; groups that wait for verification: {counts}: "
                "call mark_version(version, verified=...)"
            )
        return text
