"""The bound and the accounts, by hand and over random schedules."""

import functools
import random

import numpy as np
import pytest
from attrs import evolve
from conftest import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import filters, rollout


@pytest.mark.parametrize(
    ("started", "dropped", "served", "may"),
    [
        (0, 0, 0, True),
        (11, 0, 0, True),  # (0 + 1 + 2) * 4 = 12 may be started before anything is published
        (12, 0, 0, False),
        (12, 1, 0, True),  # a dropped group gives its place to another
        (12, 0, 1, True),
        (16, 0, 1, False),
    ],
)
def test_admission_by_hand(started, dropped, served, may):
    assert (
        rollout.may_start(
            started=started, dropped=dropped, served=served, groups_per_step=4, max_staleness=2
        )
        is may
    )


def test_staleness_is_counted_for_each_token():
    versions = np.array([3, 4, 5], np.int32)

    assert rollout.token_staleness(versions, version=5).tolist() == [2, 1, 0]
    assert rollout.oldest_version(make_group(version=3)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"groups_per_step": 0}, "groups_per_step is 0"),
        ({"publish_every": 0}, "publish_every is 0"),
        ({"publish_every": 4}, "publish at least every 3 steps, or raise max_staleness to 3"),
    ],
)
def test_a_schedule_that_would_stand_still_is_refused(change, message):
    schedule = {"publish_every": 3, "max_staleness": 2, "groups_per_step": 1}

    rollout.check_schedule(**schedule)
    with pytest.raises(ValueError, match=message):
        rollout.check_schedule(**(schedule | change))


def test_take_returns_the_oldest_version_first():
    buffer = rollout.Buffer(groups_per_step=2, max_staleness=3)
    for version, name in [(2, "c"), (0, "a"), (1, "b"), (1, "late b")]:
        buffer.start()
        buffer.put(make_group(version=version, task_id=name))

    assert [group.task_id for group in buffer.take(version=3)] == ["a", "b"]
    assert [group.task_id for group in buffer.take(version=3)] == ["late b", "c"]
    assert buffer.take(version=3) is None


def test_take_drops_what_is_too_old_even_if_most_of_it_is_fresh():
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=1)
    for version in (0, 1):
        buffer.start()
        buffer.put(make_group(version=version))

    (group,) = buffer.take(version=2)

    assert group.versions.tolist() == [1] * 8
    assert buffer.dropped == {"stale": 1}


def test_filters_and_empty_groups_count_under_their_names():
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=1, keep=[filters.has_signal])
    for _ in range(4):
        buffer.start()

    assert buffer.put(make_group([0.0, 1.0]))
    assert not buffer.put(make_group([1.0, 1.0]))
    assert not buffer.put(make_group([]))
    buffer.drop("failed")

    assert buffer.dropped == {"has_signal": 1, "empty": 1, "failed": 1}
    assert buffer.in_flight == 0
    with pytest.raises(ValueError, match="never started"):
        buffer.put(make_group())


@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    publish_every=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_over_random_schedules_the_bound_holds_and_the_accounts_balance(
    seed, max_staleness, groups_per_step, publish_every
):
    """Groups start, gain tokens under whatever is served, end, fail and are taken, at random."""
    publish_every = min(publish_every, max_staleness + 1)
    events = random.Random(seed)
    buffer = rollout.Buffer(
        groups_per_step=groups_per_step, max_staleness=max_staleness, keep=[filters.has_signal]
    )
    served = trainer = 0
    running: list[list[int]] = []  # the version of each of a group's tokens so far
    for _ in range(250):
        event = events.random()
        if event < 0.35 and buffer.may_start(served=served):
            buffer.start()
            running.append([served])
        elif event < 0.6 and running:
            events.choice(running).append(served)
        elif event < 0.85 and running:
            versions = running.pop(events.randrange(len(running)))
            fate = events.random()
            if fate < 0.1:
                buffer.drop("failed")
            else:
                rewards = [1.0, 1.0] if fate < 0.25 else [0.0, 1.0]
                buffer.put(group_of(versions, rewards))
        else:
            groups = buffer.take(version=trainer)
            if groups is not None:
                assert len(groups) == groups_per_step
                for group in groups:
                    staleness = rollout.token_staleness(group.versions, version=trainer)
                    assert staleness.max() <= max_staleness
                    assert staleness.min() >= 0
                trainer += 1
                if trainer % publish_every == 0:
                    served = trainer
        assert buffer.in_flight == len(running)
        assert buffer.started == (
            buffer.trained + buffer.dropped.total() + buffer.in_flight + buffer.buffered
        )
        assert trainer - served <= max_staleness


@functools.cache
def cached_group(version):
    return make_group(version=version)


def group_of(versions, rewards):
    group = make_group(rewards)

    def versioned(sample):
        at = np.resize(np.array(versions, np.int32), 4)
        at[0] = versions[0]
        full = sample.versions.copy()
        full[sample.loss_mask] = at
        return evolve(sample, versions=full)

    rollouts = [
        evolve(one, samples=[versioned(sample) for sample in one.samples]) for one in group.rollouts
    ]
    return evolve(group, rollouts=rollouts)


@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 3), size=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_a_schedule_never_stands_still(seed, max_staleness, size):
    """Whatever ends, and in whatever order, the next step can always be filled."""
    events = random.Random(seed)
    buffer = rollout.Buffer(groups_per_step=size, max_staleness=max_staleness)
    served = trainer = 0
    running: list[int] = []
    for _ in range(500):
        while buffer.may_start(served=served):
            buffer.start()
            running.append(served)
        if running and events.random() < 0.7:
            version = running.pop(events.randrange(len(running)))
            if events.random() < 0.2:
                buffer.drop("failed")
            else:
                buffer.put(cached_group(version))
        elif buffer.take(version=trainer) is not None:
            trainer += 1
            served = trainer
        elif not running:
            assert buffer.may_start(served=served), "nothing runs and nothing may start"
    assert trainer > 5
