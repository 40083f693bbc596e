import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from primerl.weights.transports.publications import delta

BYTES = arrays(np.uint8, st.integers(0, 400))


def changed(old, positions, values):
    new = old.copy()
    new[positions] = values
    return new


def applied(encoded, old):
    target = old.copy()
    delta.apply(encoded, target)
    return target


def as_bytes(*words):
    return np.array(words, dtype="<u2").view(np.uint8)


def test_the_format_by_hand():
    """Words 1 and 300 of 400 change: by +1 (zigzag 2) and by -2 (zigzag 3)."""
    old = np.zeros(800, dtype=np.uint8)
    new = old.copy().view("<u2")
    new[1], new[300] = 1, 0xFFFE
    new = new.view(np.uint8)
    header = np.array([800, 2, 3], dtype="<u8").view(np.uint8).tolist()
    # Gaps 1 and 298 = 2 * 128 + 42.
    assert delta.encode(old, new).tolist() == [*header, 1, 42 | 128, 2, 2, 3]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), old=BYTES)
def test_applying_a_difference_gives_the_new_bytes(data, old):
    """Any bytes: so any NaN payload and -0.0, whatever the element type."""
    size = len(old)
    count = data.draw(st.integers(0, min(size, 8)))
    at = data.draw(st.lists(st.integers(0, max(size - 1, 0)), min_size=count, max_size=count))
    values = data.draw(st.lists(st.integers(0, 255), min_size=count, max_size=count))
    new = changed(old, np.array(at, dtype=int), np.array(values, dtype=np.uint8))
    encoded = delta.encode(old, new)
    if encoded is not None:
        assert len(encoded) < size
        np.testing.assert_array_equal(applied(encoded, old), new)


@pytest.mark.parametrize("word", [0x7FC0, 0x7FC1, 0xFFC1, 0x8000, 0x0000, 0xFF80, 0x0001, 0xFFFF])
@pytest.mark.parametrize("before", [0x7FC0, 0x8000, 0x0000, 0x3F80])
def test_nans_and_signed_zeros_are_exact(word, before):
    old = as_bytes(*[before] * 50)
    new = as_bytes(*[before] * 49, word)
    np.testing.assert_array_equal(applied(delta.encode(old, new), old), new)


@pytest.mark.parametrize("size", [10**6 + 1, 3 * 10**6])
@pytest.mark.parametrize("fraction", [0.0, 1e-6, 0.004, 0.1, 1.0])
def test_gaps_of_every_size(size, fraction):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    some = rng.random(size) < fraction
    some[-1] |= fraction > 0  # the last byte, alone in its word
    new = changed(old, some, rng.integers(0, 256, some.sum(), dtype=np.uint8))
    encoded = delta.encode(old, new)
    if fraction == 1.0:
        assert encoded is None, "the tensor is smaller than its difference"
    else:
        np.testing.assert_array_equal(applied(encoded, old), new)


def test_a_change_costs_about_three_bytes():
    """0.4% of the words, each by a small step: the usual gap needs one or two bytes."""
    rng = np.random.default_rng(0)
    old = rng.integers(1000, 30000, 10**6).astype("<u2")
    some = rng.random(len(old)) < 0.004
    new = np.where(some, old + 1, old).astype("<u2")
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8))
    assert len(encoded) / some.sum() < 2.7


def test_an_empty_tensor_and_one_without_changes():
    empty = np.zeros(0, dtype=np.uint8)
    assert delta.encode(empty, empty) is None  # nothing is smaller than nothing
    same = np.arange(100, dtype=np.uint8)
    np.testing.assert_array_equal(applied(delta.encode(same, same), same), same)


def test_two_lengths_are_refused():
    with pytest.raises(ValueError, match="3 and 4"):
        delta.encode(np.zeros(3, np.uint8), np.zeros(4, np.uint8))


def encoded_example(size=2001):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    at = np.array([0, 7, 900, size - 1])
    return old, delta.encode(old, changed(old, at, old[at] ^ 0x55))


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_stays_inside_and_never_half_applies(data):
    """Guard bytes around the target stay; a refusal leaves the target as it was."""
    old, encoded = encoded_example()
    damaged = encoded.copy()
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    room = np.full(len(old) + 64, 0xAB, dtype=np.uint8)
    target = room[32:-32]
    target[:] = old
    try:
        delta.apply(damaged, target)
    except ValueError:
        np.testing.assert_array_equal(target, old)
    assert (room[:32] == 0xAB).all()
    assert (room[-32:] == 0xAB).all()


def test_each_kind_of_damage_has_its_own_message():
    old, encoded = encoded_example()

    def header(size=None, count=None, gaps=None):
        damaged = encoded.copy()
        for at, value in enumerate((size, count, gaps)):
            if value is not None:
                damaged[8 * at : 8 * at + 8] = np.array([value], dtype="<u8").view(np.uint8)
        return damaged

    def refused(damaged, why):
        with pytest.raises(ValueError, match=why):
            applied(damaged, old)

    refused(encoded[:10], "truncated")
    refused(encoded[:-1], "3 numbers, 4 expected")
    refused(header(size=2003), "2003 bytes, the tensor has 2001")
    refused(header(count=5), "5 expected")
    refused(header(count=2**63), "expected")
    refused(header(gaps=10**6), "truncated")
    beyond = encoded.copy()
    beyond[24 + 2] = 0xFF  # the second digit of a gap
    refused(beyond, "changes word|numbers|is damaged")
    wide = np.concatenate([encoded[:24], np.full(9, 0x80, np.uint8), encoded[24:]])
    wide[16] += 9
    refused(wide, "an encoded integer has")
