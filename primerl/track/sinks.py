"""Sinks: where metrics go besides the run's own files. A sink is a function."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from primerl._optional import require

Sink = Callable[[int, Mapping[str, Any]], None]
"""Where metrics go: ``(step, metrics) -> None``."""


def wandb_sink(project: str | None, args: Any = None, **init: Any) -> Sink:
    """A sink that logs numbers to Weights & Biases.

    Args:
        project: the W&B project; None for a sink that does nothing.
        args: of the run, an attrs value or a mapping: W&B's ``config``.
        init: other arguments of ``wandb.init`` (https://docs.wandb.ai/ref/python/init), such as
            ``mode="offline"``.
    """
    if project is None:
        return lambda step, metrics: None  # noqa: ARG005
    if args is not None:
        init["config"] = attrs.asdict(args) if attrs.has(type(args)) else dict(args)
    run = require("wandb", extra="wandb").init(project=project, **init)

    def sink(step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if value is not None}
        run.log(numbers, step=step, commit=True)

    return sink
