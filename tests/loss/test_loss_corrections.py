"""Corrections against tables computed by hand; detached, constant over documents, summed."""

import functools
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    CORRECTIONS,
    F64,
    SEQUENCE_CORRECTIONS,
    TOKEN_LOSSES,
    Ranks,
    alone,
    random_rows,
)

from primerl import loss

close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
NAN = float("nan")

# The correction, its hyperparameters, and weights by ratio.
BY_TOKEN = [
    (loss.token_tis, {}, {0.01: 0.01, 1.0: 1.0, 1.99: 1.99, 2.01: 2.0, 50.0: 2.0}),
    (loss.token_tis, {"cap": 0.5}, {0.25: 0.25, 1.0: 0.5}),
    (loss.token_mis, {}, {0.01: 0.01, 1.0: 1.0, 1.99: 1.99, 2.01: 0.0, 50.0: 0.0}),
    (loss.token_mis, {"cap": 0.5}, {0.25: 0.25, 1.0: 0.0}),
    (loss.icepop, {}, {0.49: 0.0, 0.51: 0.51, 1.0: 1.0, 4.99: 4.99, 5.01: 0.0}),
    (loss.icepop, {"low": 0.9, "high": 1.2}, {0.8: 0.0, 1.0: 1.0, 1.1: 1.1, 1.3: 0.0}),
]
# Weights by the ratios of the trained tokens of one sequence.
BY_SEQUENCE = [
    (loss.sequence_tis, {}, {(3.0, 0.5): 1.5, (3.0, 0.7): 2.0, (0.1, 0.1): 0.01, (1.9,): 1.9}),
    (loss.sequence_tis, {"cap": 5.0}, {(2.0, 2.0): 4.0, (2.0, 2.0, 2.0): 5.0}),
    (loss.sequence_mis, {}, {(3.0, 0.5): 1.5, (3.0, 0.7): 0.0, (0.1, 0.1): 0.01, (1.9,): 1.9}),
    (loss.sequence_mis, {"cap": 5.0}, {(2.0, 2.0): 4.0, (2.0, 2.0, 2.0): 0.0}),
    (
        loss.geometric_rejection,
        {},
        {
            (1.0009,): 1,
            (1.0011,): 0,
            (0.9991,): 1,
            (0.9989,): 0,
            (2.0, 0.5): 1,
            (1.0009,) * 9: 1,  # their product is above 1.001
            (1.0025, 1.0): 0,
        },
    ),
    (
        loss.geometric_rejection,
        {"low": 0.5, "high": 3.0},
        {(8.0, 1.0): 1, (10.0, 1.0): 0, (0.3, 1.0): 1, (0.2, 1.0): 0},
    ),
    (
        loss.veto,
        {},
        {(1.0, 1.1e-4): 1, (1.0, 0.9e-4): 0, (9.0, 9.0): 1, (1e-5,): 0, (1e-5, 1e5, 1e-5): 0},
    ),
    (loss.veto, {"threshold": 0.5}, {(0.51, 2.0): 1, (0.49, 2.0): 0}),
]


@pytest.mark.parametrize(("correction", "hyperparameters", "table"), BY_TOKEN)
def test_corrections_by_token(correction, hyperparameters, table):
    r, expected = (torch.tensor(list(column), **F64) for column in zip(*table.items(), strict=True))
    behavior = torch.linspace(-5, -1, len(r), **F64)
    x = (behavior + r.log()).requires_grad_()

    weight = correction(x, behavior, **hyperparameters)

    close(weight, expected)
    assert not weight.requires_grad


@pytest.mark.parametrize(("correction", "hyperparameters", "table"), BY_SEQUENCE)
def test_corrections_by_sequence(correction, hyperparameters, table):
    """Each sequence has a masked row with an extreme ratio beside its trained ones."""
    ids = [i for i, ratios in enumerate(table) for _ in [*ratios, None]]
    mask = [trained for ratios in table for trained in [*[True] * len(ratios), False]]
    r = torch.tensor([x for ratios in table for x in [*ratios, 1e-7]], **F64)
    behavior = torch.linspace(-5, -1, len(r), **F64)
    x = (behavior + r.log()).requires_grad_()

    weight = correction(x, behavior, torch.tensor(mask), torch.tensor(ids), **hyperparameters)

    close(weight, torch.tensor([float(list(table.values())[i]) for i in ids], **F64))
    assert not weight.requires_grad


@pytest.mark.parametrize(
    ("correction", "hyperparameters", "ratio", "expected"),
    [
        (loss.token_mis, {"cap": 2.0}, 2.0, 2.0),
        (loss.icepop, {"low": 0.5, "high": 2.0}, 0.5, 0.5),
        (loss.icepop, {"low": 0.5, "high": 2.0}, 2.0, 2.0),
        (loss.icepop, {"low": 1.0, "high": 1.0}, 1.0, 1.0),
        (loss.sequence_mis, {"cap": 2.0}, 2.0, 2.0),
        (loss.geometric_rejection, {"low": 0.5, "high": 2.0}, 0.5, 1.0),
        (loss.geometric_rejection, {"low": 0.5, "high": 2.0}, 2.0, 1.0),
        (loss.geometric_rejection, {"low": 1.0, "high": 1.0}, 1.0, 1.0),
        (loss.veto, {"threshold": 0.5}, 0.5, 1.0),
    ],
)
def test_bounds_are_inclusive(correction, hyperparameters, ratio, expected):
    x = torch.tensor([ratio], **F64).log()
    assert x.exp().item() == ratio  # float64 can say so
    rows = (torch.tensor([True]), torch.tensor([0]))[: 2 if _by_sequence(correction) else 0]

    weight = correction(x, torch.zeros(1, **F64), *rows, **hyperparameters)

    assert weight.item() == expected


def _by_sequence(correction):
    return "sequence_ids" in inspect.signature(correction).parameters


@pytest.mark.parametrize("name", SEQUENCE_CORRECTIONS)
def test_a_sequence_without_trained_tokens_is_neither_cut_nor_rejected(name):
    x, rows = random_rows(lengths=(5,), spread=3.0)
    rows.loss_mask[:] = False

    assert SEQUENCE_CORRECTIONS[name](x, rows, alone).tolist() == [1.0] * 5


@pytest.mark.parametrize("name", SEQUENCE_CORRECTIONS)
@given(assignment=st.lists(st.integers(0, 2), min_size=22, max_size=22), seed=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_sequences_may_lie_on_several_ranks(name, assignment, seed):
    x, rows = random_rows(seed=seed)
    rank_of = torch.tensor(assignment)
    whole = SEQUENCE_CORRECTIONS[name](x, rows, alone)

    parts = Ranks(3).run(
        lambda r, all_sum: SEQUENCE_CORRECTIONS[name](x[rank_of == r], rows[rank_of == r], all_sum)
    )

    for rank, part in enumerate(parts):
        close(part, whole[rank_of == rank])
    for number in rows.sequence_ids.unique():
        assert len(whole[rows.sequence_ids == number].unique()) == 1


@pytest.mark.parametrize("name", SEQUENCE_CORRECTIONS)
def test_the_random_sequences_are_of_both_kinds(name):
    """Otherwise the test above would prove nothing."""
    weights = set()
    for seed in range(6):
        x, rows = random_rows(seed=seed)
        weight = SEQUENCE_CORRECTIONS[name](x, rows, alone)
        weights |= {round(w, 3) for w in weight[rows.loss_mask].tolist()}

    assert len(weights) >= 2


@pytest.mark.parametrize("name", SEQUENCE_CORRECTIONS)
@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf, 1e30])
def test_what_is_masked_out_does_not_matter(name, poison):
    x, rows = random_rows(seed=2)
    expected = SEQUENCE_CORRECTIONS[name](x, rows, alone)
    masked = ~rows.loss_mask

    x[masked] = poison
    assert SEQUENCE_CORRECTIONS[name](x, rows, alone).equal(expected)
    rows.behavior[masked] = poison
    assert SEQUENCE_CORRECTIONS[name](x, rows, alone).equal(expected)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name, given):
    x, rows = random_rows(dtype=given)

    weight = CORRECTIONS[name](x, rows, alone)

    assert weight.dtype == (torch.float64 if given == torch.float64 else torch.float32)
    assert weight.shape == x.shape


def test_extreme_ratios_are_clamped():
    x, behavior = torch.tensor([-5.0, -80.0], **F64), torch.tensor([-80.0, -5.0], **F64)
    mask, ids = torch.tensor([True, True]), torch.tensor([0, 1])
    limits = torch.tensor([math.exp(20), math.exp(-20)], **F64)

    close(loss.token_tis(x, behavior, cap=math.inf), limits)
    close(loss.sequence_tis(x, behavior, mask, ids, cap=math.inf), limits)


@pytest.mark.parametrize(
    ("correction", "default"),
    [
        (loss.token_tis, {"cap": 2.0}),
        (loss.sequence_tis, {"cap": 2.0}),
        (loss.token_mis, {"cap": 2.0}),
        (loss.sequence_mis, {"cap": 2.0}),
        (loss.icepop, {"low": 0.5, "high": 5.0}),
        (loss.geometric_rejection, {"low": 0.999, "high": 1.001}),
        (loss.veto, {"threshold": 1e-4}),
    ],
)
def test_hyperparameters_are_keywords_with_the_documented_defaults(correction, default):
    parameters = inspect.signature(correction).parameters

    for name, value in default.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == value


@pytest.mark.parametrize(
    ("correction", "hyperparameters"),
    [
        *(
            (fn, {"cap": cap})
            for fn in (loss.token_tis, loss.token_mis, loss.sequence_tis, loss.sequence_mis)
            for cap in (0.0, -1.0, NAN)
        ),
        *((loss.veto, {"threshold": x}) for x in (0.0, -1e-4, NAN)),
        *(
            (fn, {"low": low, "high": high})
            for fn in (loss.icepop, loss.geometric_rejection)
            for low, high in [(-0.1, 2.0), (2.0, 1.0), (NAN, 1.0), (0.5, NAN)]
        ),
    ],
)
def test_hyperparameters_out_of_range_are_refused(correction, hyperparameters):
    x = torch.tensor([-1.0])
    rows = (torch.tensor([True]), torch.tensor([0]))[: 2 if _by_sequence(correction) else 0]
    name, value = next(iter(hyperparameters.items()))

    with pytest.raises(ValueError, match=f"{name}={value}.*expected"):
        correction(x, x, *rows, **hyperparameters)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_corrected_loss_has_the_gradient_of_the_loss_times_a_constant(name):
    logprobs, rows = random_rows(seed=5)
    x = logprobs.clone().requires_grad_()

    (
        CORRECTIONS[name](x, rows, alone) * TOKEN_LOSSES["reinforce"](x, rows, alone)[0]
    ).sum().backward()

    r = (logprobs - rows.behavior).exp()
    close(x.grad, -CORRECTIONS[name](logprobs, rows, alone) * rows.advantages * r)


@pytest.mark.parametrize(
    "correction",
    [
        loss.token_tis,
        loss.token_mis,
        loss.icepop,
        loss.sequence_tis,
        loss.sequence_mis,
        loss.geometric_rejection,
        loss.veto,
    ],
)
def test_a_trainer_that_is_not_finite_is_not_hidden_by_a_weight_of_zero(correction):
    x = torch.tensor([-1.0, NAN, -1.0])
    behavior, ids = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([0, 1, 2])
    by_sequence = "sequence_ids" in inspect.signature(correction).parameters
    documents = (torch.ones(3, dtype=torch.bool), ids) if by_sequence else ()

    weights = correction(x, behavior, *documents)

    assert weights.isnan().tolist() == [False, True, False]
    assert weights[0] == weights[2] == 1
