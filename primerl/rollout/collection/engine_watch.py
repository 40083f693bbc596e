"""Observation of the engines' usage, in the background."""

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping
from typing import Any

import attrs

from primerl._common.engine_usage import EngineUsage, engine_usage, usage_together
from primerl.rollout.errors import summary

EVERY_S = 5.0
log = logging.getLogger(__name__)

Readings = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Counters and gauges by server, data-parallel rank and vLLM's name."""


def reports_metrics(engine: Any) -> bool:
    """Return whether the usage of an engine can be read."""
    return bool(getattr(engine, "reports_metrics", hasattr(engine, "metrics")))


class EngineWatch:
    """The usage of an engine's servers, read every few seconds.

    Nothing waits for a reading. Servers that do not answer are left out of the interval.
    """

    def __init__(self) -> None:
        self.total = EngineUsage()
        """The usage of all servers together since the start of the run."""
        self.ranks: dict[str, dict[int, EngineUsage]] = {}
        """The usage of each rank, by server and rank, in the last interval."""
        self._before: Readings = {}
        self._read_at = 0.0
        self._failure = ""

    async def run(self, engine: Any) -> None:
        """Read the engine's metrics until cancelled."""
        while True:
            try:
                self.add(await _read(engine), now=time.monotonic())
                self._failure = ""
            except Exception as error:  # a user's engine may raise anything; sampling continues
                if self._failure != summary(error):
                    self._failure = summary(error)
                    log.warning("the engine's metrics could not be read: %s", self._failure)
            await asyncio.sleep(EVERY_S)

    def add(self, readings: Readings, *, now: float) -> None:
        """Add the usage since the last readings."""
        seconds = now - self._read_at
        self.ranks = {
            server: {
                rank: engine_usage(self._before[server][rank], values, seconds=seconds)
                for rank, values in ranks.items()
                if rank in self._before[server]
            }
            for server, ranks in readings.items()
            if server in self._before
        }
        self.total = self.total.then(self.together)
        self._before, self._read_at = readings, now

    @property
    def together(self) -> EngineUsage:
        """The usage of all servers together in the last interval."""
        return usage_together(usage for ranks in self.ranks.values() for usage in ranks.values())

    def stats(self) -> dict[str, Any]:
        """Return the totals, and the rates of each server and rank; see ``Worker.stats``."""
        return {
            "engine": attrs.asdict(self.total),
            "servers": {
                server: usage_together(ranks.values()).rates()
                | {"ranks": {rank: usage.rates() for rank, usage in ranks.items()}}
                for server, ranks in self.ranks.items()
            },
        }

    def describe(self) -> str:
        """Describe the load of all servers in the last interval, for the live view."""
        rates = self.together.rates()
        if "running" not in rates:
            return ""
        parts = [f"{rates['running']:.0f} requests running", f"{rates['waiting']:.0f} waiting"]
        parts.append(f"KV {rates['kv_use']:.0%}")
        if "cache_hits" in rates:
            parts.append(f"{rates['cache_hits']:.0%} cached")
        return ", ".join(parts)


async def _read(engine: Any) -> Readings:
    if hasattr(engine, "poll_metrics"):
        polled: Readings = await engine.poll_metrics()
        return polled
    metrics = await asyncio.to_thread(engine.metrics)
    if inspect.isawaitable(metrics):  # the engine is in another process
        metrics = await metrics
    return {name: {0: values} for name, values in metrics.items()}
