"""How many rollouts to have in flight: as many as the engines have room for.

Too few leave an engine idle; too many fill its memory of keys and values (KV), so that it preempts
requests, whose tokens it computes again. The best number is not known in advance, and moves with
the lengths of rollouts.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Load:
    """What was observed of the engines since the last observation.

    Args:
        in_flight: rollouts in flight: whole groups of ``group_size``.
        queued: requests that wait for room.
        preemptions: requests that were preempted.
        kv_use: the largest share of KV memory in use of any engine, 0 to 1.
        group_size: rollouts that are started together.
    """

    in_flight: int
    queued: int
    preemptions: int
    kv_use: float
    group_size: int = 1


@attrs.frozen(kw_only=True)
class AdaptiveConcurrency:
    """A cap on the rollouts in flight, and how it follows the load.

    The cap grows by ``growth`` while it keeps a group from starting and KV use is below ``low``;
    above ``high`` it shrinks in proportion to the excess; in between it stays, so that it does not
    oscillate. A preemption or a queue shrinks it by ``back_off`` and is remembered: from there on
    the cap grows by less than a third of ``growth``, since it is near where that happened.

    Raises:
        ValueError: a number is out of range.
    """

    cap: float = 16.0
    """Rollouts in flight, at the start."""
    least: int = 1
    """The smallest cap."""
    most: int = 4096
    """The largest cap."""
    low: float = 0.85
    high: float = 0.95
    """``low`` and ``high`` are the shares of KV memory between which the cap stays."""
    growth: float = 0.15
    """A share of the cap, for each observation."""
    back_off: float = 0.95
    """The share of the cap that is left after a preemption."""
    every_s: float = 2.0
    """Seconds between observations of the engines."""
    trouble_at: float | None = None
    """The cap at the last preemption or queue."""

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.least <= self.cap <= self.most:
            raise ValueError(
                f"cap={self.cap}, least={self.least}, most={self.most}; expected 1 <= least <= cap "
                "<= most"
            )
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"low={self.low}, high={self.high}; expected 0 < low < high <= 1")
        if not (self.growth > 0 and 0 < self.back_off < 1 and self.every_s > 0):
            raise ValueError(
                f"growth={self.growth}, back_off={self.back_off}, every_s={self.every_s}; expected "
                "growth > 0, 0 < back_off < 1, every_s > 0"
            )

    def after(self, load: Load) -> "AdaptiveConcurrency":
        """The cap after an observation: a function of both, and nothing else."""
        cap, trouble_at = self.cap, self.trouble_at
        if load.in_flight > max(1.05 * cap, load.group_size):  # one group always runs
            return self  # the last change is not felt yet: rollouts in flight are never cancelled
        if load.preemptions or load.queued:
            trouble_at = min(cap, load.in_flight)
            cap = trouble_at * self.back_off
        elif load.kv_use > self.high:
            cap *= self.high / load.kv_use
        elif load.kv_use < self.low and load.in_flight + load.group_size > 0.9 * cap:
            known = trouble_at is not None and cap > 0.8 * trouble_at
            cap *= 1 + self.growth * (0.3 if known else 1.0)
        return attrs.evolve(self, cap=min(max(cap, self.least), self.most), trouble_at=trouble_at)


def load_of(
    metrics: Mapping[str, Mapping[str, float]],
    *,
    in_flight: int,
    preempted: float,
    group_size: int = 1,
) -> tuple[Load, float]:
    """The load of servers with these ``metrics``, and how many requests they ever preempted.

    Metrics are named as vLLM's. ``preempted`` is that number at the last observation.
    """

    def values(name: str) -> list[float]:
        return [one.get(f"vllm:{name}", 0.0) for one in metrics.values()]

    total = sum(values("num_preemptions_total"))
    load = Load(
        in_flight=in_flight,
        queued=int(sum(values("num_requests_waiting"))),
        preemptions=max(0, int(total - preempted)),
        kv_use=max(values("kv_cache_usage_perc"), default=0.0),
        group_size=group_size,
    )
    return load, total


async def follow_load(
    engine: Any,
    settings: AdaptiveConcurrency,
    *,
    in_flight: Callable[[], int],
    apply: Callable[[float], None],
    group_size: int = 1,
) -> None:
    """Observe ``engine`` until cancelled, and ``apply`` each cap.

    Metrics that can't be read leave the cap as it is.
    """
    preempted: float | None = None
    while True:
        apply(settings.cap)
        await asyncio.sleep(settings.every_s)
        try:
            metrics = await asyncio.to_thread(engine.metrics)
            if inspect.isawaitable(metrics):  # of an engine in another process
                metrics = await metrics
        except (OSError, RuntimeError) as error:
            log.warning("the engine's load could not be read: %s", error)
            continue
        first = preempted is None
        load, total = load_of(
            metrics,
            in_flight=in_flight(),
            preempted=0.0 if preempted is None else preempted,
            group_size=group_size,
        )
        preempted = total
        if not first:  # what was preempted before this worker began says nothing
            settings = settings.after(load)
