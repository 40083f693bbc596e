import itertools

import numpy as np
import pytest
import torch
from conftest import make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import packing
from primerl.types import NOT_SAMPLED, TrainingSample


def training_sample(prompt, completion, *, seed=0, **fields):
    advantages = np.linspace(1, 2, prompt + completion)
    return make_sample(
        prompt, completion, kind=TrainingSample, seed=seed, advantages=advantages, **fields
    )


def test_a_row_carries_the_label_and_the_figures_of_the_next_token():
    sample = TrainingSample(
        token_ids=[10, 11, 12],
        loss_mask=[False, True, True],
        behavior_logprobs=[0.0, -0.1, -0.2],
        versions=[NOT_SAMPLED, 4, 5],
        temperature=0.7,
        advantages=[0.0, 1.0, 2.0],
        ref_logprobs=[0.0, -0.3, -0.4],
        weights=[0.0, 7.0, 8.0],
    )

    ((batch,),) = packing.pack([sample], max_tokens=8, ranks=1)

    assert batch.token_ids.tolist() == [10, 11, 12]
    assert batch.position_ids.tolist() == [0, 1, 2]
    assert batch.labels.tolist() == [11, 12, 0]
    assert batch.loss_mask.tolist() == [True, True, False]
    torch.testing.assert_close(batch.behavior_logprobs, torch.tensor([-0.1, -0.2, 0.0]))
    torch.testing.assert_close(batch.ref_logprobs, torch.tensor([-0.3, -0.4, 0.0]))
    assert batch.advantages.tolist() == [1.0, 2.0, 0.0]
    assert batch.weights.tolist() == [7.0, 8.0, 0.0]
    assert batch.versions.tolist() == [4, 5, NOT_SAMPLED]
    torch.testing.assert_close(batch.temperature, torch.full((3,), 0.7))
    assert batch.cu_seqlens.tolist() == [0, 3]
    assert batch.sequence_ids.tolist() == [0, 0, 0]


def test_documents_are_laid_end_to_end_and_do_not_shift_into_each_other():
    samples = [training_sample(1, 2, seed=1), training_sample(2, 2, seed=2)]

    ((batch,),) = packing.pack(samples, max_tokens=7, ranks=1)

    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.loss_mask.tolist() == [True, True, False, False, True, True, False]
    assert batch.labels.tolist() == [
        *samples[0].token_ids[1:].tolist(),
        0,
        *samples[1].token_ids[1:].tolist(),
        0,
    ]
    assert batch.ref_logprobs is None


def test_a_sample_longer_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, more than max_tokens=8"):
        packing.pack([training_sample(1, 2), training_sample(5, 4)], max_tokens=8, ranks=1)


def test_samples_must_agree_on_optional_fields():
    with_ref = training_sample(1, 2, ref_logprobs=np.zeros(3))

    with pytest.raises(ValueError, match="ref_logprobs"):
        packing.pack([with_ref, training_sample(1, 2)], max_tokens=8, ranks=1)


def test_fewer_samples_than_ranks_gives_a_masked_batch():
    first, second = packing.pack([training_sample(2, 3)], max_tokens=8, ranks=2)

    assert len(first) == len(second) == 1
    lengths = sorted(len(batch.token_ids) for batch in (first[0], second[0]))
    assert lengths == [1, 5]
    filler = min(first[0], second[0], key=lambda batch: len(batch.token_ids))
    assert not filler.loss_mask.any()


def test_no_samples_give_no_batches():
    assert packing.pack([], max_tokens=8, ranks=2) == [[], []]


def test_a_batch_moves_to_a_device_whole():
    ((batch,),) = packing.pack([training_sample(1, 2)], max_tokens=8, ranks=1)

    moved = batch.to("meta")

    assert moved.token_ids.device.type == moved.advantages.device.type == "meta"
    assert moved.ref_logprobs is None


plans = st.tuples(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50), st.integers(1, 5))


@given(plans)
@settings(max_examples=200, deadline=None)
def test_bins_hold_every_sample_once_within_capacity_and_equally_many_for_each_rank(plan):
    lengths, max_tokens, ranks = plan

    result = packing.bins(lengths, max_tokens=max_tokens, ranks=ranks)

    assert len(result) == ranks
    assert len({len(steps) for steps in result}) == 1
    members = sorted(i for steps in result for members in steps for i in members)
    assert members == list(range(len(lengths)))
    for members in itertools.chain(*result):
        assert sum(lengths[i] for i in members) <= max_tokens
    if len(lengths) >= len(result[0]) * ranks:
        assert all(members for members in itertools.chain(*result))
    assert result == packing.bins(lengths, max_tokens=max_tokens, ranks=ranks)


def test_bins_of_like_cost_share_a_micro_step():
    lengths = [4, 8, 4, 4, 8, 4]

    result = packing.bins(lengths, max_tokens=8, ranks=2, cost=lambda length: length**2)

    costs = [
        [sum(lengths[i] ** 2 for i in members) for members in step]
        for step in zip(*result, strict=True)
    ]
    assert costs == [[64, 64], [32, 32]]


def test_the_rank_that_has_done_least_gets_the_dearest_bin():
    result = packing.bins([8, 7, 6, 5], max_tokens=8, ranks=2)

    assert result == [[[0], [3]], [[1], [2]]]
