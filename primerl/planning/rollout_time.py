"""The time in which servers play rollouts."""

from typing import Any

import attrs
from attrs.validators import and_, ge, le

from primerl.planning.compute_time import compute_seconds
from primerl.planning.hardware import Hardware
from primerl.planning.kv_cache import kv_bytes, kv_read
from primerl.planning.server_memory import ServerPlan


@attrs.frozen(kw_only=True)
class PlannedStep:
    """The rollouts of a step, and their servers: assumptions, none of which a plan can know."""

    rollouts: int = attrs.field(validator=ge(0))
    """Number of trained rollouts of a step."""
    tokens: int = attrs.field(validator=ge(1))
    """Mean number of tokens of a rollout."""
    sampled: float = attrs.field(default=0.25, validator=and_(ge(0), le(1)))
    """Share of these that the model sampled; the others are prompts and results of tools."""
    servers: int = attrs.field(default=1, validator=ge(1))
    """Number of servers, each of them like the plan's first one."""
    evaluated: int = attrs.field(default=0, validator=ge(0))
    """Number of rollouts of an evaluation."""
    steps_in_flight: int = attrs.field(default=1, validator=ge(1))
    """Number of steps whose rollouts are played at once: ``max_staleness + 1``."""
    max_num_seqs: int = attrs.field(default=64, validator=ge(1))
    """Number of concurrent rollouts per GPU of a server."""


def rollout_seconds(
    config: Any,
    server: ServerPlan,
    workload: PlannedStep,
    speeds: Hardware,
    *,
    rollouts: int,
    fp8: bool,
) -> float:
    """Return the seconds in which the servers play rollouts that begin at the same time.

    Let n be how many of them a GPU plays at once: its share, but at most ``max_num_seqs`` and as
    many as its KV cache holds. The seconds are

        max(1, rollouts / GPUs) (prefill of a rollout)
        + max(1, rollouts / (n GPUs)) (sampled tokens of a rollout) (a decoding step of n rollouts)

    Assumed: a rollout stays on one GPU, which computes its prefill alone, and its tokens are
    decoded one after another. So idle GPUs don't help, and few rollouts take as long as one.
    Prefixes are cached. Each decoding step reads all weights of a GPU, on all GPUs in parallel, and
    what attention reads of the KV cache. A rollout has half of its tokens on average.

    Raises:
        ValueError: the server is refused, so it plays none; or its KV cache can't be derived.
    """
    if server.refusal:
        raise ValueError(f"the server is refused, so it plays no rollouts: {server.refusal}")
    if not rollouts:
        return 0.0
    gpus = workload.servers * server.gpus
    forward, _ = compute_seconds(config, workload.tokens, speeds, fp8=fp8)
    prefill = (1 - workload.sampled) * sum(forward.values())
    at_once = _played_at_once(config, server, workload, -(-rollouts // gpus))
    sampled = workload.tokens * workload.sampled
    step = decoding_step_seconds(config, server, workload, speeds, at_once=at_once)
    return max(1, rollouts / gpus) * prefill + max(1, rollouts / (at_once * gpus)) * sampled * step


def _played_at_once(config: Any, server: ServerPlan, workload: PlannedStep, share: int) -> float:
    """Return how many of its share of rollouts a GPU plays at once."""
    cache = kv_bytes(config, server.kv_cache_dtype, tokens=_cached(workload))
    fitting = server.kv_room / max(cache, 1)
    return max(1.0, min(share, workload.max_num_seqs, fitting))


def decoding_step_seconds(
    config: Any, server: ServerPlan, workload: PlannedStep, speeds: Hardware, *, at_once: float
) -> float:
    """Return the seconds in which a GPU decodes a token of each rollout that it plays."""
    cache = kv_read(config, server.kv_cache_dtype, tokens=_cached(workload))
    return (server.weights + at_once * cache) / (speeds.memory * speeds.memory_fraction)


def _cached(workload: PlannedStep) -> int:
    return max(1, workload.tokens // 2)
