"""Statistics of scores: pass@k, confidence intervals, and a paired comparison.

The tasks are regarded as the random sample: an interval says which score other tasks of the same
kind would give. More rollouts of the same few tasks do not narrow it much (arXiv:2411.00640).
"""

import math
from collections.abc import Iterable
from statistics import NormalDist

import attrs
import numpy as np
from jaxtyping import Float64, Int64

PSEUDO_TASKS = 5
PERMUTATIONS = 20_000
BLOCK = 1000  # permutations in memory at a time
ROUNDING = 1e-12  # relative error of sums and means
UNBOUNDED = (-math.inf, math.inf)


@attrs.frozen(kw_only=True)
class Interval:
    """A mean over tasks, with its confidence interval from ``low`` to ``high``."""

    mean: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


@attrs.frozen(kw_only=True)
class Comparison:
    """The mean difference of two results on the same tasks, second minus first.

    ``low`` and ``high`` bound its confidence interval. ``p_value`` is the probability of a
    difference at least as large if neither result was better.
    """

    difference: float
    low: float
    high: float
    p_value: float
    tasks: int


def pass_at_k(
    passed: Int64[np.ndarray, " tasks"], samples: Int64[np.ndarray, " tasks"], *, k: int
) -> Float64[np.ndarray, " tasks"]:
    """Return the unbiased estimate of each task's pass@k: at least one of k samples passes.

        1 - C(n - c, k) / C(n, k)

    for c of n samples that passed (arXiv:2107.03374, equation 1).

    Args:
        passed: c of each task.
        samples: n of each task.
        k: at least 1, and at most every n.

    Raises:
        ValueError: k is out of range, or c is not between 0 and n.
    """
    fewest = int(samples.min()) if len(samples) else k
    if not 1 <= k <= fewest:
        raise ValueError(f"k is {k}; expected 1 to {fewest}, the fewest samples of a task")
    if (passed < 0).any() or (passed > samples).any():
        raise ValueError("passed must be from 0 to the number of samples, for every task")
    failed = samples - passed
    none_passes = np.ones(len(samples))
    for drawn in range(k):
        none_passes *= np.clip(failed - drawn, 0, None) / (samples - drawn)
    return 1.0 - none_passes


def share_interval(
    values: Float64[np.ndarray, " tasks"],
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    confidence: float = 0.95,
) -> Interval:
    """Return the interval of a mean of values between two bounds, such as pass@k of each task.

    It is Wilson's score interval, with Student's quantile t and as many trials m as explain the
    observed variance:

        m = tasks p (1 - p) / s^2,   s^2 = ((tasks - 1) v + 5 p (1 - p)) / (tasks + 4)

    where p is the mean and v the sample variance of the values, scaled to bounds of 0 and 1. With
    one sample per task, m is about the number of tasks; with several, it is larger. s^2 is the
    variance of the tasks and five more that have the largest variance that p allows, because v is
    too small by chance if nearly all values are equal.

    Simulated at 95% over 8 to 200 tasks with beta-distributed probabilities of passing, it covers
    92 to 99%. It is too narrow if a few tasks are unlike all others and none of them was drawn: for
    50 tasks with 16 samples each, drawn from tasks of which 2% never pass and all others pass in 99
    of 100 samples, it covers 75%.

    Raises:
        ValueError: there are no values, a value is not within the bounds, or the confidence is not
            between 0 and 1.
    """
    count = _require_values(values, confidence)
    span = _require_bounds(bounds, values)
    shares = (values - bounds[0]) / span
    p = float(shares.mean())
    largest = p * (1 - p)
    seen = (count - 1) * float(shares.var(ddof=1)) if count > 1 else 0.0
    variance = (seen + PSEUDO_TASKS * largest) / (count - 1 + PSEUDO_TASKS)
    trials = count * largest / variance if variance > 0 else count
    t = student_quantile((1 + confidence) / 2, freedom=max(1, count - 1))
    center = (p + t * t / (2 * trials)) / (1 + t * t / trials)
    half = t * math.sqrt(largest / trials + (t / (2 * trials)) ** 2) / (1 + t * t / trials)
    low, high = max(0.0, center - half), min(1.0, center + half)
    mean, low, high = (bounds[0] + span * share for share in (p, low, high))
    return Interval(mean=mean, low=low, high=high, tasks=count)


def mean_interval(values: Float64[np.ndarray, " tasks"], *, confidence: float = 0.95) -> Interval:
    """Return Student's interval of a mean of any values: ``mean +- t s / sqrt(tasks)``.

    It is too narrow if few tasks decide the mean. If the values have bounds, use
    ``share_interval``, which is less so. Equal values say nothing about their spread, so their
    interval is infinite, as is that of one task.

    Raises:
        ValueError: there are no values, a value is not finite, or the confidence is out of range.
    """
    count = _require_values(values, confidence)
    mean = float(values.mean())
    if np.ptp(values) <= ROUNDING * np.abs(values).max():
        return Interval(mean=mean, low=-math.inf, high=math.inf, tasks=count)
    t = student_quantile((1 + confidence) / 2, freedom=count - 1)
    half = t * float(values.std(ddof=1)) / math.sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half, tasks=count)


def difference_interval(
    differences: Float64[np.ndarray, " tasks"],
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    confidence: float = 0.95,
) -> Interval:
    """Return the interval of a mean difference between values that lie within the bounds.

    It is Student's interval of the differences and two more, the largest in either direction:

        d + t s / sqrt(tasks + 2) and d - t s / sqrt(tasks + 2)

    where d and s are the mean and the standard deviation of the tasks + 2 differences. The two more
    stand for tasks that only one of the results solves, and that were not drawn by chance. So the
    interval is at least about 2.8 / tasks wide on each side of d, however small the differences.

    With one sample of each task, it is the adjusted Wald interval of Bonett and Price
    (doi:10.3102/1076998611411915), with Student's quantile in place of the normal one. With several
    samples, a task still counts as one observation, so samples of one task may be correlated.

    At 95%, it covers at least 93% with one sample of each of 3 to 200 tasks, computed exactly for a
    grid of rates. Simulated with 1 to 16 samples, rates from 0.005 to 0.995 and beta-distributed
    probabilities of passing, it covers at least 94% (``tools/interval_coverage.py``).

    Raises:
        ValueError: there are no differences, a difference exceeds the bounds, or the confidence is
            not between 0 and 1.
    """
    count = _require_values(differences, confidence)
    span = _require_bounds(bounds)
    _require_bounds((-span, span), differences)
    more = mean_interval(np.append(differences, [span, -span]), confidence=confidence)
    return Interval(
        mean=float(differences.mean()),
        low=max(-span, more.low),
        high=min(span, more.high),
        tasks=count,
    )


def compare(
    first: Float64[np.ndarray, " tasks"],
    second: Float64[np.ndarray, " other_tasks"],
    *,
    bounds: tuple[float, float] | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare two results on the same tasks, given in the same order, as pairs.

    Pairing removes the differences between tasks, so it detects smaller differences than two
    separate intervals do. The interval is that of ``difference_interval``. The p-value is that of a
    permutation test: the share of random exchanges of the two results of each task whose mean
    difference is at least as large. If there are few exchanges, all are tried.

    Args:
        first: the value of each task, such as its mean reward or pass@k.
        second: the same for the other result.
        bounds: the lowest and the highest possible value; by default 0 and 1, if all values lie
            between them. Otherwise no bounds are known (-inf and inf), and the interval is that of
            ``mean_interval``, which is often too narrow.
        confidence: the confidence of the interval.

    Raises:
        ValueError: the numbers of tasks differ, there are no tasks, a value is not finite or not
            within the bounds, or the confidence is not between 0 and 1.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} tasks; expected the same tasks in both")
    values = np.concatenate([first, second])
    _require_values(values, confidence)
    bounds = usual_bounds(values) if bounds is None else bounds
    differences = second - first
    if bounds == UNBOUNDED:
        interval = mean_interval(differences, confidence=confidence)
    else:
        _require_bounds(bounds, values)
        interval = difference_interval(differences, bounds=bounds, confidence=confidence)
    return Comparison(
        difference=interval.mean,
        low=interval.low,
        high=interval.high,
        p_value=_permutation_p_value(differences),
        tasks=interval.tasks,
    )


def usual_bounds(values: Float64[np.ndarray, " values"]) -> tuple[float, float]:
    """Return 0 and 1 if all values lie between them, otherwise -inf and inf."""
    return (0.0, 1.0) if ((values >= 0) & (values <= 1)).all() else UNBOUNDED


def student_quantile(probability: float, *, freedom: int) -> float:
    """Return Student's quantile, from its expansion (Abramowitz and Stegun 26.7.5).

    The expansion is around the normal quantile. The result is exact for 1 and 2 degrees of freedom;
    from 3 on, it is off by less than 1% up to a probability of 0.995.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        a = 2 * probability - 1
        return a * math.sqrt(2 / (1 - a * a))
    z = NormalDist().inv_cdf(probability)
    v = freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _permutation_p_value(differences: np.ndarray) -> float:
    count = len(differences)
    blocks: Iterable[np.ndarray]
    if 2**count <= PERMUTATIONS:
        bits = np.arange(2**count)[:, None] >> np.arange(count)
        blocks = [1.0 - 2.0 * (bits & 1)]
        extra = 0
    else:
        rng = np.random.default_rng(0)
        blocks = (rng.choice([-1.0, 1.0], (BLOCK, count)) for _ in range(PERMUTATIONS // BLOCK))
        extra = 1  # the observed assignment is one of the possible exchanges
    sums = np.abs(np.concatenate([signs @ differences for signs in blocks]))
    seen = abs(differences.sum())
    rounding = ROUNDING * np.abs(differences).sum()
    as_large = int((sums >= seen - rounding).sum())
    return (as_large + extra) / (len(sums) + extra)


def _require_values(values: np.ndarray, confidence: float) -> int:
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"expected finite values of at least one task, got {values!r:.80}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a number between 0 and 1")
    return len(values)


def _require_bounds(bounds: tuple[float, float], values: np.ndarray | None = None) -> float:
    """Check the bounds, and that the values are within them; return how far apart they are."""
    low, high = bounds
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"the bounds are {low} and {high}; expected two finite numbers, low first")
    if values is not None:
        slack = ROUNDING * max(abs(low), abs(high))
        if (values < low - slack).any() or (values > high + slack).any():
            raise ValueError(
                f"values are not all between {low:g} and {high:g}; use mean_interval, or pass the "
                "bounds of all possible values"
            )
    return high - low
