"""pass@k, intervals and comparisons: exact values, and how often intervals hold the truth."""

from itertools import combinations
from math import lgamma, sqrt

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
    for bounds in ((1.0, 0.0), (0.0, np.inf), (0.0, np.nan)):
        with pytest.raises(ValueError, match="expected two finite numbers, low first"):
            evaluation.share_interval(np.array([0.5]), bounds=bounds)


@pytest.mark.parametrize("values", [[1.0], [-1.0] * 3, [0.1] * 3])
def test_values_without_spread_say_nothing_about_their_mean(values):
    interval = evaluation.mean_interval(np.array(values))
    assert (interval.low, interval.high) == (-np.inf, np.inf)


def test_the_interval_of_scaled_values_is_scaled():
    values = np.array([0.0, 0.25, 1.0, 0.5])
    share = evaluation.share_interval(values)
    scaled = evaluation.share_interval(4 * values - 1, bounds=(-1.0, 3.0))
    for name in ("mean", "low", "high"):
        assert getattr(scaled, name) == pytest.approx(4 * getattr(share, name) - 1)


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


def pairs(both, first_only, second_only, neither):
    """Two results with one sample of each task, from the counts of the four outcomes."""
    counts = [both, first_only, second_only, neither]
    return np.repeat([1.0, 1.0, 0.0, 0.0], counts), np.repeat([1.0, 0.0, 1.0, 0.0], counts)


# Bonett and Price's estimate and standard error: the example of ci.prop.ps in R's statpsych, and
# the formula with the counts of an example of Fagerland, Lydersen and Laake.
BONETT_PRICE = [
    ((6, 4, 26, 12), 0.44, 0.09448809),
    ((1, 7, 1, 12), -6 / 23, np.sqrt((2 + 8) / 23 - (6 / 23) ** 2) / np.sqrt(23)),
]


@pytest.mark.parametrize(("counts", "center", "error"), BONETT_PRICE)
def test_with_one_sample_per_task_a_difference_has_the_interval_of_bonett_and_price(
    counts, center, error
):
    comparison = evaluation.compare(*pairs(*counts))
    tasks = sum(counts)
    t = evaluation.intervals.student_quantile(0.975, freedom=tasks + 1)
    half = t * error * np.sqrt((tasks + 2) / (tasks + 1))  # the sample variance, for few tasks
    assert comparison.low == pytest.approx(center - half, abs=1e-7)
    assert comparison.high == pytest.approx(center + half, abs=1e-7)


def test_the_interval_of_differences_by_hand():
    interval = evaluation.difference_interval(np.array([0.5, 0.0, 0.25, 0.25]))
    # 0.5, 0, 0.25, 0.25, 1 and -1: their mean is 1 / 6, and t with 5 degrees of freedom is 2.5706.
    half = 2.5706 * sqrt((2.375 - 1 / 6) / 5) / sqrt(6)
    assert interval.mean == 0.25
    assert interval.low == pytest.approx(1 / 6 - half, rel=0.01)
    assert interval.high == pytest.approx(1 / 6 + half, rel=0.01)
    with pytest.raises(ValueError, match="between -1 and 1"):
        evaluation.difference_interval(np.array([1.5]))


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_equal_results_leave_room(rate):
    """Other tasks may differ: not one of 20 was solved by only one result, so up to 14% may be."""
    results = np.full(20, rate)
    comparison = evaluation.compare(results, results)
    assert comparison.difference == 0
    assert comparison.high == -comparison.low == pytest.approx(2.08 * sqrt(2 / 21 / 22), rel=0.01)
    assert comparison.p_value == 1


def test_one_task_says_almost_nothing():
    comparison = evaluation.compare(np.array([0.0]), np.array([1.0]))
    assert (comparison.low, comparison.high, comparison.p_value) == (-1.0, 1.0, 1.0)


RATES = st.floats(0, 1)


@given(st.lists(st.tuples(RATES, RATES), min_size=1, max_size=12), RATES)
def test_intervals_of_differences_hold_their_mean_and_are_symmetric(results, confidence):
    first, second = np.array(results).T
    here, there = evaluation.compare(first, second), evaluation.compare(second, first)
    assert -1 <= here.low < here.difference + 1e-9
    assert here.difference - 1e-9 < here.high <= 1
    assert (there.low, there.high) == (pytest.approx(-here.high), pytest.approx(-here.low))
    assert there.difference == pytest.approx(-here.difference)
    twice = evaluation.compare(np.tile(first, 2), np.tile(second, 2))
    assert twice.high - twice.low <= here.high - here.low
    scaled = evaluation.compare(10 * first - 5, 10 * second - 5, bounds=(-5.0, 5.0))
    assert scaled.low == pytest.approx(10 * here.low)
    assert scaled.high == pytest.approx(10 * here.high)
    if 0 < confidence < 0.95:
        less = evaluation.compare(first, second, confidence=confidence)
        assert here.low <= less.low <= less.high <= here.high


def test_values_without_known_bounds_are_compared_by_students_interval():
    first, second = np.array([-1.0, 2.0, 7.0]), np.array([0.0, 5.0, 9.0])
    comparison = evaluation.compare(first, second)
    interval = evaluation.mean_interval(second - first)
    assert (comparison.low, comparison.high) == (interval.low, interval.high)
    assert evaluation.compare(first, second, bounds=(-1.0, 9.0)).low < comparison.low
    assert evaluation.compare(-np.ones(9), -np.ones(9)).high == np.inf
    assert evaluation.compare(-np.ones(9), -np.ones(9), bounds=(-1.0, 1.0)).high < 1
    with pytest.raises(ValueError, match="not all between 0 and 8"):
        evaluation.compare(first, second, bounds=(0.0, 8.0))
    with pytest.raises(ValueError, match="finite"):
        evaluation.compare(np.array([np.nan]), np.array([1.0]))


@pytest.mark.parametrize("tasks", [3, 10, 30, 60])
def test_with_one_sample_per_task_intervals_of_differences_cover_whatever_the_rates(tasks):
    """Exact: a sum over all numbers of tasks that only the first, or only the second, solves."""
    outcomes = [(a, b, tasks - a - b) for a in range(tasks + 1) for b in range(tasks + 1 - a)]
    intervals = [
        evaluation.difference_interval(np.repeat([-1.0, 1.0, 0.0], outcome)) for outcome in outcomes
    ]
    low = np.array([interval.low for interval in intervals])
    high = np.array([interval.high for interval in intervals])
    ways = [lgamma(tasks + 1) - sum(lgamma(n + 1) for n in outcome) for outcome in outcomes]
    for p in (0.001, 0.01, 0.1, 0.3):
        for q in np.linspace(0.001, 0.99 - p, 200):
            chance = np.exp(ways + np.array(outcomes) @ np.log([p, q, 1 - p - q]))
            held = chance[(low <= q - p) & (q - p <= high)].sum()
            assert held > 0.93, (p, q)


@pytest.mark.parametrize("tasks", [3, 10, 30, 100, 200])
@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize(
    "rates", [(0.01, 0.01), (0.01, 0.05), (0.5, 0.6), (0.9, 0.98), (0.98, 0.98)]
)
def test_intervals_of_differences_hold_the_truth_as_often_as_they_say(tasks, samples, rates):
    """Tasks that are hard for one are hard for the other; ``tools/interval_coverage.py`` has more.

    Student's interval of the differences covers 2 to 96% here.
    """
    rng = np.random.default_rng(0)
    # The rates of 20,000 tasks, the hardest first, from a beta distribution with the mean p.
    population = [np.sort(rng.beta(p / 2, (1 - p) / 2, 20_000)) for p in rates]
    truth = population[1].mean() - population[0].mean()
    held = 0
    for _ in range(300):
        drawn = rng.integers(0, 20_000, tasks)
        first, second = (rng.binomial(samples, one[drawn]) / samples for one in population)
        interval = evaluation.difference_interval(second - first)
        held += interval.low <= truth <= interval.high
    assert held / 300 >= 0.92  # standard error: 1.3%


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
