"""Groups: several rollouts of one task, run together."""

import asyncio

from primerl.rollout.engine import Engine
from primerl.rollout.environment import Environment, Task
from primerl.types import Group, SamplingParams


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
    tasks = [asyncio.ensure_future(environment(task, engine, params)) for _ in range(size)]
    try:
        rollouts = await asyncio.gather(*tasks)
    finally:
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Group(task_id=task_id, rollouts=rollouts)
