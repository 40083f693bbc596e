"""The way back: what was computed for rows, by sample and token."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import packing
from primerl.packing import prefixes
from primerl.types import NOT_SAMPLED, TrainingSample


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    monkeypatch.setattr(prefixes, "WORTHWHILE", 1)


def sample(token_ids, trained):
    mask = np.isin(np.arange(len(token_ids)), trained)
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -1.0, 0.0),
        versions=np.where(mask, 0, NOT_SAMPLED),
        advantages=np.zeros(len(token_ids)),
    )


TWO = [sample([7, 8, 20, 21], [2, 3]), sample([7, 8, 30], [2])]


def test_the_value_of_a_row_belongs_to_the_token_after_it():
    packed = packing.pack(TWO, max_tokens=8, ranks=1)
    rows = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])

    first, second = packing.unpack(packed, [[{"logprobs": rows}]], TWO)

    np.testing.assert_array_equal(first["logprobs"], np.array([0, 0, 0.2, 0.3], np.float32))
    np.testing.assert_array_equal(second["logprobs"], np.array([0, 0, 0.6], np.float32))


def test_rows_of_several_values_are_found_too():
    packed = packing.pack(TWO, max_tokens=8, ranks=1)
    rows = torch.arange(14).reshape(7, 2)

    first, second = packing.unpack(packed, [[{"ids": rows}]], TWO)

    assert first["ids"].tolist() == [[0, 0], [0, 0], [2, 3], [4, 5]]
    assert second["ids"].tolist() == [[0, 0], [0, 0], [10, 11]]


def test_samples_are_found_behind_a_shared_prompt_and_on_other_ranks():
    shared = packing.pack(TWO, max_tokens=8, ranks=1, share_prefixes=True)
    apart = packing.pack(TWO, max_tokens=8, ranks=3)

    assert shared[0][0].sample_ids.tolist() in ([0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0])
    assert sorted(mine[0].sample_ids.tolist() for mine in apart) == [[-1], [0] * 4, [1] * 3]
    for packed in (shared, apart):
        rows = [[{"labels": batch.labels} for batch in mine] for mine in packed]
        first, second = packing.unpack(packed, rows, TWO)
        assert first["labels"].tolist() == [0, 0, 20, 21]
        assert second["labels"].tolist() == [0, 0, 30]


@st.composite
def tokens_and_trained(draw):
    """Of a sample, which is built in the test: beartype, which checks it, draws from ``random``."""
    ids = draw(st.lists(st.integers(1, 3), min_size=2, max_size=12))
    return ids, sorted(draw(st.sets(st.integers(1, len(ids) - 1))))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(tokens_and_trained(), max_size=8), st.integers(1, 3), st.integers(1, 3), st.booleans()
)
def test_unpacking_undoes_packing(drawn, ranks, parts, share_prefixes):
    samples = [sample(ids, trained) for ids, trained in drawn]
    packed = packing.pack(samples, max_tokens=16, ranks=ranks, share_prefixes=share_prefixes)
    # As context parallel ranks compute them: in parts, the last of which is filled up.
    rows = [
        [{"labels": torch.cat([part.labels for part in batch.split(parts)])} for batch in mine]
        for mine in packed
    ]

    unpacked = packing.unpack(packed, rows, samples)

    assert len(unpacked) == len(samples)
    for one, per_token in zip(samples, unpacked, strict=True):
        expected = np.where(one.loss_mask, one.token_ids, 0)
        np.testing.assert_array_equal(per_token["labels"], expected)
        assert per_token["labels"].dtype == np.float32


def test_what_does_not_fit_is_refused():
    packed = packing.pack(TWO, max_tokens=8, ranks=1)
    (batch,) = packed[0]
    rows = torch.zeros(7)

    with pytest.raises(ValueError, match="rows has values for 0 batches; expected 1"):
        packing.unpack(packed, [[]], TWO)
    with pytest.raises(ValueError, match="logprobs has 6 rows; expected 7"):
        packing.unpack(packed, [[{"logprobs": rows[:6]}]], TWO)
    with pytest.raises(ValueError, match="packed has sample index 1, but samples has 1 items"):
        packing.unpack(packed, [[{"logprobs": rows}]], TWO[:1])
    unnumbered = attrs.evolve(batch, sample_ids=None)
    with pytest.raises(ValueError, match="no sample_ids; expected a batch that pack returned"):
        packing.unpack([[unnumbered]], [[{"logprobs": rows}]], TWO)
