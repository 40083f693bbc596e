"""Ratios of whole sequences and GSPO, against true geometric means and autograd through them."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import F64, Ranks, alone, random_rows

from primerl import loss

close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def by_hand():
    """Sequence 0: ratios 2 and 8 beside a masked row; 1: none trained; 2: 1/2; 5: 1/4, 4 and 27."""
    ratios = torch.tensor([2.0, 100.0, 8.0, 9.0, 0.5, 0.25, 4.0, 27.0], **F64)
    mask = torch.tensor([True, False, True, False, True, True, True, True])
    ids = torch.tensor([0, 0, 0, 1, 2, 5, 5, 5])
    behavior = torch.linspace(-3, -1, 8, **F64)
    return (behavior + ratios.log()).requires_grad_(), behavior, mask, ids


@pytest.mark.parametrize(
    ("length_normalized", "expected"),
    [(True, [4.0, 4.0, 4.0, 1.0, 0.5, 3.0, 3.0, 3.0]), (False, [16.0] * 3 + [1, 0.5] + [27.0] * 3)],
)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_the_ratio_of_sequences_by_hand(length_normalized, expected, kind):
    x, behavior, mask, ids = by_hand()

    s = loss.sequence_ratio(x, behavior, mask, ids.to(kind), length_normalized=length_normalized)
    s.sum().backward()

    close(s.detach(), torch.tensor(expected, **F64))
    close(x.grad, torch.where(mask, s.detach(), 0.0))


def test_geometric_means_are_the_default_and_the_product_is_one_length_apart():
    x, behavior, mask, ids = by_hand()

    assert loss.sequence_ratio(x, behavior, mask, ids)[0].item() == pytest.approx(4)


def test_the_order_of_rows_does_not_matter():
    x, behavior, mask, ids = by_hand()
    order = torch.tensor([7, 2, 4, 0, 5, 3, 1, 6])

    s = loss.sequence_ratio(x, behavior, mask, ids)
    mixed = loss.sequence_ratio(x[order], behavior[order], mask[order], ids[order])

    close(mixed, s[order])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_log_of_the_result_is_clamped(sign):
    """Sequence 0: a mean of 25, sequence 1: a token of 50, but a mean of 20; 2: one of 10."""
    log_r = sign * torch.tensor([25.0, 25.0, 50.0, -10.0, 20.0, 0.0], **F64)
    x = log_r.clone().requires_grad_()
    arguments = (torch.zeros(6, **F64), torch.ones(6, dtype=torch.bool))
    ids = torch.tensor([0, 0, 1, 1, 2, 2])

    s = loss.sequence_ratio(x, *arguments, ids)
    s.sum().backward()

    twenty, ten = math.exp(20 * sign), math.exp(10 * sign)
    close(s.detach(), torch.tensor([twenty] * 4 + [ten] * 2, **F64))
    close(x.grad, torch.tensor([0, 0, twenty, twenty, ten, ten], **F64))
    x.grad = None
    product = loss.sequence_ratio(x, *arguments, ids, length_normalized=False)
    product.sum().backward()
    close(product.detach(), torch.full((6,), twenty, **F64))
    close(x.grad, torch.tensor([0, 0, 0, 0, twenty, twenty], **F64))


def test_gspo_by_hand():
    """Ratios of 4, 1/2 and 3 as above, clipped to 1/4 .. 2; one advantage for each sequence."""
    x, behavior, mask, ids = by_hand()
    advantages = torch.tensor([1.0, 1.0, 1.0, 5.0, -2.0, -1.0, -1.0, -1.0], **F64)

    per_token, aux = loss.gspo(x, behavior, advantages, mask, ids, clip_low=0.75, clip_high=1.0)
    loss.sequence_mean(per_token, mask, ids, denom=3).backward()

    close(per_token[mask].detach(), torch.tensor([-2.0, -2.0, 1.0, 3.0, 3.0, 3.0], **F64))
    assert aux["clipped"][mask].tolist() == [1, 1, 0, 0, 0, 0]
    third = 1 / 3
    expected = [0, 0, 0, 0, third * 1.0, third * 1.0, third * 1.0, third * 1.0]
    close(x.grad, torch.tensor(expected, **F64))


@pytest.mark.parametrize(
    ("log_s", "advantage", "clipped"),
    [
        (3.9e-4, 1.0, 0),
        (4.1e-4, 1.0, 1),
        (4.1e-4, -1.0, 0),
        (-2.9e-4, -1.0, 0),
        (-3.1e-4, -1.0, 1),
        (-3.1e-4, 1.0, 0),
    ],
)
def test_the_clips_of_gspo_by_default(log_s, advantage, clipped):
    behavior = torch.tensor([-1.0, -2.0], **F64)
    logprobs = behavior + torch.tensor([log_s + 0.1, log_s - 0.1], **F64)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)

    _, aux = loss.gspo(logprobs, behavior, torch.full((2,), advantage, **F64), mask, ids)

    assert aux["clipped"].tolist() == [clipped] * 2


def true_gspo(x, rows, *, clip):
    """The objective of arXiv:2507.18071, equation 5, with a sequence's true ratio, differentiable.

    The advantage of a sequence is that of its first trained token.
    """
    total, sequences = 0.0, 0
    for number in rows.sequence_ids.unique().tolist():
        own = ((rows.sequence_ids == number) & rows.loss_mask).nonzero()[:, 0]
        if not len(own):
            continue
        s = torch.exp((x[own] - rows.behavior[own]).mean())
        a = rows.advantages[own[0]]
        total = total - torch.min(s * a, s.clamp(1 - clip, 1 + clip) * a)
        sequences += 1
    return total / sequences


def one_advantage_each(rows):
    for number in rows.sequence_ids.unique().tolist():
        own = rows.sequence_ids == number
        rows.advantages[own] = rows.advantages[own & rows.loss_mask].sum()
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_gspo_is_that_of_the_true_ratio_of_sequences(seed):
    x, rows = random_rows(lengths=(6, 3, 1, 8, 4, 2, 12, 5), seed=seed)
    rows = one_advantage_each(rows)
    x.requires_grad_()
    sequences = len(rows.sequence_ids[rows.loss_mask].unique())

    per_token, _ = loss.gspo(
        x,
        rows.behavior,
        rows.advantages,
        rows.loss_mask,
        rows.sequence_ids,
        clip_low=0.1,
        clip_high=0.1,
    )
    mean = loss.sequence_mean(per_token, rows.loss_mask, rows.sequence_ids, denom=sequences)
    expected = true_gspo(x, rows, clip=0.1)

    close(mean, expected)
    (gradient,) = torch.autograd.grad(mean, x)
    (true,) = torch.autograd.grad(expected, x)
    close(gradient, true)
    assert true.any()


@pytest.mark.parametrize("seed", range(2))
def test_gradients_of_gspo_agree_with_finite_differences(seed):
    x, rows = random_rows(lengths=(6, 3, 1, 8, 4, 2, 12, 5), seed=seed)
    rows = one_advantage_each(rows)

    def mean(x):
        arguments = (rows.advantages, rows.loss_mask, rows.sequence_ids)
        per_token, _ = loss.gspo(x, rows.behavior, *arguments, clip_low=0.1, clip_high=0.1)
        return loss.sequence_mean(per_token, *arguments[1:], denom=5)

    assert torch.autograd.gradcheck(mean, x.requires_grad_())


@pytest.mark.parametrize("length_normalized", [True, False])
@given(assignment=st.lists(st.integers(0, 2), min_size=22, max_size=22), seed=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_sequences_may_lie_on_several_ranks(length_normalized, assignment, seed):
    """Rows go to any of three ranks, which may then have none, or none that is trained."""
    x, rows = random_rows(seed=seed)
    rank_of = torch.tensor(assignment)

    def ratio(x, rows, all_sum):
        x = x.clone().requires_grad_()
        s = loss.sequence_ratio(
            x,
            rows.behavior,
            rows.loss_mask,
            rows.sequence_ids,
            all_sum=all_sum,
            length_normalized=length_normalized,
        )
        s.sum().backward()
        return s.detach(), x.grad

    whole, slope = ratio(x, rows, alone)
    parts = Ranks(3).run(lambda r, all_sum: ratio(x[rank_of == r], rows[rank_of == r], all_sum))

    for rank, (part, part_slope) in enumerate(parts):
        close(part, whole[rank_of == rank])
        close(part_slope, slope[rank_of == rank])


def test_ranks_may_see_different_sequences():
    """Rank 0 has rows of sequences 0 to 2, rank 1 of 2 to 5, rank 2 has none at all."""
    x, behavior, mask, ids = by_hand()
    x = x.detach()
    cut = [slice(0, 4), slice(4, 8), slice(8, 8)]

    parts = Ranks(3).run(
        lambda rank, all_sum: loss.sequence_ratio(
            x[cut[rank]], behavior[cut[rank]], mask[cut[rank]], ids[cut[rank]], all_sum=all_sum
        )
    )

    assert [len(part) for part in parts] == [4, 4, 0]
    close(torch.cat(parts), loss.sequence_ratio(x, behavior, mask, ids))


def test_a_nan_in_a_trained_row_affects_its_own_sequence_only():
    x, behavior, mask, ids = by_hand()
    x = x.detach()
    x[6] = float("nan")

    s = loss.sequence_ratio(x, behavior, mask, ids)

    assert s[5:].isnan().all()
    assert s[:5].isfinite().all()


def test_long_sequences_in_float32_are_summed_in_float64():
    n = 100_000
    logprobs = 0.02 * torch.randn(n, generator=torch.Generator().manual_seed(0)) - 1
    behavior = torch.full((n,), -1.0)
    mask, ids = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)

    s = loss.sequence_ratio(logprobs, behavior, mask, ids, length_normalized=False)

    expected = math.exp(math.fsum(x + 1 for x in logprobs.tolist()))
    assert s[0].item() == pytest.approx(expected, rel=1e-6)


def test_gspo_sums_over_ranks_and_refuses_what_is_not_finite_where_it_trains():
    x, mask, ids = torch.tensor([-1.0, -2.0]), torch.tensor([True, False]), torch.tensor([0, 0])
    summed = []

    def all_sum(x):
        summed.append(x.shape)
        return x

    loss.gspo(x, x, torch.tensor([1.0, math.nan]), mask, ids, all_sum=all_sum)

    assert len(summed) == 2
    with pytest.raises(ValueError, match=r"advantages\[0\] is nan"):
        loss.gspo(x, x, torch.tensor([math.nan, 1.0]), mask, ids)
