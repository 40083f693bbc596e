"""Scores of a policy, and how much of them is chance."""

from primerl.evaluation.intervals import (
    Comparison,
    Interval,
    compare,
    mean_interval,
    pass_at_k,
    share_interval,
)

__all__ = [
    "Comparison",
    "Interval",
    "compare",
    "mean_interval",
    "pass_at_k",
    "share_interval",
]
