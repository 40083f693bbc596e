"""Arithmetic of staleness: pure functions without state.

``take(version=v)`` returns a batch that will be applied to weights v. A token's staleness is v
minus the version of the weights that sampled it. Two rules keep it within ``max_staleness``:

- *Admission* bounds what is started. While the engine serves version s, at most
  ``(s + 1 + max_staleness) * groups_per_step`` groups, less those dropped, have been started:
  just enough for every step that may still train on tokens of version s.
- *Taking* enforces the bound. A straggler may finish late; a group that is too old is dropped,
  counted and replaced.
"""

from collections.abc import Iterable

import attrs

from primerl.types import Group, PolicyVersion, Rollout, Sample


def may_start(
    *, started: int, dropped: int, served: int, groups_per_step: int, max_staleness: int
) -> bool:
    """Return whether one more group may be started.

    This is ``started - dropped < (served + 1 + max_staleness) * groups_per_step``, where ``served``
    is the version of the slowest server.
    """
    return started - dropped < (served + 1 + max_staleness) * groups_per_step


def must_wait(
    behind: Iterable[tuple[PolicyVersion, bool]],
    *,
    version: PolicyVersion,
    groups_per_step: int,
    max_staleness: int,
) -> bool:
    """Return whether step ``version``, if taken now, would leave more groups than can be trained.

    ``behind`` has a pair for each group that the step would leave behind: its oldest version, and
    whether the group may become ready only later.
    """
    any_late = False
    for position, (oldest, late) in enumerate(sorted(behind), start=1):
        any_late = any_late or late
        steps_left = oldest + max_staleness - version
        if any_late and position > steps_left * groups_per_step:
            return True
    return False


def oldest_version(group: Group) -> PolicyVersion | None:
    """Return the version of the group's oldest token to be trained; None without such a token."""
    versions = group.versions
    return int(versions.min()) if len(versions) else None


def without_stale_tokens(group: Group, oldest: PolicyVersion) -> Group:
    """Return the group with tokens before ``oldest`` masked, and without emptied samples."""
    return attrs.evolve(group, rollouts=[_only_fresh(one, oldest) for one in group.rollouts])


def check_schedule(*, publish_every: int, max_staleness: int, groups_per_step: int) -> None:
    """Check that a schedule does not stall.

    Raises:
        ValueError: a count is out of range, or the trainer would reach the staleness bound before
            it publishes: ``publish_every > max_staleness + 1``.
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


def _only_fresh(rollout: Rollout, oldest: PolicyVersion) -> Rollout:
    samples: list[Sample] = []
    for sample in rollout.samples:
        mask = sample.loss_mask & (sample.versions >= oldest)
        if mask.any():
            samples.append(attrs.evolve(sample, loss_mask=mask))
    return attrs.evolve(rollout, samples=samples)
