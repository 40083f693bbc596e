"""Statistics against sums by hand and numpy's quantiles; additive over any split of a step."""

import collections
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import F64

from primerl import loss
from primerl.loss.diagnostics import summarize, token_statistics

LN2 = math.log(2)
NAN = float("nan")

# Ratio, trained, version; the trainer is at version 3, and one step of staleness is allowed.
TABLE = [
    (2.0, True, 3),
    (0.5, True, 2),
    (9.0, False, 3),
    (4.0, True, 0),
    (1.0, True, 3),
    (0.25, True, 4),  # newer than the trainer
]


def by_hand(dtype=torch.float64):
    r, mask, versions = (torch.tensor(column) for column in zip(*TABLE, strict=True))
    behavior = torch.linspace(-4, -2, len(TABLE), dtype=dtype)
    return behavior + r.to(dtype).log(), behavior, mask, versions


statistics = functools.partial(token_statistics, version=3, max_staleness=1)


def test_sums_by_hand():
    sums = statistics(*by_hand())

    kl = {r: r - 1 - math.log(r) for r in (2.0, 0.5, 4.0, 1.0)}
    expected = torch.tensor([[kl[2.0] + kl[1.0], 2], [kl[0.5] + kl[4.0], 2]], **F64)
    torch.testing.assert_close(sums["kl_by_staleness"], expected)
    torch.testing.assert_close(
        sums["importance"], torch.tensor([5, 7.75, 4 + 0.25 + 16 + 1 + 0.0625], **F64)
    )
    assert sums["log_ratio_histogram"].sum() == 5
    assert sums.keys() == {"kl_by_staleness", "importance", "log_ratio_histogram"}


def test_metrics_by_hand():
    aux = {"clipped": torch.tensor([1.0, 0, 1, 1, 0, 1]), "ref_kl": torch.arange(6.0)}
    entropy = torch.tensor([0.5, 1.0, NAN, 1.5, 2.0, 0.0])

    metrics = summarize(statistics(*by_hand(), entropy=entropy, aux=aux))

    expected = {
        "mismatch_kl": (1 - LN2) / 2,
        "mismatch_tokens": 2,
        "off_policy_kl/1": (LN2 - 0.5 + 3 - 2 * LN2) / 2,
        "effective_sample_size": 7.75**2 / (5 * 21.3125),
        "entropy": 1.0,
        "tokens/clipped": 3 / 5,
        "tokens/ref_kl": (0 + 1 + 3 + 4 + 5) / 5,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert metrics.keys() - expected.keys() == {"ratio_p1", "ratio_p50", "ratio_p99"}
    assert all(type(value) is float for value in metrics.values())


def test_staleness_is_the_trainers_version_minus_the_tokens():
    """With room for three steps of staleness, every version has a bucket of its own."""
    metrics = summarize(token_statistics(*by_hand(), version=3, max_staleness=3))

    assert metrics["off_policy_kl/1"] == pytest.approx(LN2 - 0.5)
    assert metrics["off_policy_kl/3"] == pytest.approx(3 - 2 * LN2)
    assert "off_policy_kl/2" not in metrics


def test_on_policy():
    x = torch.tensor([-1.0, -0.1, -9.0])
    metrics = summarize(statistics(x, x, torch.tensor([True] * 3), torch.tensor([3, 3, 2]), aux={}))

    assert metrics == {
        "mismatch_kl": 0,
        "mismatch_tokens": 2,
        "off_policy_kl/1": 0,
        "effective_sample_size": 1,
        "ratio_p1": 1,
        "ratio_p50": 1,
        "ratio_p99": 1,
    }


def test_one_token_that_outweighs_all_leaves_a_sample_of_one():
    behavior = torch.tensor([-20.0, -1.0, -1.0, -1.0], **F64)
    logprobs = torch.tensor([-0.1, -20.0, -20.0, -20.0], **F64)
    mask, versions = torch.tensor([True] * 4), torch.tensor([3] * 4)

    metrics = summarize(statistics(logprobs, behavior, mask, versions))

    assert metrics["effective_sample_size"] == pytest.approx(1 / 4, rel=1e-6)


@pytest.mark.parametrize("rows", [0, 6])
def test_without_a_trained_token_there_are_no_metrics(rows):
    x, behavior, mask, versions = (column[:rows] for column in by_hand())
    mask = torch.zeros_like(mask)

    sums = statistics(x, behavior, mask, versions, entropy=x, aux={"clipped": x})

    assert summarize(sums) == {}
    assert summarize({}) == {}
    assert loss.mismatch_kl(x, behavior, mask, versions, version=3)[1].item() == 0


def test_without_a_token_of_its_own_version_there_is_no_mismatch():
    x, behavior, mask, versions = by_hand()

    metrics = summarize(statistics(x, behavior, mask & (versions < 3), versions))

    assert "mismatch_kl" not in metrics
    assert "off_policy_kl/1" in metrics


def test_mismatch_kl_is_that_of_the_statistics():
    total, count = loss.mismatch_kl(*by_hand(), version=3)

    assert count.item() == 2
    assert total.item() == pytest.approx(1 - LN2, rel=1e-12)
    metrics = summarize(statistics(*by_hand()))
    assert (total / count).item() == pytest.approx(metrics["mismatch_kl"], rel=1e-12)


def test_mismatch_kl_of_a_difference_of_one_rounding_keeps_its_digits():
    """``r - 1 - log r`` is 5e-7 here; formed naively in float32 it would have one digit."""
    x, behavior = torch.tensor([-1.0]), torch.tensor([-1.0 - 2**-10])
    rows = (torch.tensor([True]), torch.tensor([3]))
    exact = math.expm1(2**-10) - 2**-10

    assert loss.mismatch_kl(x, behavior, *rows, version=3)[0].item() == pytest.approx(exact, 1e-3)
    metrics = summarize(statistics(x, behavior, *rows))
    assert metrics["mismatch_kl"] == pytest.approx(exact, rel=1e-6)


@given(assignment=st.lists(st.integers(0, 3), min_size=6, max_size=6))
@settings(max_examples=20, deadline=None)
def test_sums_add_up_over_any_split(assignment):
    rows = by_hand()
    part_of, aux = torch.tensor(assignment), torch.linspace(0, 1, 6)
    whole = statistics(*rows, entropy=aux, aux={"clipped": aux})

    totals = collections.Counter()
    for part in range(4):
        mine = part_of == part
        parts = (column[mine] for column in rows)
        totals.update(statistics(*parts, entropy=aux[mine], aux={"clipped": aux[mine]}))

    assert totals.keys() == whole.keys()
    for name, total in totals.items():
        torch.testing.assert_close(total, whole[name], rtol=1e-12, atol=1e-12)
    assert summarize(totals) == pytest.approx(summarize(whole), rel=1e-9)


@given(
    scale=st.sampled_from([1e-9, 1e-6, 1e-3, 0.1, 1.0, 6.0]),
    shift=st.sampled_from([0.0, -0.5, 2.0]),
    size=st.integers(1, 300),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_quantiles_are_as_exact_as_promised(scale, shift, size, seed):
    """To 16% of the log-ratio, against numpy's quantiles; about 1 to a ten-millionth."""
    rng = np.random.default_rng(seed)
    log_r = (scale * (rng.standard_normal(size) + shift)).clip(-20, 20)
    x, behavior = torch.from_numpy(log_r), torch.zeros(size, **F64)

    metrics = summarize(
        statistics(x, behavior, torch.ones(size, dtype=torch.bool), torch.full((size,), 3))
    )

    for name, q in {"ratio_p1": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}.items():
        true = np.quantile(log_r, q, method="inverted_cdf")
        assert math.log(metrics[name]) == pytest.approx(true, rel=0.16, abs=1e-7)


def test_extreme_ratios_are_held_and_in_the_histogram():
    x, behavior = torch.tensor([-1.0, -90.0], **F64), torch.tensor([-90.0, -1.0], **F64)
    rows = (torch.tensor([True, True]), torch.tensor([3, 3]))

    sums = statistics(x, behavior, *rows)

    metrics = summarize(sums)
    assert metrics["mismatch_kl"] == pytest.approx((math.exp(20) - 21 + 19) / 2, rel=1e-9)
    assert math.log(metrics["ratio_p99"]) == pytest.approx(20, rel=0.16)
    assert math.log(metrics["ratio_p1"]) == pytest.approx(-20, rel=0.16)


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_detached_float64(given):
    x, behavior, mask, versions = by_hand(given)
    x.requires_grad_()

    sums = statistics(x, behavior, mask, versions, entropy=x * 2, aux={"clipped": x})

    assert {value.dtype for value in sums.values()} == {torch.float64}
    assert not any(value.requires_grad for value in sums.values())
    total, count = loss.mismatch_kl(x, behavior, mask, versions, version=3)
    assert not total.requires_grad
    assert total.dtype == (torch.float64 if given == torch.float64 else torch.float32)
    assert count.dtype == torch.int64


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf, 1e30])
def test_masked_rows_can_spoil_nothing(poison):
    x, behavior, mask, versions = by_hand()
    expected = statistics(x, behavior, mask, versions, entropy=x, aux={"clipped": x})
    total, _ = loss.mismatch_kl(x, behavior, mask, versions, version=3)
    x, behavior = x.where(mask, poison), behavior.where(mask, poison)

    sums = statistics(x, behavior, mask, versions, entropy=x, aux={"clipped": x})

    assert all(sums[name].equal(expected[name]) for name in expected)
    assert loss.mismatch_kl(x, behavior, mask, versions, version=3)[0].equal(total)


def test_a_nan_of_the_trainer_is_seen():
    x, behavior, mask, versions = by_hand()
    x[0] = NAN

    metrics = summarize(statistics(x, behavior, mask, versions))

    assert math.isnan(metrics["mismatch_kl"])
    assert math.isnan(metrics["effective_sample_size"])
    assert metrics["off_policy_kl/1"] > 0


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_of_staleness_that_would_mix_numerics_and_policy_is_refused(bound):
    with pytest.raises(ValueError, match=f"max_staleness={bound}: expected at least 1"):
        loss.Statistics(version=3, max_staleness=bound)


def test_by_default_eight_steps_are_told_apart():
    logprobs, behavior, mask = torch.zeros(12), -torch.ones(12), torch.ones(12, dtype=torch.bool)
    versions = 20 - torch.arange(12, dtype=torch.int32)

    sums = token_statistics(logprobs, behavior, mask, versions, version=20)

    assert sums["kl_by_staleness"][:, 1].tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 4]


def test_a_single_number_passes_through_the_summary():
    assert summarize({"loss": torch.tensor(0.25)}) == {"loss": 0.25}


def test_a_single_trained_token_is_summarized():
    x, mask = torch.tensor([-1.0, -2.0]), torch.tensor([False, True])
    versions = torch.tensor([-1, 3], dtype=torch.int32)

    sums = token_statistics(x, x, mask, versions, version=3, entropy=torch.tensor([9.0, 0.5]))

    metrics = summarize(sums)
    assert metrics["entropy"] == 0.5
    assert metrics["mismatch_kl"] == 0
    assert metrics["effective_sample_size"] == 1


def test_statistics_of_a_step_by_hand():
    """Two micro-batches on each of two ranks, of which the other has the same sums."""
    rows = by_hand()
    ours = loss.Statistics(version=3, max_staleness=1)
    for mine in (slice(0, 2), slice(2, 6)):
        ours.add(*(column[mine] for column in rows), loss=torch.tensor(0.25, requires_grad=True))

    metrics = ours.summary(lambda sums: {name: 2 * total for name, total in sums.items()})

    expected = summarize(statistics(*rows))
    assert metrics == pytest.approx(expected | {"loss": 1.0, "mismatch_tokens": 4})
    assert ours.summary()["loss"] == 0.5


def test_after_the_first_minibatch_nothing_is_a_mismatch_any_more():
    ours = loss.Statistics(version=3)
    ours.add(*by_hand(), loss=torch.tensor(1.0))
    first = ours.summary()
    ours.end_minibatch()
    logprobs, *rest = by_hand()
    ours.add(logprobs + 5, *rest, loss=torch.tensor(2.0))
    ours.end_minibatch()

    both = ours.summary()

    assert both["mismatch_kl"] == first["mismatch_kl"]
    assert both["off_policy_kl/1"] > first["off_policy_kl/1"]
    assert both["loss"] == 1.5


def test_statistics_of_nothing_are_empty():
    ours = loss.Statistics(version=0)

    ours.end_minibatch()

    assert ours.summary() == {}
