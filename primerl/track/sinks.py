"""Sinks, functions that receive a run's metrics besides the run's own files."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from primerl._common.optional import require

OWN = ("step", "time")  # metrics that say when others are of

logger = logging.getLogger(__name__)

Sink = Callable[[int, Mapping[str, Any]], None]
"""A function ``(step, metrics) -> None`` that receives the metrics of each step.

It also receives those of each evaluation, which have an ``evaluation``: with the step whose weights
were evaluated, and perhaps after those of later steps.
"""


def wandb_sink(project: str | None, args: Any = None, **init: Any) -> Sink:
    """Return a sink that logs numbers to Weights & Biases.

    Each step and each evaluation is a separate row. Charts of a step's metrics have the metric
    ``step`` as their axis, those of an evaluation's have ``evaluation_step``: W&B's own step counts
    rows. Without an API key, and without a terminal to ask for one, it logs offline, into
    ``./wandb``.

    Args:
        project: the W&B project; None for a sink that does nothing.
        args: the run's arguments, an attrs value or a mapping, which become W&B's ``config``.
        init: other arguments of ``wandb.init`` (https://docs.wandb.ai/ref/python/init), such as
            ``mode="offline"``.
    """
    if project is None:
        return lambda step, metrics: None  # noqa: ARG005
    if args is not None:
        init["config"] = attrs.asdict(args) if attrs.has(type(args)) else dict(args)
    wandb = require("wandb", extra="wandb")
    try:
        run = wandb.init(project=project, **init)
    except wandb.errors.UsageError as error:
        if "mode" in init:
            raise
        logger.warning("Weights & Biases logs offline, into ./wandb, for `wandb sync`: %s", error)
        run = wandb.init(project=project, mode="offline", **init)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    evaluated: set[str] = set()

    # Without ``step=``: W&B merges rows of equal steps, and drops those of earlier steps.
    def sink(step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if value is not None}
        if "evaluation" not in numbers:
            run.log(numbers | {"step": step})
            return
        scores = {name: value for name, value in numbers.items() if name not in OWN}
        for name in sorted(scores.keys() - evaluated):  # a name takes precedence over "*"
            run.define_metric(name, step_metric="evaluation_step")
        evaluated.update(scores)
        run.log(scores | {"evaluation_step": step})

    return sink


def tensorboard_sink(folder: str | os.PathLike[str] | None, **writer: Any) -> Sink:
    """Return a sink that writes numbers for ``tensorboard --logdir FOLDER``.

    Args:
        folder: the folder of the event files; None for a sink that does nothing.
        writer: other arguments of ``tensorboardX.SummaryWriter``
            (https://tensorboardx.readthedocs.io/en/latest/tensorboard.html), such as
            ``flush_secs=10``.
    """
    if folder is None:
        return lambda step, metrics: None  # noqa: ARG005
    events = require("tensorboardX", extra="tensorboard").SummaryWriter(os.fspath(folder), **writer)

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            events.add_scalar(name, value, step)

    return _ClosingSink(log, events.close)


def trackio_sink(project: str | None, args: Any = None, **init: Any) -> Sink:
    """Return a sink that logs numbers to Trackio on this computer; ``trackio show`` shows them.

    Args:
        project: the Trackio project; None for a sink that does nothing.
        args: the run's arguments, an attrs value or a mapping, which become Trackio's ``config``.
        init: other arguments of ``trackio.init``
            (https://huggingface.co/docs/trackio/api#trackio.init), such as ``name="first"``.
    """
    if project is None:
        return lambda step, metrics: None  # noqa: ARG005
    if args is not None:
        init["config"] = attrs.asdict(args) if attrs.has(type(args)) else dict(args)
    run = require("trackio", extra="trackio").init(project=project, **init)

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        run.log(_numbers(metrics), step=step)

    return _ClosingSink(log, run.finish)


@attrs.frozen
class _ClosingSink:
    """A sink that is closed when the run ends."""

    log: Sink
    close: Callable[[], None]

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.log(step, metrics)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that a tracker doesn't record itself; Trackio reserves these names."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and name not in OWN
    }
