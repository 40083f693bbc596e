"""The binary form of per-token arrays: what is written comes back, what is damaged is refused."""

import contextlib

import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays as array_of

from primerl.track.token_arrays import packed, types_of, unpacked


@st.composite
def arrays(draw):
    tokens = draw(st.integers(0, 40))
    names = draw(st.lists(st.text(max_size=5), min_size=1, max_size=5, unique=True))
    types = st.sampled_from([np.int32, np.float32, np.bool_])
    return {name: draw(array_of(draw(types), tokens)) for name in names}


def size_of(values):
    return len(next(iter(values.values())))


@given(arrays())
def test_arrays_come_back_bit_by_bit(values):
    found = unpacked(packed(values), types_of(values), size_of(values))

    assert list(found) == list(values)
    for name, array in values.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()  # NaN is not equal to itself
        assert found[name].flags.writeable


def test_the_format_by_hand():
    """Byte planes: the lowest bytes of all entries, then the second bytes, and so on."""
    values = {"a": np.array([0x04030201, 0x14131211], "<i4"), "b": np.array([True, False])}

    block = packed(values)

    content = bytes([0x01, 0x11, 0x02, 0x12, 0x03, 0x13, 0x04, 0x14, 1, 0])
    assert zstandard.ZstdDecompressor().decompress(block) == content
    assert types_of(values) == {"a": "<i4", "b": "|b1"}


VALUES = {"ids": np.arange(100, dtype=np.int32), "mask": np.arange(100) > 30}


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_block_is_refused(data):
    """Cut off, with further bytes, or with other bytes."""
    block = packed(VALUES)
    place = data.draw(st.integers(0, len(block) - 1))
    change = data.draw(st.integers(1, 255))
    damaged = data.draw(
        st.sampled_from(
            [
                block[:place],
                block + bytes([change]),
                block[:place] + bytes([block[place] ^ change]) + block[place + 1 :],
            ]
        )
    )

    found = VALUES  # a change without effect is possible, such as of an unused bit of the header
    with contextlib.suppress(ValueError):
        found = unpacked(damaged, types_of(VALUES), 100)
    for name, array in VALUES.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("types", "tokens", "message"),
    [
        ({"ids": "<i4"}, 100, "holds 500 bytes of arrays, expected 400"),
        (types_of(VALUES), 99, "holds 500 bytes of arrays, expected 495"),
        ({"ids": "|O8", "mask": "|b1"}, 100, r"types \['\|O8'\], expected <i4, <f4, \|b1"),
    ],
)
def test_a_block_of_other_arrays_is_refused(types, tokens, message):
    with pytest.raises(ValueError, match=message):
        unpacked(packed(VALUES), types, tokens)


def test_a_size_that_was_damaged_allocates_nothing():
    """The header of a frame of 1 TiB."""
    block = zstandard.FRAME_HEADER + b"\xe4" + (1 << 40).to_bytes(8, "little") + b"\x00" * 20

    with pytest.raises(ValueError, match="holds 1099511627776 bytes of arrays, expected 500"):
        unpacked(block, types_of(VALUES), 100)
