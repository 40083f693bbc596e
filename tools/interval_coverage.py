"""Simulate how often the intervals of comparisons contain the true difference; print a table.

    python tools/interval_coverage.py > table.md

A scenario is two mean rates, the distribution of the rates of tasks around each (all equal, a wide
beta distribution, or nearly 0 and 1), and whether a task that is hard for one result is hard for
the other (always, for half of the tasks, or by chance). For each scenario, tasks and samples are
drawn many times. The table compares ``evaluation.difference_interval`` with Student's interval of
the same differences. Their widths are compared where Student's interval covers and the true
difference is not 0: an interval without width contains a difference of 0 whatever it measures. The
simulation takes eight minutes on one core.
"""

import argparse
import itertools
import math
from collections.abc import Iterator

import attrs
import numpy as np

from primerl import evaluation

TASKS = (3, 10, 30, 100, 200)
SAMPLES = (1, 4, 16)
RATES = (
    (0.005, 0.005),
    (0.01, 0.01),
    (0.01, 0.05),
    (0.02, 0.9),
    (0.05, 0.2),
    (0.5, 0.5),
    (0.5, 0.6),
    (0.5, 0.95),
    (0.9, 0.98),
    (0.98, 0.98),
    (0.995, 0.995),
)
SIZES = (math.inf, 5.0, 0.5)  # a + b of the beta distribution
SHARED = (1.0, 0.5, 0.0)  # the share of tasks that are equally hard for both results
POPULATION = 100_000  # tasks that a scenario draws from; their means are the truth
LEAST = 0.935  # Student's interval is said to cover from this coverage on

DIFFERENT = 0.01  # two populations of the same mean rate differ by less


@attrs.frozen
class Simulated:
    """The coverage and the mean width of both intervals in one scenario."""

    truth: float
    coverage: float
    width: float
    student_coverage: float
    student_width: float


def scenarios() -> Iterator[tuple[tuple[float, float], float, float]]:
    """Yield the mean rates, the size of the beta distribution and the share of shared tasks."""
    for rates, size, shared in itertools.product(RATES, SIZES, SHARED):
        if size < math.inf or shared == 0.0:  # if all tasks are equal, each scenario is the same
            yield rates, size, shared


def population(rate: float, size: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rates of all tasks, the hardest first."""
    if size == math.inf:
        return np.full(POPULATION, rate)
    return np.sort(rng.beta(rate * size, (1 - rate) * size, POPULATION))


def simulate(
    rates: np.ndarray,
    *,
    shared: float,
    tasks: int,
    samples: int,
    repeats: int,
    rng: np.random.Generator,
) -> Simulated:
    """Draw tasks and samples from two populations, ``repeats`` times."""
    truth = rates[1].mean() - rates[0].mean()
    place = rng.integers(0, POPULATION, (repeats, tasks))
    other = rng.integers(0, POPULATION, (repeats, tasks))
    other = np.where(rng.random((repeats, tasks)) < shared, place, other)
    first = rng.binomial(samples, rates[0][place]) / samples
    second = rng.binomial(samples, rates[1][other]) / samples
    found = [bounds(differences) for differences in second - first]
    ours, student = np.array(found).transpose(1, 2, 0)
    return Simulated(truth, *_measure(ours, truth), *_measure(student, truth))


def bounds(differences: np.ndarray) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bounds of both intervals; without spread, Student's has no width."""
    ours = evaluation.difference_interval(differences)
    if np.ptp(differences) == 0:
        return (ours.low, ours.high), (differences[0], differences[0])
    student = evaluation.mean_interval(differences)
    return (ours.low, ours.high), (student.low, student.high)


def _measure(found: np.ndarray, truth: float) -> tuple[float, float]:
    low, high = found
    rounding = 1e-9
    held = (low <= truth + rounding) & (truth - rounding <= high)
    return float(held.mean()), float((high - low).mean())


def row(tasks: int, samples: int, found: list[Simulated]) -> str:
    """Return a row of the table, from all scenarios of as many tasks and samples."""
    differ = [one for one in found if abs(one.truth) > DIFFERENT]
    wider = [one.width / one.student_width for one in differ if one.student_coverage >= LEAST]
    cells = [
        f"{tasks}",
        f"{samples}",
        f"{min(one.coverage for one in found):.1%}",
        f"{np.mean([one.coverage for one in found]):.1%}",
        f"{np.mean([one.width for one in found]):.2f}",
        f"{min(one.student_coverage for one in found):.1%}",
        f"{len(wider)} of {len(differ)}",
        f"{np.median(wider):.2f}" if wider else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3000, help="draws of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    print(
        "| tasks | samples | least coverage | mean coverage | mean width | Student's least "
        "coverage | Student's covers in | width there, relative to Student's |\n"
        "|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for tasks, samples in itertools.product(TASKS, SAMPLES):
        found = []
        for rates, size, shared in scenarios():
            populations = np.array([population(rate, size, rng) for rate in rates])
            found.append(
                simulate(
                    populations,
                    shared=shared,
                    tasks=tasks,
                    samples=samples,
                    repeats=args.repeats,
                    rng=rng,
                )
            )
        print(row(tasks, samples, found), flush=True)


if __name__ == "__main__":
    main()
