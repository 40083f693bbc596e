import pytest
from conftest import make_group

from primerl import filters


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.5], False), ([], False), ([0, 0, 1e-9], True)],
)
def test_has_signal_keeps_groups_whose_rewards_differ(rewards, kept):
    assert filters.has_signal(make_group(rewards)) is kept
