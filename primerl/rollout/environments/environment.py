"""Types of environments and reward functions, and one environment made of several.

An environment is an ``async (task, engine, params) -> Rollout``.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from primerl.rollout.engines.protocol import Engine
from primerl.rollout.errors import located
from primerl.types import Rollout, SamplingParams

Task = Mapping[str, Any]
Environment = Callable[[Task, Engine, SamplingParams], Awaitable[Rollout]]
"""A function that plays one episode: ``async (task, engine, params) -> Rollout``."""
Reward = Callable[[Task, str], float | Awaitable[float]]


class RewardError(RuntimeError):
    """Raised when a reward function raises an error, or does not return a finite number."""


async def reward_of(reward: Callable[..., Any], task: Task, played: Any) -> float:
    """Return the reward of ``played``; ``reward`` is a plain or coroutine function.

    Raises:
        RewardError: the function raised an error, or did not return a finite number.
    """
    where = f"the reward function {getattr(reward, '__name__', reward)!r} for the task {dict(task)}"
    try:
        value: Any = reward(task, played)
        if inspect.isawaitable(value):
            value = await value
        number = float(value)
    except Exception as error:  # user code may raise anything
        raise RewardError(f"{where} raised {located(error)}") from error
    if not np.isfinite(number):
        raise RewardError(f"{where} returned {number}; expected a finite number")
    return number


def combine_environments(environments: Mapping[str, Environment]) -> "CombinedEnvironments":
    """Return an environment that plays each task in the environment named by the task.

    The task's ``"environment"`` is a key of ``environments``.

    Raises:
        ValueError: ``environments`` is empty; or, on play, a task names an unknown environment.
    """
    if not environments:
        raise ValueError("there are no environments to route to; pass at least one")
    return CombinedEnvironments(environments)


class CombinedEnvironments:
    """An environment that combines several others, made by ``combine_environments``."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = dict(environments)

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play ``task`` in its environment."""
        name = task.get("environment", "")
        if name not in self._environments:
            raise ValueError(
                f"the task {task.get('id')!r} names the environment {name!r}; expected one of "
                f"{sorted(self._environments)}"
            )
        return await self._environments[name](task, engine, params)

    def members(self) -> list[dict[str, Any]]:
        """List the processes that the environments have started."""
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
