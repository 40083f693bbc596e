"""The time in which servers play the rollouts of a step."""

from typing import Any

import attrs

from primerl.planning.compute_time import compute_seconds
from primerl.planning.hardware import Hardware
from primerl.planning.server_memory import ServerPlan


@attrs.frozen(kw_only=True)
class PlannedStep:
    """The rollouts of a step, and their servers: assumptions, none of which a plan can know."""

    rollouts: int
    """Number of trained rollouts of a step."""
    tokens: int
    """Mean number of tokens of a rollout."""
    sampled: float = 0.25
    """Share of these that the model sampled; the others are prompts and results of tools."""
    servers: int = 1
    """Number of servers, each of them like the plan's first one."""
    evaluated: int = 0
    """Number of rollouts of an evaluation."""
    steps_in_flight: int = 1
    """Number of steps whose rollouts are played at once: ``max_staleness + 1``."""
    max_num_seqs: int = 64
    """Number of concurrent rollouts per GPU of a server."""


def rollout_seconds(
    config: Any,
    server: ServerPlan,
    workload: PlannedStep,
    rollouts: int,
    speeds: Hardware,
    *,
    fp8: bool,
) -> float:
    """Return the seconds in which the servers play rollouts; their prefixes are cached."""
    if not rollouts:
        return 0.0
    gpus = workload.servers * server.gpus
    forward, _ = compute_seconds(config, workload.tokens, speeds, fp8=fp8)
    prefill = (1 - workload.sampled) * rollouts * sum(forward.values()) / gpus
    return prefill + rollouts * workload.tokens * workload.sampled / (
        gpus * decoded_per_second(server, workload, speeds)
    )


def decoded_per_second(server: ServerPlan, workload: PlannedStep, speeds: Hardware) -> float:
    """Return the tokens that a GPU decodes per second; each one reads weights, and a half cache.

    A rollout has half of its tokens on average.
    """
    cached = workload.tokens / 2
    most = server.kv_room / (server.kv_token * cached)
    playing = workload.rollouts * workload.steps_in_flight / (workload.servers * server.gpus)
    at_once = max(1.0, min(workload.max_num_seqs, most, playing))
    read = server.weights + at_once * cached * server.kv_token
    return at_once * speeds.memory * speeds.memory_fraction / read
