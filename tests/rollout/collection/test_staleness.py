"""The staleness bound and the counts of groups, by hand and over random schedules."""

import functools
import random

import numpy as np
import pytest
from attrs import evolve
from conftest import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import filters, rollout
from primerl.rollout.collection.staleness import check_schedule, may_start, oldest_version


@pytest.mark.parametrize(
    ("started", "dropped", "served", "may"),
    [
        (0, 0, 0, True),
        (11, 0, 0, True),  # (0 + 1 + 2) * 4 = 12 may be started before anything is published
        (12, 0, 0, False),
        (12, 1, 0, True),  # a dropped group is replaced
        (12, 0, 1, True),
        (16, 0, 1, False),
    ],
)
def test_admission_by_hand(started, dropped, served, may):
    assert (
        may_start(
            started=started, dropped=dropped, served=served, groups_per_step=4, max_staleness=2
        )
        is may
    )


def test_a_group_is_as_old_as_its_oldest_token_to_be_trained():
    assert oldest_version(make_group(version=3)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"groups_per_step": 0}, "groups_per_step is 0"),
        ({"publish_every": 0}, "publish_every is 0"),
        ({"publish_every": 4}, "publish at least every 3 steps, or raise max_staleness to 3"),
    ],
)
def test_a_schedule_that_would_stall_is_refused(change, message):
    schedule = {"publish_every": 3, "max_staleness": 2, "groups_per_step": 1}

    check_schedule(**schedule)
    with pytest.raises(ValueError, match=message):
        check_schedule(**(schedule | change))


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


@pytest.mark.thorough
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
                    staleness = trainer - group.versions
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


def test_steps_are_counted_from_the_first_take():
    """A run that was resumed at step 100 starts no burst of groups."""
    buffer = rollout.Buffer(groups_per_step=2, max_staleness=1)

    def start_all(served):
        count = 0
        while buffer.may_start(served=served):
            buffer.start()
            buffer.put(make_group(version=served))
            count += 1
        return count

    assert start_all(100) == 4
    assert len(buffer.take(version=100)) == 2
    assert start_all(100) == 0
    assert start_all(101) == 2


def test_masking_trains_fresh_tokens_and_drops_groups_without_any():
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=1, on_stale="mask_tokens")
    for versions in ([0, 1, 2, 2], [0, 0, 0, 0]):
        buffer.start()
        buffer.put(group_of(versions, [0.0, 1.0]))

    (group,) = buffer.take(version=2)

    assert group.versions.tolist() == [1, 2, 2] * 2
    assert group.rewards.tolist() == [0.0, 1.0]
    assert [sample.versions.tolist()[3:] for sample in group.samples] == [[0, 1, 2, 2]] * 2
    assert buffer.masked_tokens == 2
    assert buffer.dropped == {"stale": 1}
    assert buffer.tokens == {"trained": 6, "stale": 8}


def test_a_sample_without_a_fresh_token_leaves_its_rollout_but_not_its_reward():
    fresh, old = (
        rollout_of.rollouts[0] for rollout_of in (make_group(version=2), make_group(version=0))
    )
    mixed = evolve(make_group(), rollouts=[fresh, old])
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=1, on_stale="mask_tokens")
    buffer.start()
    buffer.put(mixed)

    (group,) = buffer.take(version=2)

    assert [len(one.samples) for one in group.rollouts] == [1, 0]
    assert len(group.rewards) == 2


def test_waiting_takes_stragglers_before_they_are_too_old():
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=1, on_stale="wait")
    for _ in range(2):
        buffer.start()
    buffer.put(make_group(version=1))

    assert buffer.take(version=1, in_flight=[0]) is None  # it would be too old at step 2
    buffer.put(make_group(version=0, task_id="straggler"))
    (group,) = buffer.take(version=1, in_flight=[])

    assert group.task_id == "straggler"
    assert buffer.dropped == {}


@pytest.mark.thorough
@given(
    seed=st.integers(0, 2**32), max_staleness=st.integers(0, 4), groups_per_step=st.integers(1, 4)
)
@settings(max_examples=60, deadline=None)
def test_with_waiting_no_group_is_ever_stale(seed, max_staleness, groups_per_step):
    events = random.Random(seed)
    buffer = rollout.Buffer(
        groups_per_step=groups_per_step, max_staleness=max_staleness, on_stale="wait"
    )
    first = served = trainer = events.randrange(3)
    running: list[int] = []
    for _ in range(300):
        event = events.random()
        if event < 0.4 and buffer.may_start(served=served):
            buffer.start()
            running.append(served)
        elif event < 0.6 and running:
            version = running.pop(events.randrange(len(running)))
            buffer.put(cached_group(version)) if events.random() < 0.9 else buffer.drop("failed")
        elif event > 0.6:
            if (groups := buffer.take(version=trainer, in_flight=running)) is not None:
                assert all((trainer - group.versions <= max_staleness).all() for group in groups)
                trainer += 1
                served = trainer
            elif not running:
                assert buffer.may_start(served=served), "waiting would never end"
    assert "stale" not in buffer.dropped
    assert buffer.trained == (trainer - first) * groups_per_step


def test_a_buffer_is_restored_with_its_groups_and_counts():
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=2)
    for version in (0, 1, 1):
        buffer.start()
        buffer.put(make_group(version=version))
    buffer.take(version=1)
    for _ in range(2):
        buffer.start()
    buffer.drop("failed", tokens=7)

    again = rollout.Buffer(groups_per_step=1, max_staleness=2)
    again.restore(buffer.state())

    assert (again.trained, again.buffered, again.in_flight) == (1, 2, 0)
    assert again.started == buffer.started - 1  # the one in flight is started again
    assert again.dropped == {"failed": 1}
    assert again.tokens == {"trained": 8, "failed": 7}
    (group,) = again.take(version=2)
    np.testing.assert_array_equal(group.versions, make_group(version=1).versions)
    with pytest.raises(ValueError, match="groups_per_step=1, not 2"):
        rollout.Buffer(groups_per_step=2, max_staleness=2).restore(buffer.state())


def test_groups_of_weights_newer_than_the_trainers_are_dropped_by_name():
    """A run that was rolled back to an older checkpoint, with the state of a later one."""
    buffer = rollout.Buffer(groups_per_step=1, max_staleness=2)
    for version in (7, 3):
        buffer.start()
        buffer.put(make_group(version=version))

    (group,) = buffer.take(version=3)

    assert set(group.versions.tolist()) == {3}
    assert buffer.dropped == {"future": 1}
    assert buffer.tokens == {"future": 8, "trained": 8}


def test_an_unknown_on_stale_is_refused():
    with pytest.raises(ValueError, match="on_stale='ignore'; expected one of drop, wait"):
        rollout.Buffer(groups_per_step=1, max_staleness=1, on_stale="ignore")


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


@pytest.mark.thorough
@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 3), size=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_a_schedule_never_stalls(seed, max_staleness, size):
    """Whichever groups end, in whatever order, the next step can always be filled."""
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


@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 3),
    on_stale=st.sampled_from(["drop", "wait", "mask_tokens"]),
    verify=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_group_is_counted_once_whatever_happens_to_deliveries(seed, bound, on_stale, verify):
    """Versions that are late, duplicate or go back, lost deliveries, rejections and restarts."""
    events = random.Random(seed)
    plan = {"groups_per_step": 2, "max_staleness": bound, "on_stale": on_stale}
    plan |= {
        "await_verification": verify,
        "keep": [lambda group: events.random() < 0.8],
    }
    buffer, version, flying, reserved, delivered = rollout.Buffer(**plan), 3, 0, None, 0
    for _ in range(150):
        event = events.random()
        if event < 0.3:
            buffer.start()
            flying += 1
        elif event < 0.5 and flying:
            buffer.put(cached_group(max(0, version + events.randint(-4, 2))))
            flying -= 1
        elif event < 0.55 and flying:
            buffer.drop("failed")
            flying -= 1
        elif event < 0.75:
            step = version + events.choice([0, 0, 0, -2, 1])
            reserved = buffer.reserve(step, in_flight=[version] * flying)
            for group in reserved or ():
                assert step - bound <= group.versions.min()
                assert group.versions.max() <= step
        elif event < 0.85:
            buffer.deliver()
            delivered += len(reserved or ())
            reserved = None
            version += 1
        elif event < 0.9:
            buffer.give_back()
            reserved = None
        elif event < 0.95 and verify:
            buffer.mark_version(
                max(0, version - events.randint(0, 3)), verified=events.random() < 0.7
            )
        elif event > 0.97:
            state, buffer = buffer.state(), rollout.Buffer(**plan)
            buffer.restore(state)
            flying, reserved = 0, None
        ended = buffer.trained + buffer.dropped.total() + buffer.buffered
        assert buffer.started == ended + flying
        assert buffer.in_flight == flying
        assert buffer.trained == delivered
        assert buffer.tokens["trained"] <= 8 * delivered
