"""The usage of engines in an interval, from two readings of their counters.

Counters and gauges have vLLM's names. The rollout worker adds up the usage over a run, and the
record of the run shows that of each step.
"""

from collections.abc import Iterable, Mapping

import attrs

COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "queried_tokens": "vllm:prefix_cache_queries_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "external_tokens": "vllm:external_prefix_cache_hits_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
GAUGES = {
    "running_s": "vllm:num_requests_running",
    "waiting_s": "vllm:num_requests_waiting",
    "kv_use_s": "vllm:kv_cache_usage_perc",
}
READ = (*COUNTERS.values(), *GAUGES.values())
"""The names of the metrics that usage is computed from."""


@attrs.frozen(kw_only=True)
class EngineUsage:
    """The usage of one data-parallel rank in an interval, or of several ranks together."""

    seconds: float = 0.0
    """The length of the interval."""
    prompt_tokens: float = 0.0
    """Tokens of prompts that were processed, cached or not."""
    queried_tokens: float = 0.0
    """Tokens of prompts that were looked up in the prefix cache."""
    cached_tokens: float = 0.0
    """Looked-up tokens that the rank's own cache had."""
    external_tokens: float = 0.0
    """Looked-up tokens that a store outside the server had."""
    generated_tokens: float = 0.0
    """Sampled tokens."""
    preemptions: float = 0.0
    """Requests that gave up their cache for others."""
    running_s: float = 0.0
    """Requests that ran, times seconds."""
    waiting_s: float = 0.0
    """Requests that waited in queues, times seconds."""
    kv_use_s: float = 0.0
    """The share of the KV cache in use, of the rank where it is largest, times seconds."""

    def then(self, later: "EngineUsage") -> "EngineUsage":
        """Return the usage of this interval and a later one."""
        return EngineUsage(
            **{name: value + getattr(later, name) for name, value in attrs.asdict(self).items()}
        )

    def rates(self) -> dict[str, float]:
        """Return shares, means and rates per second; those that can't be computed are left out.

        ``cache_hits`` and ``external_hits`` are shares of the tokens that were looked up.
        ``prefill_tokens_per_s`` counts tokens that were in no cache. ``running`` and ``waiting``
        are mean numbers of requests, ``kv_use`` is a mean share and ``preemptions`` a count.
        """
        rates = {}
        if self.queried_tokens > 0:
            rates["cache_hits"] = self.cached_tokens / self.queried_tokens
            rates["external_hits"] = self.external_tokens / self.queried_tokens
        if self.seconds > 0:
            computed = self.prompt_tokens - self.cached_tokens - self.external_tokens
            # Hits are counted when a prefill begins and prompts when it ends, so some may be later.
            rates["prefill_tokens_per_s"] = max(0.0, computed) / self.seconds
            rates["decode_tokens_per_s"] = self.generated_tokens / self.seconds
            rates["running"] = self.running_s / self.seconds
            rates["waiting"] = self.waiting_s / self.seconds
            rates["kv_use"] = self.kv_use_s / self.seconds
            rates["preemptions"] = self.preemptions
        return rates


def engine_usage(
    before: Mapping[str, float], after: Mapping[str, float], *, seconds: float
) -> EngineUsage:
    """Return the usage of a rank between two readings of its counters and gauges, by vLLM's names.

    Metrics that a reading lacks count as 0. A counter that has fallen was restarted from 0.

    Args:
        before: the earlier reading.
        after: the later reading, whose gauges stand for the whole interval.
        seconds: the time between the readings.
    """
    counted = {}
    for field, name in COUNTERS.items():
        earlier, later = before.get(name, 0.0), after.get(name, 0.0)
        counted[field] = later if later < earlier else later - earlier
    gauges = {field: after.get(name, 0.0) * seconds for field, name in GAUGES.items()}
    return EngineUsage(seconds=seconds, **counted, **gauges)


def usage_together(usages: Iterable[EngineUsage]) -> EngineUsage:
    """Return the usage of several ranks in the same interval, such as those of a server or fleet.

    Counts add up; KV use is that of the rank where it is largest.
    """
    values = [attrs.asdict(one) for one in usages]
    largest = ("seconds", "kv_use_s")
    return EngineUsage(
        **{
            field.name: max((one[field.name] for one in values), default=0.0)
            if field.name in largest
            else sum(one[field.name] for one in values)
            for field in attrs.fields(EngineUsage)
        }
    )
