"""Sinks: where metrics go besides the run's own files. A sink is a function."""

from collections.abc import Callable, Mapping
from typing import Any

from primerl._optional import require

Sink = Callable[[int, Mapping[str, Any]], None]


def wandb_sink(*, project: str, **init: Any) -> Sink:
    """A sink that logs numbers to Weights & Biases.

    Args:
        project: the W&B project.
        init: other arguments of ``wandb.init`` (https://docs.wandb.ai/ref/python/init), such as
            ``mode="offline"`` or ``config=``.
    """
    run = require("wandb", extra="wandb").init(project=project, **init)

    def sink(step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if value is not None}
        run.log(numbers, step=step, commit=True)

    return sink
