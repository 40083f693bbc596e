"""Which rank owns which layer."""

from hypothesis import given
from hypothesis import strategies as st

from primerl._common.owned_layers import owner_of_each


def test_large_layers_are_given_first_to_the_owner_with_the_fewest_bytes():
    assert owner_of_each([1, 5, 3, 4], [0, 1]) == [0, 0, 1, 1]
    assert owner_of_each([5, 4, 3, 2], [0, 7]) == [0, 7, 7, 0]


def test_fewer_layers_than_owners_are_spread_over_all_hosts():
    """Four layers, on four hosts of eight ranks."""
    assert sorted(owner_of_each([9, 9, 9, 9], range(32))) == [0, 8, 16, 24]


def test_one_owner_has_all():
    assert owner_of_each([3, 1, 2], [0]) == [0, 0, 0]


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    owners=st.lists(st.integers(0, 200), min_size=1, max_size=60, unique=True).map(sorted),
)
def test_shares_differ_by_at_most_the_largest_layer(sizes, owners):
    found = owner_of_each(sizes, owners)
    held = {}
    for size, owner in zip(sizes, found, strict=True):
        held[owner] = held.get(owner, 0) + size
    assert set(held) <= set(owners)
    assert owners[0] in held
    assert len(held) == min(len(owners), len(sizes))
    assert max(held.values()) - min(held.values()) <= max(sizes)
