"""Several environments as one."""

import asyncio
from collections.abc import Mapping
from typing import Any

from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.types import Rollout, SamplingParams


def route(environments: Mapping[str, Environment]) -> "Route":
    """An environment that plays each task in the one that the task's ``"environment"`` names.

    Raises:
        ValueError: there are no environments; or, when it is played, a task names none of them.
    """
    if not environments:
        raise ValueError("there are no environments to route to; pass at least one")
    return Route(environments)


class Route:
    """Several environments as one: made by ``route``."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = dict(environments)

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play ``task`` in its environment."""
        name = task.get("environment", "")
        if name not in self._environments:
            raise ValueError(
                f"the task {task.get('id')!r} names the environment {name!r}; there are "
                f"{sorted(self._environments)}"
            )
        return await self._environments[name](task, engine, params)

    def members(self) -> list[dict[str, Any]]:
        """The processes that the environments started."""
        listed: list[dict[str, Any]] = []
        for environment in self._environments.values():
            if hasattr(environment, "members"):
                listed += environment.members()
        return listed

    async def aclose(self) -> None:
        """Close every environment that can be closed."""
        closing = [one.aclose() for one in self._environments.values() if hasattr(one, "aclose")]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error
