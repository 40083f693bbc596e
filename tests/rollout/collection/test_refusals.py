import logging

from conftest import make_group

from primerl import filters
from primerl.rollout.collection.buffer import Buffer


def put(buffer, *rewards):
    buffer.start()
    return buffer.put(make_group(rewards, version=0))


def test_a_steps_worth_of_refused_groups_is_said_once_with_its_rewards(caplog):
    buffer = Buffer(groups_per_step=5, max_staleness=1, keep=[filters.has_signal])
    with caplog.at_level(logging.WARNING):
        for reward in [0.0, 0.0, 0.25, 0.0]:
            assert not put(buffer, reward, reward)
        assert caplog.messages == []
        for _ in range(20):
            assert not put(buffer, 0.0, 0.0)

    (said,) = caplog.messages
    assert said == (
        "filters refused 5 groups in a row ('has_signal' 5), and nothing is learned; "
        "rewards: 0 (8x), 0.25 (2x)"
    )


def test_a_group_that_is_kept_ends_the_row(caplog):
    buffer = Buffer(groups_per_step=5, max_staleness=1, keep=[filters.has_signal])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for _ in range(4):
                put(buffer, 0.0, 0.0)
            assert put(buffer, 0.0, 1.0)

    assert caplog.messages == []
    assert not buffer.refusals.filters


def test_of_many_rewards_the_most_frequent_are_named():
    buffer = Buffer(groups_per_step=50, max_staleness=1, keep=[lambda group: False])
    for reward in (0, 1, 1, 2, 3, 4, 5, 6):
        put(buffer, float(reward))

    said = buffer.refusals.describe_rewards()
    assert said == "rewards: 1 (2x), 0 (1x), 2 (1x), 3 (1x), 4 (1x) and 2 others"
