"""Adaptive concurrency: the number of rollouts in flight follows the load of the engines.

Too few rollouts leave an engine idle. Too many fill its KV cache, so that it preempts requests and
computes their tokens again. The best number is not known in advance and changes with the lengths of
rollouts.
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
    """The load of the engines since the last observation.

    Args:
        in_flight: rollouts in flight: whole groups of ``group_size``, and those of evaluations.
        queued: requests that wait in the engines' queues.
        preemptions: requests that were preempted.
        kv_use: the share of the KV cache in use, 0 to 1, of the engine where it is largest.
        group_size: rollouts that are started together.
        evaluated: rollouts of evaluations among those in flight.
    """

    in_flight: int
    queued: int
    preemptions: int
    kv_use: float
    group_size: int = 1
    evaluated: int = 0


@attrs.frozen(kw_only=True)
class AdaptiveConcurrency:
    """A cap on the rollouts in flight, with the rule by which it follows the load.

    The cap grows by ``growth`` while it keeps a group from starting and KV use is below ``low``.
    Above ``high`` it shrinks in proportion to the excess. In between it stays, so that it does not
    oscillate. A preemption or a queue shrinks it by ``back_off``; near that cap, it then grows by
    less than a third of ``growth``.

    One group, and one rollout of an evaluation, may always run. So while the cap is not above the
    size of a group, an evaluation has one place only.

    Raises:
        ValueError: a number is out of range.
    """

    cap: float = 16.0
    """The initial cap: the most rollouts in flight."""
    least: int = 1
    """The smallest cap."""
    most: int = 4096
    """The largest cap."""
    low: float = 0.85
    high: float = 0.95
    """Between the shares ``low`` and ``high`` of KV cache in use, the cap stays."""
    growth: float = 0.15
    """The growth per observation, as a share of the cap."""
    back_off: float = 0.95
    """The factor by which a preemption or a queue shrinks the cap."""
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
        """Return settings whose cap is adapted to the observed ``load``; ``self`` is unchanged."""
        cap, trouble_at = self.cap, self.trouble_at
        always = load.group_size + min(load.evaluated, 1)  # what runs under any cap
        if load.in_flight > max(1.05 * cap, always):
            return self  # a lower cap takes effect slowly: rollouts in flight are never cancelled
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
    evaluated: int = 0,
) -> tuple[Load, float]:
    """Return the load of servers from their ``metrics``, and their total number of preemptions.

    Metrics have vLLM's names. ``preempted`` is the total at the last observation.
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
        evaluated=evaluated,
    )
    return load, total


async def follow_load(
    engine: Any,
    settings: AdaptiveConcurrency,
    *,
    training: Callable[[], int],
    evaluated: Callable[[], int],
    apply: Callable[[float], None],
    group_size: int = 1,
) -> None:
    """Observe ``engine`` until cancelled, and ``apply`` each new cap.

    ``training`` and ``evaluated`` return the numbers of rollouts in flight.

    If the metrics can't be read, the cap stays as it is.
    """
    preempted: float | None = None
    while True:
        apply(settings.cap)
        await asyncio.sleep(settings.every_s)
        try:
            metrics = await asyncio.to_thread(engine.metrics)
            if inspect.isawaitable(metrics):  # the engine is in another process
                metrics = await metrics
        except (OSError, RuntimeError) as error:
            log.warning("the engine's load could not be read: %s", error)
            continue
        first = preempted is None
        load, total = load_of(
            metrics,
            in_flight=training() + evaluated(),
            preempted=0.0 if preempted is None else preempted,
            group_size=group_size,
            evaluated=evaluated(),
        )
        preempted = total
        if not first:  # the first total includes preemptions from before this worker began
            settings = settings.after(load)
