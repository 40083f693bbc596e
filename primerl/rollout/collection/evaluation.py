"""Evaluations: each task is played once, by one version of the weights."""

import asyncio
from collections.abc import Awaitable, Iterable

from primerl.rollout.collection.groups import cancel_all
from primerl.rollout.collection.rollouts import play
from primerl.rollout.engines.health import EngineHealth
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.types import Group, Rollout, SamplingParams


async def evaluate(
    environment: Environment,
    tasks: Iterable[Task],
    engine: Engine,
    params: SamplingParams,
    *,
    retries: int,
    health: EngineHealth,
) -> list[Rollout]:
    """Play each task once; returns the rollouts in the order of the tasks.

    Raises:
        RuntimeError: more than one version of the weights was served.
    """
    version = engine.version
    rollouts = await _gather_or_cancel(
        play(environment, task, engine, params, retries=retries, health=health) for task in tasks
    )
    groups = [Group(task_id="", rollouts=[one]) for one in rollouts]
    versions = {int(one) for group in groups for one in group.versions} | {version}
    if len(versions) > 1:
        raise RuntimeError(
            f"weights {sorted(versions)} were served during one evaluation; publish when it "
            "has ended, or evaluate with an engine that nothing is published to (engine=)"
        )
    return rollouts


async def _gather_or_cancel(rollouts: Iterable[Awaitable[Rollout]]) -> list[Rollout]:
    """All results in order; if one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)
