"""Staleness, exactly: pure arithmetic, no state.

``take(version=v)`` hands out a batch that will be applied to weights v; a token's staleness is v
minus the version of the weights that sampled it. Two rules keep it within ``max_staleness``:

- *Admission* bounds what is started. While the engine serves version s, at most
  ``(s + 1 + max_staleness) * groups_per_step`` groups, less those dropped, have been started:
  enough for every step that may still train on tokens of version s, and no more.
- *Taking* enforces the bound. A straggler may finish late; what is too old is dropped, counted,
  and its place is given to another.
"""

import numpy as np
from jaxtyping import Int

from primerl.types import Group


def may_start(
    *, started: int, dropped: int, served: int, groups_per_step: int, max_staleness: int
) -> bool:
    """Whether one more group may be started.

    ``started - dropped < (served + 1 + max_staleness) * groups_per_step``, with ``served`` the
    version that the slowest engine serves.
    """
    return started - dropped < (served + 1 + max_staleness) * groups_per_step


def token_staleness(versions: Int[np.ndarray, " t"], *, version: int) -> Int[np.ndarray, " t"]:
    """The staleness of each token, in policy steps: ``version - versions``."""
    return version - versions


def oldest_version(group: Group) -> int | None:
    """The version of the group's oldest trained token; None where it has none to train."""
    versions = group.versions
    return int(versions.min()) if len(versions) else None


def check_schedule(*, publish_every: int, max_staleness: int, groups_per_step: int) -> None:
    """Refuse a schedule that could only stand still.

    Raises:
        ValueError: a count is out of range, or the trainer would reach the bound before it
            publishes: ``publish_every > max_staleness + 1``.
    """
    if max_staleness < 0:
        raise ValueError(
            f"max_staleness is {max_staleness}, expected 0 (synchronous) or more policy steps"
        )
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}, expected at least 1")
    if publish_every < 1:
        raise ValueError(f"publish_every is {publish_every}, expected at least 1 policy step")
    if publish_every > max_staleness + 1:
        raise ValueError(
            f"publish_every={publish_every} with max_staleness={max_staleness}: after "
            f"{max_staleness + 1} steps every rollout is too old and none can be replaced; "
            f"publish at least every {max_staleness + 1} steps, or raise max_staleness to "
            f"{publish_every - 1}"
        )
