import itertools
import math
import struct

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.replay import codec
from primerl.replay.codec import _comparators

PROLOGUE = "<8sQIIIII"


def random_rows(tokens, layers, k, experts, *, seed=0, skew=0.0, missing=0.0):
    """Sets of k experts, in any order; with skew, expert e of layer l has weight (e + l)^-skew."""
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(tokens, layers, experts))
    place = (np.arange(experts) + 7 * np.arange(layers)[:, None]) % experts
    rows = np.argsort(noise - skew * np.log(1 + place), axis=-1)[..., -k:].astype(np.int16)
    rows[rng.random((tokens, layers)) < missing] = -1
    return rows


def hand_made(columns, *, tokens, layers, k, experts, chunk_tokens, order=b"", bits=b""):
    """Encoded routes of one chunk, written by the description of the format alone."""
    frame = zstandard.ZstdCompressor().compress(bits + columns)
    head = struct.pack(
        PROLOGUE, b"routes\0\1", tokens, layers, k, experts, chunk_tokens, int(bool(order))
    )
    head += order + struct.pack("<IQ", len(frame), xxhash.xxh3_64_intdigest(frame))
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + frame


def with_prologue(data, **changes):
    """The data with other numbers in the head, and a checksum that agrees with them."""
    names = ["magic", "tokens", "layers", "k", "experts", "chunk_tokens", "by_popularity"]
    values = dict(zip(names, struct.unpack_from(PROLOGUE, data), strict=True)) | changes
    size = struct.calcsize(PROLOGUE)
    head = struct.pack(PROLOGUE, *values.values()) + data[size : size + 12]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + data[size + 20 :]


def test_hand_made_bytes_of_one_layer():
    # Sets {1, 4} and {0, 2}: smallest ids 1 and 0, then gaps of 4 - 1 - 1 = 2 and 2 - 0 - 1 = 1.
    data = hand_made(bytes([1, 0, 2, 1]), tokens=2, layers=1, k=2, experts=5, chunk_tokens=9)
    assert codec.decode(data).tolist() == [[[1, 4]], [[0, 2]]]
    assert codec.decode(data).dtype == np.int16


def test_hand_made_bytes_with_two_layers_a_popularity_and_a_missing_set():
    # Columns go by place, then layer, then token; labels 0 1 2 of layer 0 are experts 2 0 1.
    columns = bytes([0, 1, 0, 0, 1, 0, 0, 1])
    data = hand_made(
        columns, tokens=2, layers=2, k=2, experts=3, chunk_tokens=2,
        order=bytes([2, 0, 1, 0, 1, 2]), bits=bytes([0b00100000]),
    )  # fmt: skip
    # Layer 0: labels {0, 2} and {1, 2}; layer 1: not recorded, {0, 2}.
    assert codec.decode(data).tolist() == [[[1, 2], [-1, -1]], [[0, 1], [0, 2]]]


def test_hand_made_bytes_with_ids_of_two_bytes():
    # {5, 300}: gaps 5 and 294 = 1 * 256 + 38.
    data = hand_made(bytes([5, 0, 38, 1]), tokens=1, layers=1, k=2, experts=400, chunk_tokens=1)
    assert codec.decode(data).tolist() == [[[5, 300]]]


def test_what_is_encoded_is_as_described():
    rows = np.array([[[4, 1]], [[2, 0]], [[-1, -1]]], np.int16)
    data = codec.encode(rows, experts=5)
    expected = struct.pack(PROLOGUE, b"routes\0\1", 3, 1, 2, 5, (1 << 19) // 2, 0)
    size = struct.calcsize(PROLOGUE)
    assert data[:size] == expected
    length, checksum, head_checksum = struct.unpack_from("<IQQ", data, size)
    chunk = data[size + 20 :]
    assert len(chunk) == length
    assert checksum == xxhash.xxh3_64_intdigest(chunk)
    assert head_checksum == xxhash.xxh3_64_intdigest(data[: size + 12])
    content = zstandard.ZstdDecompressor().decompress(chunk)
    assert content == bytes([0b00100000, 1, 0, 0, 2, 1, 0])


@settings(max_examples=50)
@given(st.data())
def test_round_trips_of_any_shape(data):
    k = data.draw(st.integers(1, 9))
    experts = data.draw(st.sampled_from([k, k + 1, 128, 256, 257, 2**15]).filter(lambda e: e >= k))
    tokens, layers = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    sets = [rng.choice(experts, k, replace=False) for _ in range(tokens * layers)]
    rows = np.array(sets, np.int64).reshape(tokens, layers, k)
    rows[rng.random((tokens, layers)) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))] = -1
    dtype = data.draw(st.sampled_from([np.int16, np.int32, np.int64]))
    encoded = codec.encode(rows.astype(dtype), experts=experts)
    first = data.draw(st.integers(0, tokens))
    last = data.draw(st.integers(first, tokens))
    expected = np.sort(rows, axis=-1)
    assert codec.decode(encoded).tolist() == expected.tolist()
    part = codec.decode(encoded, span=(first, last))
    assert part.tolist() == expected[first:last].tolist()
    assert part.dtype == np.int16
    assert part.shape == (last - first, layers, k)


@pytest.mark.parametrize(("experts", "k"), [(128, 8), (256, 8), (300, 6)])
def test_skewed_routes_are_numbered_by_popularity(experts, k):
    rows = random_rows(600, 2, k, experts, skew=1.5, missing=0.02)
    data = codec.encode(rows, experts=experts)
    head = codec.read_head(data, total=len(data))
    assert head.order is not None
    # The most popular expert of layer l has weight 1: place 0, which is expert -7 l.
    assert head.order[:, 0].tolist() == [0, experts - 7]
    assert (codec.decode(data) == np.sort(rows, axis=-1)).all()


def test_uniform_routes_come_near_their_entropy():
    rows = random_rows(2000, 4, 8, 128)
    bound = math.log2(math.comb(128, 8)) / 64 * rows.size
    size = len(codec.encode(rows, experts=128))
    assert bound < size < 1.06 * bound  # Huffman codes of gaps take 4 % more


def test_skewed_routes_take_less_than_their_ids():
    rows = random_rows(3000, 3, 8, 256, skew=1.0)
    assert len(codec.encode(rows, experts=256)) < 0.62 * rows.size


def test_a_table_that_does_not_pay_is_left_out():
    uniform = codec.encode(random_rows(2000, 2, 8, 64), experts=64)
    assert codec.read_head(uniform, total=len(uniform)).order is None
    few = codec.encode(random_rows(3, 2, 8, 64, skew=2.0), experts=64)
    assert codec.read_head(few, total=len(few)).order is None


def test_the_order_within_a_set_does_not_matter():
    rows = random_rows(50, 2, 4, 16)
    assert codec.encode(rows, experts=16) == codec.encode(rows[..., ::-1], experts=16)


def test_unsigned_rows_and_views():
    rows = random_rows(40, 6, 4, 16)
    expected = codec.encode(rows[:, ::2], experts=16)
    assert codec.encode(np.ascontiguousarray(rows[:, ::2]).astype(np.uint8), experts=16) == expected


def test_every_span_of_several_chunks_reads_only_its_chunks(monkeypatch):
    monkeypatch.setattr(codec, "_CHUNK_BYTES", 3 * 2 * 4)  # three tokens
    rows = np.sort(random_rows(10, 2, 4, 16, missing=0.2), axis=-1)
    data = codec.encode(rows, experts=16)
    head = codec.read_head(data, total=len(data))
    assert head.chunk_tokens == 3
    for first, last in itertools.combinations_with_replacement(range(11), 2):
        begin, end = head.extent((first, last))
        blank = bytearray(len(data))
        blank[: head.ends[0]] = data[: head.ends[0]]
        blank[begin:end] = data[begin:end]
        assert codec.decode(bytes(blank), span=(first, last)).tolist() == rows[first:last].tolist()
        chunks = set(range(first // 3, -(-last // 3))) if first < last else set()
        assert end - begin == sum(int(head.ends[n + 1] - head.ends[n]) for n in chunks)


@pytest.mark.parametrize("span", [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_spans_outside(span):
    data = codec.encode(random_rows(5, 1, 2, 8), experts=8)
    with pytest.raises(ValueError, match="outside of the 5 tokens"):
        codec.decode(data, span=span)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([3, 3, 1], "layer 1 of token 4 has an expert twice"),
        ([3, 8, 1], "layer 1 of token 4 has expert 8; expected ids from 0 to 7"),
        ([-2, 2, 1], "layer 1 of token 4 has expert -2"),
        ([-1, 2, 1], "layer 1 of token 4 has -1 in only some places"),
        ([0, 1, -1], "layer 1 of token 4 has -1 in only some places"),
    ],
)
def test_faulty_rows_are_named(bad, message, monkeypatch):
    monkeypatch.setattr(codec, "_CHUNK_BYTES", 3 * 2 * 3)
    rows = random_rows(6, 2, 3, 8)
    rows[4, 1] = bad
    with pytest.raises(ValueError, match=message):
        codec.encode(rows, experts=8)
    with pytest.raises(
        ValueError, match=message.replace("layer 1 of token 4", "layer 9 of token 104")
    ):
        codec.encode(rows, experts=8, start=100, layers=(5, 9))


@pytest.mark.parametrize(
    ("rows", "experts", "message"),
    [
        (np.zeros((2, 2), int), 4, "expected integers"),
        (np.zeros((2, 2, 2)), 4, "expected integers"),
        (np.zeros((2, 0, 2), int), 4, "expected integers"),
        (np.zeros((2, 2, 0), int), 4, "expected integers"),
        (np.zeros((2, 1, 5), int), 4, "5 of 4 experts"),
        (np.zeros((2, 1, 1), int), 2**15 + 1, "at most 32768"),
    ],
)
def test_other_arrays_are_refused(rows, experts, message):
    with pytest.raises(ValueError, match=message):
        codec.encode(rows, experts=experts)


def test_every_cut_and_every_changed_byte_is_noticed():
    rows = random_rows(9, 2, 3, 16, skew=1.0, missing=0.1)
    data = codec.encode(rows, experts=16)
    for length in range(len(data)):
        with pytest.raises(ValueError, match="cut off|not encoded"):
            codec.decode(data[:length])
    with pytest.raises(ValueError, match="cut off"):
        codec.decode(data + b"\0")
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        with pytest.raises(ValueError, match="cut off|not encoded|damaged"):
            codec.decode(bytes(damaged))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 2**40},
        {"tokens": 2**64 - 1},
        {"layers": 2**32 - 1},
        {"layers": 0},
        {"k": 0},
        {"k": 17},
        {"experts": 2**31},
        {"experts": 1},
        {"chunk_tokens": 0},
        {"by_popularity": 2},
        {"by_popularity": 1},
        {"tokens": 100, "chunk_tokens": 1},
        {"magic": b"others\0\1"},
    ],
)
def test_heads_that_claim_what_the_data_cannot_hold(changes):
    data = with_prologue(codec.encode(random_rows(9, 2, 3, 16), experts=16), **changes)
    with pytest.raises(ValueError, match="can't be in|not encoded|cut off|damaged"):
        codec.decode(data)


def test_a_frame_that_claims_more_than_its_chunk_is_not_expanded():
    bomb = hand_made(bytes(1 << 24), tokens=2, layers=1, k=2, experts=5, chunk_tokens=2)
    with pytest.raises(ValueError, match="a chunk has 16777216 bytes"):
        codec.decode(bomb)


@pytest.mark.parametrize("columns", [[4, 0, 1, 1], [1, 0, 255, 1], [3, 0, 1, 1]])
def test_sets_that_lead_beyond_the_experts(columns):
    data = hand_made(bytes(columns), tokens=2, layers=1, k=2, experts=5, chunk_tokens=2)
    with pytest.raises(ValueError, match="must have 2 of 5 experts, all distinct"):
        codec.decode(data)


def test_a_table_that_is_no_permutation():
    data = hand_made(
        bytes([0, 0]), tokens=1, layers=1, k=2, experts=3, chunk_tokens=1, order=bytes([0, 1, 1])
    )
    with pytest.raises(ValueError, match="not a permutation"):
        codec.decode(data)


def test_repetitive_routes_are_not_compressed_below_what_a_head_may_claim():
    rows = np.broadcast_to(np.arange(4), (5000, 2, 4))
    data = codec.encode(rows, experts=8)
    assert len(data) >= rows.size / 256
    assert (codec.decode(data) == rows).all()


def test_a_part_of_another_length():
    data = codec.encode(random_rows(5, 1, 2, 8), experts=8)
    head = codec.read_head(data, total=len(data))
    begin, end = head.extent(None)
    with pytest.raises(ValueError, match="cut off"):
        codec.decode_part(head, data[begin : end - 1])


@pytest.mark.parametrize("k", range(1, 13))
def test_the_network_sorts(k):
    # By the 0-1 principle: a network that sorts all sequences of 0 and 1 sorts everything.
    for bits in itertools.product((0, 1), repeat=k):
        values = list(bits)
        for low, high in _comparators(k):
            values[low], values[high] = sorted((values[low], values[high]))
        assert values == sorted(bits)
