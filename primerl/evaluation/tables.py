"""Scores and comparisons as tables for a terminal."""

from collections.abc import Mapping
from typing import Any

from primerl._common.optional import require
from primerl.evaluation.intervals import Comparison, Interval
from primerl.evaluation.records import Scores


def scores_table(scores: Mapping[str, Scores]) -> Any:
    """Return a ``rich.table.Table`` with, for each environment, one row per measure."""
    table = _table("environment", "measure", "mean", "interval")
    for name, one in scores.items():
        beside = iter([name, f"{one.tasks} tasks", f"{one.rollouts} rollouts"])
        table.add_row(next(beside), "reward", f"{one.reward.mean:.3f}", _bounds(one.reward))
        for k, interval in one.pass_at.items():
            table.add_row(next(beside, ""), f"pass@{k}", f"{interval.mean:.3f}", _bounds(interval))
        table.add_row(next(beside, ""), "tokens", f"{one.tokens:,.1f}", "")
        table.add_row("", "seconds", f"{one.seconds:.1f}", "")
        table.add_row("", "cut short", f"{one.truncated:.1%}", "")
        for error, count in one.errors.items():
            table.add_row("", error, f"{count} rollouts", "")
        table.add_section()
    return table


def comparison_table(comparisons: Mapping[str, Comparison]) -> Any:
    """Return a ``rich.table.Table`` with one row per environment."""
    table = _table("environment", "tasks", "difference", "interval", "p-value")
    for name, one in comparisons.items():
        table.add_row(
            name,
            str(one.tasks),
            f"{one.difference:+.3f}",
            f"{one.low:+.3f} to {one.high:+.3f}",
            f"{one.p_value:.4f}",
        )
    return table


def _table(*headings: str) -> Any:
    rich: Any = require("rich.table", extra="recipes")
    table = rich.Table(box=require("rich.box", extra="recipes").SIMPLE)
    for index, heading in enumerate(headings):
        number = index and heading not in ("measure", "interval")
        # On a narrow terminal, only environments and intervals may wrap.
        whole = heading not in ("environment", "interval")
        table.add_column(heading, justify="right" if number else "left", no_wrap=whole)
    return table


def _bounds(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"
