"""The time in which servers play rollouts."""

from typing import Any

import attrs
from attrs.validators import and_, ge, le

from primerl import flops
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
    """Number of servers that sample, each of them like the plan's first one."""
    prefill_servers: int = attrs.field(default=0, validator=ge(0))
    """Number of further servers, likewise, which compute prompts for these."""
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
    updates: int,
    gpus_per_node: int,
    fp8: bool,
) -> float:
    """Return the seconds in which the servers play rollouts that begin at the same time.

    Let n be how many of them a GPU plays at once: its share, but at most ``max_num_seqs`` and as
    many as its KV cache holds. The seconds are

        max(1, rollouts / GPUs) (prefill of a rollout) + updates n (prefill of half a rollout)
        + max(1, rollouts / (n GPUs)) (sampled tokens of a rollout) (a decoding step of n rollouts)

    With ``prefill_servers``, the first line is the time of their GPUs, where n is all rollouts that
    are played, divided by these GPUs. The other servers take the time of the second line and also
    compute each update's prefills, of the requests that are in flight. The slower kind of servers
    determines the seconds; they are at least those of one rollout, on both kinds one after another.

    Assumed: a rollout stays on one GPU, which computes its prefill alone, and its tokens are
    decoded one after another. So idle GPUs don't help, and few rollouts take as long as one.
    Prefixes are cached until weights are updated. Each decoding step reads all weights of a GPU, on
    all GPUs in parallel, and what attention reads of the KV cache. A rollout has half of its tokens
    on average. Each layer of experts sends each decoded token to its experts, in 8 bits, and back,
    in 16 bits, to all GPUs of its server alike.

    Raises:
        ValueError: the server is refused, so it plays none; or its KV cache can't be derived.
    """
    if server.refusal:
        raise ValueError(f"the server is refused, so it plays no rollouts: {server.refusal}")
    if not rollouts:
        return 0.0
    gpus = workload.servers * server.gpus
    prefill_gpus = workload.prefill_servers * server.gpus
    at_once = _played_at_once(config, server, workload, -(-rollouts // gpus))
    played = min(rollouts, at_once * gpus)
    prefill = (1 - workload.sampled) * _forward_seconds(config, workload.tokens, speeds, fp8=fp8)
    again = updates * played * _forward_seconds(config, _cached(workload), speeds, fp8=fp8)
    step = decoding_step_seconds(config, server, workload, speeds, at_once=at_once)
    step += _exchange_seconds(config, server, speeds, tokens=at_once, gpus_per_node=gpus_per_node)
    decoding = workload.tokens * workload.sampled * step
    decoded = max(1, rollouts / (at_once * gpus)) * decoding
    if not prefill_gpus:
        return max(1, rollouts / gpus) * prefill + again / gpus + decoded
    return max(
        max(1, rollouts / prefill_gpus) * prefill + again / prefill_gpus,
        again / gpus + decoded,
        prefill + decoding,
    )


def stored_bytes(config: Any, server: ServerPlan, workload: PlannedStep) -> int:
    """Return the bytes of keys and values that prefill servers compute and store in a step.

    They are those of all prompts, and of all tokens of the rollouts that are played when weights
    are updated, once per step.

    Raises:
        ValueError: the size of the KV cache can't be derived from the config.
    """
    rollouts = workload.rollouts * workload.steps_in_flight
    gpus = workload.servers * server.gpus
    played = min(rollouts, gpus * _played_at_once(config, server, workload, -(-rollouts // gpus)))
    prompts = workload.rollouts * (1 - workload.sampled) * workload.tokens
    tokens = prompts + played * _cached(workload)
    return round(tokens * kv_bytes(config, server.kv_cache_dtype))


def _forward_seconds(config: Any, tokens: int, speeds: Hardware, *, fp8: bool) -> float:
    if fp8:
        speeds = attrs.evolve(speeds, fp8_products=speeds.server_fp8_products, grouped=1.0)
    forward, _ = compute_seconds(config, tokens, speeds, fp8=fp8)
    return sum(forward.values())


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


def _exchange_seconds(
    config: Any, server: ServerPlan, speeds: Hardware, *, tokens: float, gpus_per_node: int
) -> float:
    """Return the seconds in which a GPU sends tokens to their experts in all layers, and back."""
    chosen = flops.chosen_experts(config)
    if server.ep == 1 or not sum(chosen):
        return 0.0
    far = max(0, server.ep - gpus_per_node)
    near = server.ep - far - 1
    there_and_back = 1 + 2  # bytes of a number
    sent = tokens * sum(chosen) * config.get_text_config().hidden_size * there_and_back
    moving: float = sent / server.ep * (far / speeds.network + near / speeds.nvlink)
    return moving + 2 * sum(map(bool, chosen)) * speeds.exchange_s


def _cached(workload: PlannedStep) -> int:
    return max(1, workload.tokens // 2)
