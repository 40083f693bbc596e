"""Why a step can't be filled: what no waiting could mend, and what waiting did not bring.

A wait for a step makes progress only where one more group is there that the step can use. Groups
that are refused, too old, too new or failed make none, however many there are, so no mixture of
them can keep a trainer waiting past its deadline.
"""

import time
from collections import Counter

import attrs

from primerl.rollout.collection.buffer import Buffer
from primerl.types import PolicyVersion


def unfillable(
    version: PolicyVersion, *, served: PolicyVersion, buffer: Buffer, drawn_out: bool
) -> str | None:
    """Why no waiting could fill the step ``version``, now that ``buffer`` can't; None where it may.

    Args:
        version: of the step, for which ``buffer.reserve`` has just found too few groups.
        served: the version that engines serve.
        buffer: of the worker.
        drawn_out: there is no further task.
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
    if buffer.in_flight or buffer.awaited or buffer.proofs.halted:
        return None
    if drawn_out:
        return "the tasks ran out and could not be iterated again; pass a list, not an iterator"
    if not buffer.may_start(served=served):
        return (
            f"{buffer.trained} groups were taken since version {buffer.first_version}, "
            f"{buffer.buffered} of {buffer.groups_per_step} are there, and while the engine serves "
            f"version {served} the bound lets no other start; take one step of each version, and "
            "publish before the next"
        )
    return None


def _copy(counts: Counter[str]) -> Counter[str]:
    return counts.copy()


@attrs.define
class Wait:
    """A wait for the groups of a step, whose deadline each further usable group moves.

    Args:
        timeout_s: how long it may see none.
        dropped: of the buffer, when it began.
    """

    timeout_s: float
    dropped: Counter[str] = attrs.field(converter=_copy)
    _ready: int = 0
    _since: float = attrs.Factory(time.monotonic)

    def look(self, ready: int) -> bool:
        """Take note of how many groups the step can use; returns whether there is still time."""
        if ready > self._ready:
            self._since = time.monotonic()
        self._ready = ready
        return time.monotonic() - self._since <= self.timeout_s

    def describe(self, buffer: Buffer, served: PolicyVersion) -> str:
        """What became of the groups meanwhile."""
        lost = dict(buffer.dropped - self.dropped)
        text = (
            f"{buffer.in_flight} groups are in flight, {buffer.buffered} buffered, and {lost} "
            f"were dropped meanwhile; the engine serves version {served}"
        )
        refused = {name: count for name, count in lost.items() if name in buffer.filters}
        if refused:
            names = ", ".join(f"{name!r} refused {count}" for name, count in refused.items())
            text += f"; of the filters, {names}"
        if buffer.proofs.halted:
            text += "; the newest version was rejected: publish it again and settle that"
        if buffer.awaited:
            counts = ", ".join(f"{n} for version {v}" for v, n in buffer.awaited.items())
            text += f"; groups that wait for proof: {counts}: call settle(version, proven=...)"
        return text
