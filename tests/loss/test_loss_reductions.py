"""Reductions by hand; masked rows, empty selections, and any division of a step."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    F64,
    RECIPES,
    REDUCTIONS,
    SURROGATES,
    TOKEN_LOSSES,
    Ranks,
    alone,
    random_rows,
    random_step,
)

from primerl import loss

close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
NAN = float("nan")

# Sequence 0 has two of three rows trained, 1 has none, 2 has one.
X = [1.0, 9.0, 4.0, 9.0, 5.0]
MASK = torch.tensor([True, False, True, False, True])
IDS = torch.tensor([0, 0, 0, 1, 2])
BY_HAND = {
    "token_mean": (
        lambda x, **options: loss.token_mean(x, MASK, **options),
        {"denom": 4},
        2.5,
        [0.25, 0.0, 0.25, 0.0, 0.25],
    ),
    "sequence_mean": (
        lambda x, **options: loss.sequence_mean(x, MASK, IDS, **options),
        {"denom": 2},
        (2.5 + 5.0) / 2,
        [0.25, 0.0, 0.25, 0.0, 0.5],
    ),
    "fixed_length_mean": (
        lambda x, **options: loss.fixed_length_mean(x, MASK, **options),
        {"length": 5, "denom": 2},
        1.0,
        [0.1, 0.0, 0.1, 0.0, 0.1],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("kind", [float, int, torch.tensor])
def test_by_hand(name, kind):
    reduction, options, expected, slope = BY_HAND[name]
    x = torch.tensor(X, **F64, requires_grad=True)

    mean = reduction(x, **(options | {"denom": kind(options["denom"])}))
    mean.backward()

    assert mean.shape == ()
    assert mean.item() == pytest.approx(expected, rel=1e-12)
    close(x.grad, torch.tensor(slope, **F64))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name, given):
    reduction, options, expected, _ = BY_HAND[name]

    mean = reduction(torch.tensor(X, dtype=given), **options)

    assert mean.dtype == (torch.float64 if given == torch.float64 else torch.float32)
    assert mean.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", BY_HAND)
def test_half_precision_is_summed_in_float32(name):
    """300 ones in bfloat16 are 256: every further one is rounded away."""
    reduction = getattr(loss, name)
    x, mask = torch.full((300,), 1.0, dtype=torch.bfloat16), torch.ones(300, dtype=torch.bool)
    options = {
        "token_mean": ((), {}),
        "sequence_mean": ((torch.arange(300),), {}),
        "fixed_length_mean": ((), {"length": 1.0}),
    }[name]

    assert reduction(x, mask, *options[0], **options[1], denom=1).item() == 300


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("denom", [0, -1, NAN, torch.tensor(0), torch.tensor(-2.0)])
def test_a_denominator_must_be_positive(name, denom):
    reduction, options, _, _ = BY_HAND[name]
    counted = "tokens" if name == "token_mean" else "sequences"

    with pytest.raises(ValueError, match=f"denom is .*trained {counted}"):
        reduction(torch.tensor(X), **(options | {"denom": denom}))


@pytest.mark.parametrize("length", [0, -1, NAN])
def test_a_length_must_be_positive(length):
    with pytest.raises(ValueError, match="length is .*above 0"):
        loss.fixed_length_mean(torch.tensor(X), MASK, length=length, denom=1)


@pytest.mark.parametrize("surrogate", TOKEN_LOSSES)
@pytest.mark.parametrize("rows_left", [0, 22])
def test_nothing_selected_is_zero_with_a_graph(surrogate, rows_left):
    x, rows = random_rows()
    x, rows = x[:rows_left].requires_grad_(), rows[:rows_left]
    rows.loss_mask[:] = False

    for reduction, denom in itertools.product(REDUCTIONS.values(), [0, torch.tensor(0), 3]):
        x.grad = None
        mean = reduction(TOKEN_LOSSES[surrogate](x, rows, alone)[0], rows, alone, denom, denom)
        mean.backward()

        assert mean.item() == 0
        assert x.grad.tolist() == [0.0] * rows_left


@pytest.mark.parametrize("name", REDUCTIONS)
def test_nothing_selected_but_nan_is_zero_with_a_graph(name):
    x, rows = random_rows()
    rows.loss_mask[:] = False
    y = torch.full_like(x, NAN).requires_grad_()

    mean = REDUCTIONS[name](y, rows, alone, 0, 0)
    mean.backward()

    assert mean.item() == 0
    assert not y.grad.any()


@pytest.mark.parametrize("surrogate", TOKEN_LOSSES)
def test_masked_rows_have_no_effect(surrogate):
    clean, rows = random_rows(seed=3)
    poisoned = clean.clone()
    poisoned[~rows.loss_mask] = torch.tensor([NAN, math.inf, -math.inf, 1e30, -1e30], **F64)

    for reduction in REDUCTIONS.values():
        found = []
        for logprobs in (clean, poisoned):
            x = logprobs.clone().requires_grad_()
            mean = reduction(TOKEN_LOSSES[surrogate](x, rows, alone)[0], rows, alone, 5, 2)
            mean.backward()
            found.append((mean.detach(), x.grad))
        (mean, slope), (poisoned_mean, poisoned_slope) = found
        assert poisoned_mean.equal(mean)
        assert poisoned_slope.equal(slope)
        assert slope[rows.loss_mask].any()


def test_gspo_ignores_the_samplers_logprobs_in_masked_rows():
    x, rows = random_rows(seed=3)
    arguments = (rows.loss_mask, rows.sequence_ids)
    expected = loss.gspo(x, rows.behavior, rows.advantages, *arguments)[0]
    behavior, advantages = (y.where(rows.loss_mask, NAN) for y in (rows.behavior, rows.advantages))

    per_token, aux = loss.gspo(x.requires_grad_(), behavior, advantages, *arguments)
    loss.sequence_mean(per_token, *arguments, denom=2).backward()

    assert per_token[rows.loss_mask].equal(expected[rows.loss_mask])
    assert per_token.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(value.isfinite().all() for value in aux.values())


@pytest.mark.parametrize("surrogate", TOKEN_LOSSES)
def test_a_nan_in_a_trained_row_is_seen_in_the_loss(surrogate):
    """No gradient reaches that row, and no NaN gradient reaches any row."""
    x, rows = random_rows(seed=3)
    wrong = rows.loss_mask.nonzero()[2, 0]
    x[wrong] = NAN

    for reduction in REDUCTIONS.values():
        own = x.clone().requires_grad_()
        mean = reduction(TOKEN_LOSSES[surrogate](own, rows, alone)[0], rows, alone, 5, 2)
        mean.backward()
        assert mean.isnan()
        assert own.grad[wrong] == 0
        assert own.grad.isfinite().all()


@pytest.mark.parametrize("name", REDUCTIONS)
@given(assignment=st.lists(st.integers(0, 2), min_size=22, max_size=22))
@settings(max_examples=15, deadline=None)
def test_rows_may_lie_on_several_ranks(name, assignment):
    """The loss is the sum of the ranks' parts, and each row's gradient is what it was."""
    x, rows = random_rows(seed=4)
    rank_of = torch.tensor(assignment)

    def part(x, rows, all_sum):
        x = x.clone().requires_grad_()
        mean = REDUCTIONS[name](x.square(), rows, all_sum, 13, 4)
        mean.backward()
        return mean.detach(), x.grad

    whole, slope = part(x, rows, alone)
    parts = Ranks(3).run(lambda r, all_sum: part(x[rank_of == r], rows[rank_of == r], all_sum))

    close(sum(mean for mean, _ in parts), whole)
    for rank, (_, own) in enumerate(parts):
        close(own, slope[rank_of == rank])


LAYOUTS = [
    {"max_tokens": 41, "ranks": 1, "order": [9, 3, 0, 6, 1, 8, 2, 5, 4, 7]},
    {"max_tokens": 30, "ranks": 2, "order": [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]},
    {"max_tokens": 200, "ranks": 11},  # one rank gets a filler only
]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_step_does_not_depend_on_how_it_is_divided(recipe):
    """Packing order, micro-batches and ranks, all in float64, to 1e-12."""
    step = random_step()
    ((whole,),) = step.packed(max_tokens=200, ranks=1)
    expected, slope = step.gradient([whole], recipe)
    assert slope.count_nonzero() > 10

    for layout in LAYOUTS:
        parts = [part for mine in step.packed(**layout) for part in mine]
        assert len(parts) > 1
        mean, gradient = step.gradient(parts, recipe)
        close(mean, expected)
        close(gradient, slope)


def test_the_step_has_something_to_clip_and_drop():
    """Otherwise the test above would compare the unbounded branch only."""
    step = random_step()
    (((labels, rows),),) = step.packed(max_tokens=200, ranks=1)

    for name, surrogate in SURROGATES.items():
        flags = surrogate(step.logprobs[labels], rows, alone)[1]
        for flag in {"clipped", "dropped"} & flags.keys():
            assert 0.02 < flags[flag][rows.loss_mask].mean() < 0.98, (name, flag)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=10, max_size=14),
    max_tokens=st.integers(12, 60),
    ranks=st.integers(1, 3),
    recipe=st.sampled_from(RECIPES),
    data=st.data(),
)
@settings(max_examples=20, deadline=None)
def test_no_step_depends_on_how_it_is_divided(lengths, max_tokens, ranks, recipe, data):
    step = random_step(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    if not any(sample.loss_mask.any() for sample in step.samples):
        return
    ((whole,),) = step.packed(max_tokens=200, ranks=1)
    cut = step.packed(max_tokens=max_tokens, ranks=ranks, order=order)

    expected, slope = step.gradient([whole], recipe)
    mean, gradient = step.gradient([part for mine in cut for part in mine], recipe)

    close(mean, expected)
    close(gradient, slope)


def test_low_precision_is_divided_in_float32():
    x, mask = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool)

    mean = loss.sequence_mean(x, mask, torch.zeros(3, dtype=torch.int64), denom=1)

    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(1.0, abs=1e-6)


def test_a_denominator_that_is_no_number_is_refused_even_where_nothing_is_trained():
    with pytest.raises(ValueError, match="denom is nan"):
        loss.token_mean(torch.ones(1), torch.tensor([False]), denom=float("nan"))
