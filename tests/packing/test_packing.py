import itertools
import math

import attrs
import numpy as np
import pytest
import torch
from conftest import make_sample
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primerl import flops, packing
from primerl.testing.families import tiny_config
from primerl.types import NOT_SAMPLED, TrainingSample


def training_sample(prompt, completion, *, seed=0, **fields):
    advantages = np.linspace(1, 2, prompt + completion)
    return make_sample(
        prompt, completion, kind=TrainingSample, seed=seed, advantages=advantages, **fields
    )


def test_a_row_carries_the_label_and_the_data_of_the_next_token():
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


def test_weights_are_of_any_token_and_keep_it_from_being_shared():
    def sample(last):
        return TrainingSample(
            token_ids=[*range(40), last],
            loss_mask=[False] * 40 + [True],
            behavior_logprobs=[0.0] * 41,
            versions=[NOT_SAMPLED] * 40 + [0],
            advantages=[0.0] * 41,
            weights=[0.0] * 30 + [2.0] * 3 + [0.0] * 8,
        )

    ((batch,),) = packing.pack([sample(1), sample(2)], max_tokens=128, ranks=1, share_prefixes=True)

    whole, second = batch.weights.split([41, 41 - 29])  # row 29 predicts token 30
    assert whole.tolist() == [0.0] * 29 + [2.0] * 3 + [0.0] * 9
    assert second.tolist() == whole.tolist()[29:]
    assert batch.loss_mask.sum() == 2


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


def test_samples_must_agree_on_optional_fields():
    with_ref = training_sample(1, 2, ref_logprobs=np.zeros(3))

    with pytest.raises(ValueError, match="ref_logprobs"):
        packing.pack([with_ref, training_sample(1, 2)], max_tokens=8, ranks=1)


def top_tokens(sample, k):
    """Of token i: the ids 10 i, 10 i + 1, ..., with their negatives as logprobs."""
    ids = 10 * np.arange(len(sample.token_ids))[:, None] + np.arange(k)
    return attrs.evolve(sample, ref_top_ids=ids, ref_top_logprobs=-ids)


def test_top_tokens_are_those_of_the_label():
    samples = [top_tokens(training_sample(1, 2), 2), top_tokens(training_sample(2, 2), 2)]

    ((batch,),) = packing.pack(samples, max_tokens=8, ranks=1)

    # Rows that predict no trained token are 0.
    places = [[10, 11], [20, 21], [0, 0], [0, 0], [20, 21], [30, 31], [0, 0]]
    assert batch.ref_top_ids.tolist() == places
    assert batch.ref_top_ids.dtype == torch.int64
    torch.testing.assert_close(batch.ref_top_logprobs, -torch.tensor(places).float())
    first, second = batch.split(2)
    assert torch.cat([first.ref_top_ids, second.ref_top_ids]).tolist() == [*places, [0, 0]]
    assert second.ref_top_logprobs.shape == (4, 2)


def test_a_rank_without_a_sample_has_top_tokens_too():
    (first,), (second,) = packing.pack(
        [top_tokens(training_sample(1, 2), 4)], max_tokens=8, ranks=2
    )

    shapes = sorted(tuple(batch.ref_top_ids.shape) for batch in (first, second))
    assert shapes == [(1, 4), (3, 4)]
    assert sorted(tuple(batch.ref_top_logprobs.shape) for batch in (first, second)) == shapes


def test_samples_must_agree_on_how_many_top_tokens_there_are():
    plain = training_sample(1, 2)

    with pytest.raises(ValueError, match="samples have ref_top_ids of different widths"):
        packing.pack([top_tokens(plain, 2), top_tokens(plain, 3)], max_tokens=8, ranks=1)
    with pytest.raises(ValueError, match="some samples have ref_top_ids and others do not"):
        packing.pack([top_tokens(plain, 2), plain], max_tokens=8, ranks=1)


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
@example(
    plan=([1, 1, 1, 1, 1, 1, 1, 4, 5, 20, 20, 20, 20, 20, 20], 45, 3)
)  # best fit leaves 2 empty
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


def test_bins_of_similar_cost_share_a_micro_step():
    lengths = [4, 8, 4, 4, 8, 4]

    result = packing.bins(lengths, max_tokens=8, ranks=2, cost=lambda length: length**2)

    costs = [
        [sum(lengths[i] ** 2 for i in members) for members in step]
        for step in zip(*result, strict=True)
    ]
    assert costs == [[64, 64], [32, 32]]


def test_the_rank_with_the_least_cost_gets_the_most_expensive_bin():
    result = packing.bins([8, 7, 6, 5], max_tokens=8, ranks=2)

    assert result == [[[0], [3]], [[1], [2]]]


def test_masked_rows_carry_zeros_even_where_the_host_had_nan():
    nan = float("nan")
    sample = TrainingSample(
        token_ids=[10, 11, 12, 13, 14],
        loss_mask=[False, False, True, False, True],
        behavior_logprobs=[nan, nan, -0.1, nan, -0.2],
        versions=[NOT_SAMPLED, NOT_SAMPLED, 3, NOT_SAMPLED, 4],
        advantages=[nan, 5.0, 1.0, nan, 2.0],
        ref_logprobs=[nan, nan, -0.3, 6.0, -0.4],
        weights=[7.0, nan, 8.0, nan, 9.0],
    )

    ((batch,),) = packing.pack([sample, sample], max_tokens=10, ranks=1)

    assert batch.loss_mask.tolist() == [False, True, False, True, False] * 2
    for field, rows in {
        "behavior_logprobs": [0, -0.1, 0, -0.2, 0],
        "advantages": [0, 1, 0, 2, 0],
        "ref_logprobs": [0, -0.3, 0, -0.4, 0],
        "weights": [0, 8, 0, 9, 0],
    }.items():
        values = getattr(batch, field)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, torch.tensor(rows * 2, dtype=torch.float32))
    assert batch.versions.tolist() == [NOT_SAMPLED, 3, NOT_SAMPLED, 4, NOT_SAMPLED] * 2


def test_a_sample_longer_than_a_batch_is_refused_or_alone():
    samples = [training_sample(1, 2), training_sample(5, 4), training_sample(1, 1)]

    with pytest.raises(ValueError, match="sample 1 has 9 tokens, more than max_tokens=8"):
        packing.pack(samples, max_tokens=8, ranks=1)
    ((longest, rest),) = packing.pack(samples, max_tokens=8, ranks=1, too_long="alone")

    assert longest.cu_seqlens.tolist() == [0, 9]
    assert rest.cu_seqlens.tolist() == [0, 3, 5]
    with pytest.raises(ValueError, match='too_long is \'drop\'; expected "raise" or "alone"'):
        packing.pack(samples, max_tokens=8, ranks=1, too_long="drop")


def test_many_samples_longer_than_a_batch_are_alone_each():
    lengths = [30, 3, 20, 4, 40, 1, 50]

    result = packing.bins(lengths, max_tokens=8, ranks=2, too_long="alone")

    assert sorted(i for steps in result for members in steps for i in members) == list(range(7))
    assert {(0,), (2,), (4,), (6,)} <= {tuple(members) for steps in result for members in steps}
    assert len(result[0]) == 3  # four alone, and 3 + 4 + 1 in one


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4, 4, 4, -2], r"lengths\[3\] is -2; expected a whole number of tokens, at least 1"),
        ([4, 0], r"lengths\[1\] is 0"),
        ([4, 2.5], r"lengths\[1\] is 2.5"),
        ([4.0, float("nan")], r"lengths\[1\] is nan"),
        ([4.0, float("inf")], r"lengths\[1\] is inf"),
        (["4"], r"lengths\[0\] is '4'"),
        ([True, True], r"lengths\[0\] is True"),
        (np.ones((2, 2), int), r"lengths has shape \(2, 2\)"),
    ],
)
def test_invalid_lengths_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        packing.bins(lengths, max_tokens=8, ranks=2)


@pytest.mark.parametrize("counts", [{"max_tokens": 0, "ranks": 1}, {"max_tokens": 8, "ranks": 0}])
def test_counts_below_one_are_refused(counts):
    with pytest.raises(ValueError, match="must be at least 1"):
        packing.bins([], **counts)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_an_invalid_cost_is_refused(bad):
    for cost in (
        lambda n: np.where(n == 5, bad, 1.0),
        lambda n: bad if n == 5 else 1.0,
    ):
        with pytest.raises(ValueError, match=rf"cost\(5\) is {bad}; expected a finite number"):
            packing.bins([4, 5], max_tokens=8, ranks=2, cost=cost)


def test_the_error_of_a_cost_function_is_raised():
    def cost(length):
        raise KeyError("my table")

    with pytest.raises(KeyError, match="my table"):
        packing.bins([4, 5], max_tokens=8, ranks=2, cost=cost)


def test_a_cost_may_take_an_array_or_one_length():
    lengths, calls = [7, 3, 7, 5, 2, 6], []

    def elementwise(n):
        calls.append(n)
        return n**2

    arrays = packing.bins(lengths, max_tokens=8, ranks=2, cost=elementwise)

    assert len(calls) == 1
    for alone in (lambda n: int(n) ** 2, {n: n * n for n in lengths}.get, lambda n: max(n, 1) ** 2):
        assert packing.bins(lengths, max_tokens=8, ranks=2, cost=alone) == arrays
    assert packing.bins(lengths, max_tokens=8, ranks=2, cost=lambda n: 1.0)  # a constant, too
    assert packing.bins([3], max_tokens=8, ranks=1, cost=math.sqrt) == [[[0]]]
    assert packing.bins(np.array(lengths), max_tokens=8, ranks=2, cost=elementwise) == arrays


def in_lockstep(result, costs):
    """The sum over micro-steps of the most expensive rank, from its definition."""
    return sum(
        max(sum(costs[i] for i in members) for members in step)
        for step in zip(*result, strict=True)
    )


def best_fit_decreasing(lengths, costs, max_tokens, ranks):
    """(micro-steps, cost in lockstep), by a naive algorithm; empty bins stay empty."""
    bins = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [
            members
            for members in bins
            if sum(lengths[j] for j in members) + lengths[i] <= max_tokens
        ]
        if fitting:
            max(fitting, key=lambda members: sum(lengths[j] for j in members)).append(i)
        else:
            bins.append([i])
    totals = sorted((sum(costs[i] for i in members) for members in bins), reverse=True)
    return -(-len(bins) // ranks), sum(totals[::ranks]), -len(bins) % ranks


@given(plans, st.sampled_from([0.0, 0.1, 10.0]))
@example(plan=([10, 11, 11, 13, 13, 13, 15], 22, 5), quadratic=10.0)  # idle ranks are cheaper
@settings(max_examples=200, deadline=None)
def test_bins_cost_no_more_and_are_no_more_than_by_best_fit(plan, quadratic):
    lengths, max_tokens, ranks = plan
    costs = [n + quadratic * n * n for n in lengths]

    result = packing.bins(
        lengths, max_tokens=max_tokens, ranks=ranks, cost=lambda n: n + quadratic * n * n
    )

    steps, cost, empty = best_fit_decreasing(lengths, costs, max_tokens, ranks)
    assert len(result[0]) == steps
    if not empty or len(lengths) < steps * ranks:  # otherwise, none may be left empty
        assert in_lockstep(result, costs) <= cost * (1 + 1e-9)


def lognormal_lengths(seed, *, median=3000, sigma=1.0, samples=10_000, cap=32_768):
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, samples)
    return np.clip(lengths, 1, cap).astype(int)


def dense_model_cost(n):
    """7 billion parameters, 32 layers of width 4096, in FLOPs of a forward pass."""
    return 14e9 * n + 2 * 32 * 4096 * n * (n + 1.0)


def unavoidable(lengths, costs, max_tokens, ranks):
    """A lower bound of the cost: the mean; or the most expensive sample, the rest divided evenly.

    In the micro-step of the most expensive sample, ranks do the most expensive work that they have
    room for.
    """
    longest_first = np.argsort(-lengths)
    tokens = np.append(0, np.cumsum(lengths[longest_first]))
    spent = np.append(0, np.cumsum(costs[longest_first]))
    beside = min(np.interp(ranks * max_tokens, tokens, spent), ranks * costs.max())
    return max(spent[-1] / ranks, costs.max() + (spent[-1] - beside) / ranks)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("max_tokens", [32_768, 65_536])
@pytest.mark.parametrize("cost", [float, dense_model_cost])
@pytest.mark.parametrize("sigma", [0.7, 1.0, 1.5])
def test_ranks_hardly_wait_for_each_other(seed, max_tokens, cost, sigma):
    lengths, ranks = lognormal_lengths(seed, sigma=sigma), 64
    costs = np.array([cost(n) for n in lengths])

    result = packing.bins(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)

    bound = unavoidable(lengths, costs, max_tokens, ranks)
    assert in_lockstep(result, costs) <= 1.012 * bound
    if (sigma, max_tokens, cost) != (0.7, 32_768, dense_model_cost):  # there, by 1.3 %
        assert bound == pytest.approx(costs.sum() / ranks)
    assert len(result[0]) <= -(-lengths.sum() // (ranks * max_tokens)) + 1
    assert max(lengths[members].sum() for members in itertools.chain(*result)) <= max_tokens
    spent = [sum(costs[members].sum() for members in steps) for steps in result]
    assert max(spent) <= 1.02 * min(spent)


def test_few_samples_to_a_micro_batch_that_is_nearly_full():
    """About 3.5 in each, 97 % full: spread evenly, the last ones find no room."""
    lengths = lognormal_lengths(0, median=8103, sigma=0.5)

    result = packing.bins(lengths, max_tokens=32_768, ranks=64)

    assert lengths.sum() > 0.97 * len(result[0]) * 64 * 32_768
    assert in_lockstep(result, lengths) <= 1.003 * lengths.sum() / 64


@pytest.mark.parametrize("ranks", [1, 2, 7, 128, 512])
@pytest.mark.parametrize("median", [300, 9000])
def test_bins_are_valid_at_any_number_of_ranks(ranks, median):
    lengths = lognormal_lengths(ranks, median=median, samples=3000)

    result = packing.bins(lengths, max_tokens=32_768, ranks=ranks, cost=dense_model_cost)

    assert len(result) == ranks
    assert len({len(steps) for steps in result}) == 1
    assert sorted(i for steps in result for members in steps for i in members) == [*range(3000)]
    assert max(lengths[members].sum() for members in itertools.chain(*result)) <= 32_768


def test_samples_of_one_length_balance_exactly():
    result = packing.bins([100] * 96, max_tokens=250, ranks=16)

    assert [[len(members) for members in steps] for steps in result] == [[2, 2, 2]] * 16


def test_a_giant_shares_its_micro_step_with_as_much_as_it_takes():
    """One of 8, beside which the other ranks have time for 8 each: 1+1+…, in one micro-step."""
    result = packing.bins([8] + [1] * 24, max_tokens=100, ranks=4)

    assert len(result[0]) == 1
    assert in_lockstep(result, [8] + [1] * 24) == 8


def test_families_whose_flops_are_not_counted_are_balanced_by_tokens(caplog):
    dense = tiny_config("llama")
    assert packing.document_cost(dense)([8, 9]).tolist() == flops.training(dense, [8, 9]).tolist()
    assert not caplog.records
    for _ in range(3):  # once per step
        assert packing.document_cost(tiny_config("longcat_flash")) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    reason = flops.REFUSED["longcat_flash"]
    assert record.getMessage().startswith("packs are balanced by tokens instead of FLOPs: ")
    assert record.getMessage().endswith(reason)


def test_pack_balances_by_the_cost_that_it_is_given():
    samples = [training_sample(1, n - 1, seed=n) for n in (4, 8, 4, 4, 8, 4, 15, 3)]
    lengths = [len(sample.token_ids) for sample in samples]
    plans = {}
    for name, cost in (("tokens", None), ("squares", lambda n: n**2.0)):
        plan = packing.bins(lengths, max_tokens=16, ranks=2, cost=cost)
        packed = packing.pack(samples, max_tokens=16, ranks=2, cost=cost)
        plans[name] = [[len(batch.token_ids) for batch in rank] for rank in packed]
        assert plans[name] == [[sum(lengths[i] for i in m) for m in rank] for rank in plan]

    assert plans["tokens"] != plans["squares"]


@pytest.mark.parametrize("given", [{}, {"ref_logprobs": np.ones(4), "weights": np.ones(4)}])
def test_a_rank_without_a_sample_gets_one_row_that_trains_nothing(given):
    _, (filler,) = packing.pack([training_sample(2, 2, **given)], max_tokens=8, ranks=2)

    assert filler.token_ids.shape == (1,)
    assert filler.cu_seqlens.tolist() == [0, 1]
    assert filler.loss_mask.tolist() == [False]
    assert filler.versions.tolist() == [NOT_SAMPLED]
    for x in (filler.behavior_logprobs, filler.advantages):
        assert x.tolist() == [0.0]
    for x in (filler.ref_logprobs, filler.weights):
        assert x.tolist() == [0.0] if given else x is None


def test_bins_at_the_edges():
    assert packing.bins([1, 1], max_tokens=1, ranks=1) == [[[0], [1]]]
    assert packing.bins([1, 1], max_tokens=1, ranks=2, cost=lambda n: 0 * n) == [[[0]], [[1]]]
    with pytest.raises(ValueError, match="sample 1 has 5 tokens"):
        packing.bins([4, 5], max_tokens=4, ranks=1)


def test_minibatches_are_neighbors_and_alike_in_number():
    samples = [
        make_sample(seed=seed, kind=TrainingSample, advantages=np.zeros(7)) for seed in range(7)
    ]

    first, second, third = packing.minibatches(samples, 3)

    assert [*first, *second, *third] == samples
    assert [len(first), len(second), len(third)] == [2, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_rank_without_samples_has_as_many_minibatches(count):
    assert packing.minibatches([], count) == [[]] * count
    assert packing.pack([], max_tokens=8, ranks=3) == [[], [], []]


def test_less_than_one_minibatch_is_refused():
    with pytest.raises(ValueError, match="count is 0; expected at least 1"):
        packing.minibatches([], 0)
