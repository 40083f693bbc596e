"""Scores of a policy, with confidence intervals and paired comparisons."""

from primerl.evaluation.intervals import (
    Comparison,
    Interval,
    compare,
    difference_interval,
    mean_interval,
    pass_at_k,
    share_interval,
)
from primerl.evaluation.records import Record, Scores, compare_records, scores
from primerl.evaluation.tables import comparison_table, scores_table

__all__ = [
    "Comparison",
    "Interval",
    "Record",
    "Scores",
    "compare",
    "compare_records",
    "comparison_table",
    "difference_interval",
    "mean_interval",
    "pass_at_k",
    "scores",
    "scores_table",
    "share_interval",
]
