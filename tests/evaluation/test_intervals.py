"""pass@k, intervals and comparisons: exact values, and how often intervals hold the truth."""

from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl import evaluation


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    samples = [1] * c + [0] * (n - c)
    draws = [any(draw) for draw in combinations(samples, k)]
    found = evaluation.pass_at_k(np.array([c]), np.array([n]), k=k)
    assert found == pytest.approx([sum(draws) / len(draws)])


def test_pass_at_k_of_many_samples_does_not_overflow():
    found = evaluation.pass_at_k(np.array([1, 0, 1000]), np.array([1000, 1000, 1000]), k=500)
    assert found == pytest.approx([0.5, 0.0, 1.0])


@pytest.mark.parametrize(("passed", "k"), [([1], 0), ([1], 3), ([3], 1), ([-1], 1)])
def test_pass_at_k_of_impossible_numbers(passed, k):
    with pytest.raises(ValueError, match=r"k is|passed must be"):
        evaluation.pass_at_k(np.array(passed), np.array([2]), k=k)
    with pytest.raises(ValueError, match="k is 5; expected 1 to 4, the fewest samples"):
        evaluation.pass_at_k(np.array([1, 1]), np.array([6, 4]), k=5)


TABLE = {  # of Student's distribution, two-sided 95% and 99%
    1: (12.7062, 63.6567),
    2: (4.3027, 9.9248),
    3: (3.1824, 5.8409),
    5: (2.5706, 4.0321),
    10: (2.2281, 3.1693),
    30: (2.0423, 2.7500),
    1000: (1.9623, 2.5808),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_students_quantile(freedom):
    for probability, expected in zip((0.975, 0.995), TABLE[freedom], strict=True):
        found = evaluation.intervals.student_quantile(probability, freedom=freedom)
        assert found == pytest.approx(expected, rel=0.01)


def test_the_interval_of_a_mean_by_hand():
    interval = evaluation.mean_interval(np.array([1.0, 2.0, 3.0, 6.0]))
    half = 3.1824 * sqrt(14 / 3) / 2  # variance 14 / 3 of 4 values
    assert interval.mean == 3.0
    assert interval.low == pytest.approx(3 - half, rel=0.01)
    assert interval.high == pytest.approx(3 + half, rel=0.01)
    assert str(evaluation.Interval(mean=0.5, low=0.25, high=0.75, tasks=9)) == (
        "0.5000 [0.2500, 0.7500]"
    )


def test_the_interval_of_a_share_is_wilsons_where_each_task_has_one_sample():
    values = np.array([1.0] * 30 + [0.0] * 70)
    interval = evaluation.share_interval(values)
    t, n, p = 1.9842, 100, 0.3  # 99 degrees of freedom
    center = (p + t * t / (2 * n)) / (1 + t * t / n)
    half = t * sqrt(p * (1 - p) / n + t * t / (4 * n * n)) / (1 + t * t / n)
    assert interval.low == pytest.approx(center - half, abs=1e-3)
    assert interval.high == pytest.approx(center + half, abs=1e-3)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_shares_of_all_or_none_leave_room(value):
    interval = evaluation.share_interval(np.full(20, value))
    assert interval.mean == value
    assert 0.1 < interval.high - interval.low < 0.25
    assert (interval.low if value == 0 else interval.high) == pytest.approx(value)


def test_values_that_have_no_interval():
    with pytest.raises(ValueError, match="at least one task"):
        evaluation.mean_interval(np.array([]))
    with pytest.raises(ValueError, match="finite"):
        evaluation.mean_interval(np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="between 0 and 1; use mean_interval"):
        evaluation.share_interval(np.array([0.5, 1.5]))
    with pytest.raises(ValueError, match="confidence is 95"):
        evaluation.share_interval(np.array([0.5]), confidence=95)
    assert evaluation.mean_interval(np.array([1.0])).high == np.inf


@pytest.mark.parametrize("tasks", [10, 30, 100])
@pytest.mark.parametrize(("samples", "k"), [(1, 1), (4, 1), (8, 4)])
@pytest.mark.parametrize("abilities", [(0.5, 0.5), (2.0, 8.0), (20.0, 20.0)])
def test_intervals_of_shares_hold_the_truth_as_often_as_they_say(tasks, samples, k, abilities):
    """Tasks are as hard as a beta distribution says; the truth is the mean over all of them."""
    rng = np.random.default_rng(0)
    truth = (1 - (1 - rng.beta(*abilities, 200_000)) ** k).mean()
    n = np.full(tasks, samples)
    held = 0
    for _ in range(500):
        passed = rng.binomial(samples, rng.beta(*abilities, tasks))
        interval = evaluation.share_interval(evaluation.pass_at_k(passed, n, k=k))
        held += interval.low <= truth <= interval.high
    assert 0.9 <= held / 500 <= 1.0


def test_intervals_narrow_with_tasks_and_with_samples():
    rng = np.random.default_rng(0)

    def width(tasks, samples):
        passed = rng.binomial(samples, 0.5, tasks)
        interval = evaluation.share_interval(passed / samples)
        return interval.high - interval.low

    assert width(400, 1) == pytest.approx(width(100, 1) / 2, rel=0.1)
    assert width(400, 16) < width(400, 1) / 3


def test_a_comparison_by_hand():
    comparison = evaluation.compare(np.array([0.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0]))
    assert comparison.difference == pytest.approx(2 / 3)
    # Of the 8 exchanges, the differences 1, 1, 0 add up to 2 or -2 in 4.
    assert comparison.p_value == pytest.approx(0.5)
    assert comparison.tasks == 3
    with pytest.raises(ValueError, match="2 and 3 tasks"):
        evaluation.compare(np.zeros(2), np.zeros(3))


def test_differences_that_cancel_have_a_p_value_of_one():
    """Their sum is 0, but for the rounding of tenths."""
    differences = np.array([0.1, 0.7, -0.3, -0.5])
    assert differences.sum() != 0
    assert evaluation.compare(np.zeros(4), differences).p_value == 1.0


def test_a_difference_is_called_significant_as_rarely_as_it_should():
    rng = np.random.default_rng(0)
    values = []
    for _ in range(200):
        abilities = rng.beta(2, 2, 40)
        first, second = rng.binomial(1, abilities, (2, 40)).astype(float)
        values.append(evaluation.compare(first, second).p_value)
    assert np.mean(np.array(values) <= 0.05) <= 0.08


def test_pairing_finds_what_two_intervals_do_not():
    rng = np.random.default_rng(0)
    abilities = rng.beta(0.5, 0.5, 200)
    first = rng.binomial(8, abilities) / 8
    second = rng.binomial(8, np.clip(abilities + 0.05, 0, 1)) / 8
    alone = [evaluation.share_interval(values) for values in (first, second)]
    assert alone[0].high > alone[1].low
    comparison = evaluation.compare(first, second)
    assert comparison.p_value < 0.01
    assert comparison.low > 0
