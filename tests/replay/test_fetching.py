"""From a sample's references to the rows that a rank forces."""

import numpy as np
import pytest
import torch
from conftest import make_sample

from primerl import packing, parallel, replay
from primerl.types import TrainingSample

SHAPE = replay.RouteShape(layers=(1, 2), decoder_layers=3, experts=8, k=2)


@pytest.fixture
def files(monkeypatch):
    """A store that makes a file of however few routes."""
    monkeypatch.setattr("primerl.replay.references.INLINE_BYTES", 0)
    with replay.Store(SHAPE) as opened:
        yield opened


@pytest.fixture(params=["inline", "files"])
def store(request):
    if request.param == "files":
        yield request.getfixturevalue("files")
        return
    with replay.Store(SHAPE) as opened:
        yield opened


def rows(first, count):
    """Rows that say which token they are of: experts t mod 8 and t + 1 mod 8, then others."""
    tokens = np.arange(first, first + count)
    layers = [np.stack([(tokens + n) % 8, (tokens + n + 1) % 8], axis=-1) for n in (0, 3)]
    return np.sort(np.stack(layers, axis=1), axis=-1).astype(np.uint8)


def sample(prompt, completion, routes, *, first_token=2):
    made = make_sample(
        prompt, completion, kind=TrainingSample, advantages=np.ones(prompt + completion)
    )
    tokens = np.arange(first_token, first_token + prompt + completion)
    return TrainingSample(
        token_ids=tokens,
        loss_mask=made.loss_mask,
        behavior_logprobs=made.behavior_logprobs,
        versions=made.versions,
        advantages=made.advantages,
        routes=routes,
    )


def put(store, first, count, *, marked=0):
    """Routes of some tokens; ``marked`` moves all experts, to tell later rows from earlier ones."""
    given = (rows(first, count) + marked) % 8
    return store.put(given, start=first, versions=np.zeros(count, np.int32))


def test_rows_of_packed_samples_and_what_was_not_recorded(store):
    samples = [
        sample(3, 4, put(store, 0, 6)),
        sample(2, 3, (), first_token=20),  # nothing recorded
        sample(2, 2, put(store, 0, 2), first_token=40),  # only its first two tokens
    ]
    ((batch,),) = packing.pack(samples, max_tokens=32, ranks=1)

    ((same, found),) = replay.fetch([batch])

    assert same is batch
    assert found.dtype == torch.int16
    assert found.shape == (16, 2, 2)
    expected = {0: 6, 1: 0, 2: 2}  # tokens with routes
    for row, (number, token) in enumerate(
        zip(batch.sample_ids.tolist(), batch.position_ids.tolist(), strict=True)
    ):
        wanted = rows(token, 1)[0] if token < expected[number] else -np.ones((2, 2))
        assert found[row].tolist() == wanted.tolist()


def test_what_was_recorded_first_wins_and_later_turns_fill_gaps(store):
    turns = [*put(store, 0, 4), *put(store, 2, 5, marked=1)]  # the second routes 2 and 3 again
    ((batch,),) = packing.pack([sample(2, 6, turns)], max_tokens=8, ranks=1)

    ((_, found),) = replay.fetch([batch])

    assert found[:4].tolist() == rows(0, 4).tolist()
    assert (
        np.sort(found[4:7].numpy(), axis=-1).tolist()
        == np.sort((rows(4, 3) + 1) % 8, axis=-1).tolist()
    )
    assert (found[7] == -1).all()


@pytest.mark.parametrize("parts", [2, 3])
def test_ranks_that_share_documents_read_their_own_rows(store, parts, monkeypatch):
    samples = [sample(2, 9, put(store, 0, 10)), sample(3, 4, put(store, 0, 6), first_token=30)]
    ((batch,),) = packing.pack(samples, max_tokens=32, ranks=1)
    ((_, whole),) = replay.fetch([batch])
    spans = []
    plain = replay.fetching.read

    def read(reference, *, span):
        spans.append(span)
        return plain(reference, span=span)

    monkeypatch.setattr(replay.fetching, "read", read)
    found = [rows for _, rows in replay.fetch(batch.split(parts))]

    joined = torch.cat(found)
    assert torch.equal(joined[: len(whole)], whole)
    assert (joined[len(whole) :] == -1).all()
    longest = -(-18 // parts)
    assert all(end - begin <= longest for begin, end in spans)


def test_rows_of_a_shared_prefix_are_those_of_the_sample_that_has_it(store):
    prompt = 20
    first = sample(prompt, 3, put(store, 0, prompt + 2))
    second = sample(prompt, 4, put(store, 0, prompt + 3, marked=2))
    ((batch,),) = packing.pack([first, second], max_tokens=64, ranks=1, share_prefixes=True)
    assert len(batch.token_ids) < 2 * prompt

    ((_, found),) = replay.fetch([batch])

    for number, marked in ((0, 0), (1, 2)):
        own = np.flatnonzero(batch.sample_ids.numpy() == number)
        for row in own:
            token = int(batch.position_ids[row])
            if token < prompt + 2 + number:
                wanted = np.sort((rows(token, 1)[0] + marked) % 8, axis=-1)
                assert found[row].tolist() == wanted.tolist()


def test_references_travel_with_scattered_batches(store):
    packed = packing.pack([sample(2, 3, put(store, 0, 4))], max_tokens=8, ranks=1)

    (batch,) = parallel.scatter(packed, packing.PackedBatch)

    assert batch.routes == packed[0][0].routes
    assert [rows.shape for _, rows in replay.fetch([batch, batch])] == [(5, 2, 2)] * 2


def test_batches_without_references_have_no_rows():
    ((batch,),) = packing.pack([sample(2, 3, ())], max_tokens=8, ranks=1)
    assert batch.routes is None
    assert list(replay.fetch([batch])) == [(batch, None)]
    assert list(replay.fetch([])) == []


def test_a_sample_whose_routes_are_gone_is_counted_and_the_others_have_theirs(files, caplog):
    gone, kept = sample(2, 3, put(files, 0, 4)), sample(3, 3, put(files, 0, 5), first_token=30)
    assert replay.discard([gone]) == 1
    ((batch,),) = packing.pack([gone, kept], max_tokens=16, ranks=1)
    counts = replay.RouteCounts()

    ((_, found),) = replay.fetch([batch], counts=counts)

    own = batch.sample_ids == 1
    assert found[own][:5].tolist() == rows(0, 5).tolist()
    assert (found[~own] == -1).all()
    assert counts.summary() == {"routes_lost": 1}
    assert "a sample's routes are lost" in caplog.text

    ((batch,),) = packing.pack([gone], max_tokens=16, ranks=1)
    assert list(replay.fetch([batch])) == [(batch, None)]


@pytest.mark.parametrize("kept_first", [False, True])
def test_a_sample_whose_routes_are_damaged_is_counted_and_the_others_have_theirs(
    kept_first, caplog
):
    with replay.Store(SHAPE) as store:
        (whole,), kept = put(store, 0, 4), sample(3, 3, put(store, 0, 5), first_token=30)
    damaged = sample(2, 3, whole[:-4])
    samples = [kept, damaged] if kept_first else [damaged, kept]
    ((batch,),) = packing.pack(samples, max_tokens=16, ranks=1)
    counts = replay.RouteCounts()

    ((_, found),) = replay.fetch([batch], counts=counts)

    own = batch.sample_ids == samples.index(kept)
    assert found[own][:5].tolist() == rows(0, 5).tolist()
    assert (found[~own] == -1).all()
    assert counts.summary() == {"routes_lost": 1}
    assert (
        "lost, so the router chooses its experts itself: routes are cut off or damaged"
        in caplog.text
    )


def test_a_sample_of_another_model_is_counted_and_the_others_have_theirs(store, caplog):
    shape = replay.RouteShape(layers=(0, 1, 2), decoder_layers=3, experts=8, k=2)
    with replay.Store(shape) as other:
        three = np.concatenate([rows(0, 4), rows(0, 4)[:, :1]], axis=1)
        routes = other.put(three, start=0, versions=np.zeros(4, np.int32))
        samples = [sample(3, 3, put(store, 0, 5)), sample(2, 3, routes, first_token=30)]
        ((batch,),) = packing.pack(samples, max_tokens=16, ranks=1)
        counts = replay.RouteCounts()

        ((_, found),) = replay.fetch([batch], counts=counts)

    own = batch.sample_ids == 0
    assert found[own][:5].tolist() == rows(0, 5).tolist()
    assert (found[~own] == -1).all()
    assert counts.summary() == {"routes_lost": 1}
    assert "routes have shape [t, 3, 2], expected [t, 2, 2]" in caplog.text


def test_inline_and_stored_turns_are_joined_in_the_order_of_their_recording(monkeypatch):
    with replay.Store(SHAPE) as store:
        inline = put(store, 2, 3)
        monkeypatch.setattr("primerl.replay.references.INLINE_BYTES", 0)
        stored = put(store, 0, 4, marked=1), put(store, 4, 3, marked=2)
        turns = [*stored[0], *inline, *stored[1]]
        ((batch,),) = packing.pack([sample(3, 5, turns)], max_tokens=8, ranks=1)

        ((_, found),) = replay.fetch([batch])

    marks = [1, 1, 1, 1, 0, 2, 2]
    for token, marked in enumerate(marks):
        wanted = np.sort((rows(token, 1)[0] + marked) % 8, axis=-1)
        assert found[token].tolist() == wanted.tolist()
    assert (found[7] == -1).all()


def test_references_that_are_none_are_lost_samples(caplog):
    for reference in ("nonsense", "file:relative", "http://127.0.0.1:9/x", "inline:"):
        counts = replay.RouteCounts()
        ((batch,),) = packing.pack([sample(2, 3, reference)], max_tokens=16, ranks=1)
        assert list(replay.fetch([batch], counts=counts)) == [(batch, None)]
        assert counts.summary() == {"routes_lost": 1}
    assert caplog.text.count("are lost") == 4


def test_leaving_the_loop_early_leaves_no_thread(store):
    ((batch,),) = packing.pack([sample(2, 3, put(store, 0, 4))], max_tokens=8, ranks=1)
    for _ in replay.fetch([batch] * 5):
        break
