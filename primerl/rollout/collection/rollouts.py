"""Playing one rollout: attempts, retries, and what is known of it while it runs."""

import asyncio
import contextlib
from collections import Counter

import attrs

from primerl.rollout.collection.staleness import oldest_version
from primerl.rollout.engines.contract import Limits, check_rollout, check_routes
from primerl.rollout.engines.health import EngineHealth, Retry
from primerl.rollout.engines.observed import ObservedEngine
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, RewardError, Task
from primerl.rollout.errors import name_of
from primerl.types import Group, PolicyVersion, Rollout, SamplingParams


@attrs.define(eq=False)
class Progress:
    """What is known of a group in flight, and what has failed in it so far."""

    oldest: dict[int, PolicyVersion] = attrs.Factory(dict)
    """For each rollout that has sampled: the oldest version that it may have sampled with."""
    tokens: int = 0
    """Sampled so far, in completed calls."""
    retried: int = 0
    errors: Counter[str] = attrs.Factory(Counter)
    """Failed attempts, by the name of the error."""
    begun: bool = False
    """Whether its asyncio task has run: one that is cancelled before can't account for its end."""
    attempts: dict[int, ObservedEngine] = attrs.Factory(dict)
    """For each rollout, its current attempt."""
    rejected: bool = False
    """Whether it is cancelled because a version that sampled it was rejected."""

    def oldest_version(self, served: PolicyVersion) -> PolicyVersion:
        """The oldest version that a token of the group may have; ``served`` before any has."""
        return min(self.oldest.values(), default=served)

    @property
    def ignored_by_engine(self) -> bool:
        """Whether a rollout waits for an engine that has answered no request for long."""
        return any(attempt.ignored for attempt in self.attempts.values())

    def observe(
        self, engine: Engine, index: int, health: EngineHealth | None = None
    ) -> ObservedEngine:
        """The engine for a new attempt at rollout ``index``; its calls are recorded here."""
        self.oldest.pop(index, None)

        def begin(version: PolicyVersion | None) -> None:
            if version is None:
                self.oldest.pop(index, None)
            else:
                self.oldest.setdefault(index, version)

        def sampled(tokens: int) -> None:
            self.tokens += tokens

        self.attempts[index] = ObservedEngine(engine, begin=begin, sampled=sampled, health=health)
        return self.attempts[index]


async def play(
    environment: Environment,
    task: Task,
    engine: Engine,
    params: SamplingParams,
    *,
    retries: int = 0,
    progress: Progress | None = None,
    index: int = 0,
    health: EngineHealth | None = None,
) -> Rollout:
    """Play one rollout, retrying up to ``retries`` times; raises the last failure.

    ``progress`` records it as the group's rollout ``index``. With the engine's ``health``, a
    failure of the engine is not one of the rollout: it is played again until the engine answers,
    also where the environment gave a failing request up and made do without it.

    Raises:
        EngineFailed: the engine was given up. Otherwise what the environment raised.
    """
    progress = progress or Progress()
    retry = None if health is None else Retry(health)
    failures = 0
    with contextlib.nullcontext() if health is None else health.used():
        while True:
            observed = progress.observe(engine, index, health)
            try:
                rollout = await attempt(environment, task, observed, params)
                if observed.bad is not None:
                    raise observed.bad  # the environment caught it: its rollout is not trusted
                if observed.outage is not None:
                    raise observed.outage  # a limit of its own ended it, such as an agent's
                check_rollout(rollout, params, Limits.of(engine))
                await check_routes(rollout, engine)
            except Exception as error:  # whatever an environment raises is data
                mistake = isinstance(error, RewardError)
                if not mistake and observed.given_up is not None:
                    raise observed.given_up from None
                if not mistake and retry is not None and observed.failed_by_engine(error):
                    await retry.failed(error)
                    continue
                progress.errors[name_of(error)] += 1
                if failures == retries or mistake:
                    raise
                failures += 1
                progress.retried += 1
            else:
                oldest = oldest_version(Group(task_id="", rollouts=[rollout]))
                if oldest is not None:
                    progress.oldest[index] = oldest
                return rollout


async def attempt(
    environment: Environment, task: Task, engine: Engine, params: SamplingParams
) -> Rollout:
    """Play one rollout once; every failure is raised as an ``Exception``."""
    try:
        rollout = await environment(dict(task), engine, params)
    except asyncio.CancelledError as error:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
        raise RuntimeError("the rollout was cancelled from within") from error
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:  # it would end the event loop, and with it every rollout
        raise RuntimeError(f"the environment raised {type(error).__name__}: {error}") from error
    if not isinstance(rollout, Rollout):
        raise TypeError(f"the environment returned a {type(rollout).__name__}; expected a Rollout")
    return rollout
