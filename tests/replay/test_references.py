"""Routes that travel within their references, and what is refused of such references."""

import base64
import pickle
import struct

import attrs
import numpy as np
import pytest
import xxhash
from conftest import make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.replay import BadRoutes, RouteShape, Store, discard, read
from primerl.replay.references import INLINE_BYTES

SHAPE = RouteShape(layers=(1, 3), decoder_layers=4, experts=8, k=2)
STORE = "0123456789abcdef"
# Of tokens 20 to 22, in layers 1 and 3: the last one's are not recorded in layer 3.
ROWS = [[[1, 5], [0, 7]], [[2, 3], [4, 6]], [[0, 1], [-1, -1]]]
VERSIONS = [3, 3, 4]


def written(
    rows=ROWS, *, start=20, tokens=None, layers=(1, 3), depth=4, experts=8, k=2, store=STORE,
    versions=VERSIONS, id_type="b", extra=b"",
):  # fmt: skip
    """A reference, by the description of the format alone."""
    ids = np.array(rows).reshape(-1).tolist()
    tokens = len(versions) if tokens is None else tokens
    bits = sum(1 << (8 * -(-depth // 8) - 1 - layer) for layer in layers)
    content = struct.pack("<QHHHH", start, tokens, depth, experts, k)
    content += bits.to_bytes(-(-depth // 8), "big")
    content += struct.pack(f"<{len(versions)}i", *versions)
    content += struct.pack(f"<{len(ids)}{id_type}", *ids) + extra
    return joined(content, store=store)


def joined(content, *, store=STORE):
    whole = struct.pack("<Q", xxhash.xxh3_64_intdigest(content)) + content
    return f"inline:{store}/{base64.b64encode(whole).decode()}"


def rows_of(tokens, *, shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    sets = rng.random((tokens, len(shape.layers), shape.experts))
    return np.argsort(sets, axis=-1)[..., : shape.k].astype(np.uint16)


def put(store, tokens, **given):
    versions = np.zeros(tokens, np.int32)
    return store.put(rows_of(tokens, shape=store.shape), start=0, versions=versions, **given)


@pytest.fixture
def store():
    with Store(SHAPE, max_bytes=1 << 20) as opened:
        yield opened


def test_what_fits_a_reference_is_put_and_checked_at_once(store):
    tokens = next(n for n in range(1, 1000) if not put(store, n)[0].startswith("inline:"))

    assert store.is_instant(tokens - 1)
    assert not store.is_instant(tokens)


def files_of(store):
    return [path for path in store._path.iterdir() if path.name != ".users"]


def kind_of(reference):
    return reference.partition(":")[0]


# ---- what is written, and read ----


def test_a_reference_by_its_description(store):
    given = np.array(ROWS)[..., ::-1]
    (reference,) = store.put(given, start=20, versions=np.array(VERSIONS))
    assert reference == written(store=store._path.name[-16:])
    assert files_of(store) == []


def test_two_bytes_for_each_of_more_than_128_experts():
    rows = [[[0, 128]], [[-1, -1]], [[127, 254]]]
    shape = RouteShape(layers=(9,), decoder_layers=10, experts=255, k=2)
    with Store(shape) as store:
        (reference,) = store.put(np.array(rows), start=20, versions=np.array(VERSIONS))
        assert reference == written(
            rows, layers=(9,), depth=10, experts=255, id_type="h", store=store._path.name[-16:]
        )
    assert read(reference).rows.tolist() == rows


def test_what_is_read():
    found = read(written())
    assert found.start == 20
    assert found.rows.tolist() == ROWS
    assert found.rows.dtype == np.int16
    assert found.versions.tolist() == VERSIONS
    assert found.versions.dtype == np.int32


@settings(max_examples=50)
@given(
    depth=st.integers(1, 20),
    first=st.integers(0, 5),
    experts=st.sampled_from([5, 127, 128, 129, 300]),
    k=st.integers(1, 4),
    tokens=st.integers(1, 4),
    missing=st.integers(0, 3),
    span=st.tuples(st.integers(8, 16), st.integers(8, 16)) | st.none(),
)
def test_a_reference_and_a_file_say_the_same(depth, first, experts, k, tokens, missing, span):
    layers = range(min(first, depth - 1), depth)
    shape = RouteShape(layers=layers, decoder_layers=depth, experts=experts, k=k)
    rows = rows_of(tokens, shape=shape).astype(np.int16)
    rows[missing:, :1] = -1
    versions = np.arange(tokens) + 7
    with Store(shape, max_bytes=1 << 20) as store:
        references = []
        for most in (1 << 14, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("primerl.replay.references.INLINE_BYTES", most)
                references += store.put(rows, start=10, versions=versions)
        assert [kind_of(one) for one in references] == ["inline", "shm"]
        held, stored = (read(one, span=span) for one in references)
        sample = make_sample(prompt=11, completion=tokens)
        sample = attrs.evolve(sample, versions=np.append(np.full(11, -1), versions))
        for one in references:
            store.check(attrs.evolve(sample, routes=[one]))
    assert held.start == stored.start
    assert held.rows.tolist() == stored.rows.tolist()
    assert held.versions.tolist() == stored.versions.tolist()


def test_only_few_routes_are_inline(store):
    token_bytes = 4 + 2 * 2  # the version; two layers of two experts
    most = (INLINE_BYTES - 8 - 16 - 1) // token_bytes
    assert [kind_of(one) for one in put(store, most)] == ["inline"]
    assert files_of(store) == []
    assert [kind_of(one) for one in put(store, most + 1)] == ["shm"]
    assert len(files_of(store)) == 1


@pytest.mark.parametrize(
    ("tokens", "shared", "kinds"),
    [
        (10, 6, ["inline"]),  # a short prompt is written with its reply, for each rollout
        (300, 294, ["shm", "inline"]),
        (300, 6, ["inline", "shm"]),
        (400, 200, ["shm", "shm"]),
        (10, 10, ["inline"]),
    ],
)
def test_prompt_and_reply_are_chosen_for_by_their_sizes(store, tokens, shared, kinds):
    references = [put(store, tokens, shared=shared) for _ in range(3)]
    assert [[kind_of(one) for one in own] for own in references] == [kinds] * 3
    sizes = {path.stat().st_ino for path in files_of(store)}
    assert len(sizes) == 3 * (kinds[-1] == "shm") + (kinds[0] == "shm")  # prompts once
    sample = make_sample(prompt=1, completion=tokens, routes=references[0])
    store.check(sample)
    rows = np.concatenate([read(one).rows for one in sample.routes])
    assert rows.tolist() == np.sort(rows_of(tokens), axis=-1).tolist()
    assert discard([sample]) == kinds.count("shm")


def test_nothing_is_left_to_discard_and_a_copy_puts_them_too(store):
    copy = pickle.loads(pickle.dumps(store))
    (reference,) = put(copy, 5)
    sample = make_sample(prompt=3, completion=3, routes=[reference])
    for one in (store, copy):
        one.check(sample)
    assert discard([sample]) == 0
    store.close()
    assert len(read(reference).rows) == 5


def test_a_served_store_sends_few_routes_along_too(monkeypatch):
    monkeypatch.setenv("PRIMERL_API_KEY", "the-key-of-this-test")
    with Store(SHAPE, max_bytes=1 << 20, host="127.0.0.1") as store:
        (reference,) = put(store, 5)
        monkeypatch.delenv("PRIMERL_API_KEY")
        store.check(make_sample(prompt=3, completion=3, routes=[reference]))
        assert len(read(reference).rows) == 5


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.full((6, 2, 2), 8)}, "layer 1 of token 20 has expert 8; expected ids from 0"),
        ({"rows": np.full((6, 2, 2), -2)}, "layer 1 of token 20 has expert -2"),
        ({"rows": np.zeros((6, 2, 2), int)}, "layer 1 of token 20 has an expert twice"),
        ({"rows": np.array([[[0, 1], [1, -1]]] * 6)}, "layer 3 of token 20 has -1 in only some"),
        ({"rows": np.zeros((6, 2, 3), int)}, "3 experts per token, expected 2"),
        ({"versions": np.full(6, -1)}, "version is negative"),
    ],
)
def test_faults_of_what_is_put(store, change, message):
    good = {"rows": rows_of(6), "start": 20, "versions": np.zeros(6, np.int32)}
    with pytest.raises(ValueError, match=message):
        store.put(**good | change)


def refused(store, reference, message):
    """By those who read it, and, if the store is its own, by those who check a sample."""
    with pytest.raises(ValueError, match=message):
        read(reference)
    own = reference.replace(STORE, store._path.name[-16:])
    with pytest.raises(BadRoutes, match=message):
        store.check(make_sample(prompt=20, completion=4, routes=[own]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [*ROWS[:2], [[0, 8], [1, 2]]]}, "layer 1 of token 22 has expert 8; expected ids"),
        ({"rows": [*ROWS[:2], [[0, 1], [-3, 2]]]}, "layer 3 of token 22 has expert -3"),
        ({"rows": [*ROWS[:2], [[0, 1], [-1, 2]]]}, "layer 3 of token 22 has -1 in only some"),
        ({"rows": [ROWS[0], [[5, 5], [0, 1]], ROWS[2]]}, "layer 1 of token 21 has an expert twice"),
        ({"k": 4}, "21 bytes, expected 49|49 bytes, expected"),
        ({"layers": (1, 2, 3)}, "bytes, expected .* for 3 tokens from token 20 on"),
        ({"layers": (3,)}, "bytes, expected .* for 3 tokens from token 20 on"),
        ({"layers": ()}, r"layers is \(\)"),
        ({"layers": (), "depth": 0}, r"layers is \(\)"),
        ({"experts": 1}, "k=2 of 1 experts"),
        ({"experts": 40_000}, "k=2 of 40000 experts"),
        ({"experts": 200}, "bytes, expected .* for 3 tokens"),  # whose ids take two bytes
        ({"k": 0}, "k=0 of 8 experts"),
        ({"tokens": 4}, "bytes, expected .* for 4 tokens"),
        ({"tokens": 2}, "bytes, expected .* for 2 tokens"),
        ({"tokens": 65535}, "bytes, expected .* for 65535 tokens"),
        ({"depth": 65000, "layers": (1, 3), "rows": []}, "bytes, expected"),
        ({"versions": [3, -1, 3]}, "from token 20 on have a negative version"),
        ({"extra": b"\0"}, "bytes, expected"),
    ],
)
def test_what_no_store_writes(store, change, message):
    refused(store, written(**change), message)


def test_damage(store):
    good = base64.b64decode(written().partition("/")[2])
    for length in range(len(good)):
        cut = base64.b64encode(good[:length]).decode()
        refused(store, f"inline:{STORE}/{cut}", "cut off")
    for place in range(len(good)):
        changed = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        refused(store, f"inline:{STORE}/{base64.b64encode(changed).decode()}", "checksum is wrong")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda reference: reference[:-1],
        lambda reference: reference + "=",
        lambda reference: reference + "AAAA",
        lambda reference: reference + "\n",
        lambda reference: reference[:30] + " " + reference[30:],
        lambda reference: reference[:30] + "-" + reference[31:],
        lambda reference: reference[:30] + "é" + reference[31:],
    ],
)
def test_what_is_not_base64(store, spoil):
    refused(store, spoil(written()), "cut off or damaged")


@pytest.mark.parametrize(
    "reference",
    ["inline:", "inline:/", f"inline:{STORE}", "inline:../x/AAAA", f"inline:{STORE.upper()}/AAAA"],
)
def test_what_is_no_reference(store, reference):
    refused(store, reference, "not a reference to routes|cut off")


def test_routes_of_another_store_or_model(store):
    sample = make_sample(prompt=3, completion=3)
    with Store(SHAPE) as other:
        routes = put(other, 5)
    with pytest.raises(BadRoutes, match="the reference is not from this store"):
        store.check(attrs.evolve(sample, routes=routes))
    for field, value in (("experts", 9), ("decoder_layers", 5), ("layers", (2, 3)), ("k", 1)):
        copy = pickle.loads(pickle.dumps(store))
        copy.shape = attrs.evolve(SHAPE, **{field: value})
        with pytest.raises(BadRoutes, match=f"tokens 0 to 4 are of another model: {field} is"):
            store.check(attrs.evolve(sample, routes=put(copy, 5)))


def test_routes_of_other_tokens(store):
    sample = make_sample(prompt=3, completion=3)
    with pytest.raises(BadRoutes, match="has routes of tokens 0 to 6, but the sample has 6"):
        store.check(attrs.evolve(sample, routes=put(store, 7)))
    with pytest.raises(BadRoutes, match="token 5 is to be trained, but the token 4 before it"):
        store.check(attrs.evolve(sample, routes=put(store, 4)))
    far = written(start=2**63, store=store._path.name[-16:])
    with pytest.raises(BadRoutes, match="the sample has 6"):
        store.check(attrs.evolve(sample, routes=[far]))


def test_routes_of_no_token(store):
    nothing = written([], versions=[], start=6, store=store._path.name[-16:])
    assert len(read(nothing).rows) == 0
    with pytest.raises(BadRoutes, match="token 3 is to be trained"):
        store.check(make_sample(prompt=3, completion=3, routes=[nothing]))
