"""Groups: several rollouts of one task, run together."""

import asyncio
from collections.abc import Awaitable, Iterable

from primerl.rollout.engine import Engine
from primerl.rollout.environment import Environment, Task
from primerl.types import Group, Rollout, SamplingParams


async def run_group(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    size: int,
    task_id: str,
) -> Group:
    """Run ``size`` rollouts of ``task`` at once.

    The first failure cancels the others and is raised, so that nothing goes on sampling for a
    group that will not be used.
    """
    rollouts = await gather_or_cancel(environment(task, engine, params) for _ in range(size))
    return Group(task_id=task_id, rollouts=rollouts)


async def gather_or_cancel(rollouts: Iterable[Awaitable[Rollout]]) -> list[Rollout]:
    """All results in order; where one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
