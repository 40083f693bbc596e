"""Environments in processes of their own, so that one that hangs or dies harms no others."""

import asyncio
import contextlib
from typing import Any

from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.remote import EngineHost
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.environments.process_pool import ProcessPool
from primerl.rollout.processes.child import ProcessDied
from primerl.rollout.processes.pickling import pickle_arguments
from primerl.types import Rollout, SamplingParams

SHARED_TRIES = 2  # another rollout may have caused the death of a shared process


def isolated(
    environment: Environment,
    *,
    processes: int = 2,
    timeout_s: float = 600.0,
    threads: int = 1,
) -> "IsolatedEnvironment":
    """The same environment, played in supervised processes of its own.

        environment = rollout.isolated(heavy_environment, processes=4)

    For environments that compute, block their event loop or crash. Each process plays many
    rollouts at once, with completions from the parent's engine. A process that dies is replaced,
    and its rollouts are played again, if necessary one to a process: only the one that makes its
    process die fails. A process that is blocked when a rollout's time is up is killed.

    Args:
        environment: is pickled into each process; lambdas and local functions are supported.
        processes: how many; a new rollout is played in the one with the fewest.
        timeout_s: how long a rollout may take, including the wait for a process.
        threads: of numerical libraries, in each process.

    Raises:
        ValueError: a number is out of range, or the environment can't be pickled.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}, expected at least 1")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected a positive time")
    return IsolatedEnvironment(
        pickle_arguments(environment=environment), processes, timeout_s, threads
    )


class IsolatedEnvironment:
    """An environment behind a pool of processes: made by ``isolated``.

    The processes are started by the first rollout, from the process that plays it, and ended by
    ``aclose``, which a worker calls, or with the process that started them.
    """

    def __init__(
        self, arguments: dict[str, bytes], processes: int, timeout_s: float, threads: int
    ) -> None:
        self._plan = (arguments, processes, timeout_s, threads)
        self._timeout_s = timeout_s
        self._engines = EngineHost()
        handlers = {"generate": self._engines.generate}
        self._pool = ProcessPool(arguments, handlers, processes=processes, threads=threads)
        # Rollouts whose process died are played again here, one to a process.
        self._alone = ProcessPool(
            arguments, handlers, processes=processes, threads=threads, most_each=1
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return IsolatedEnvironment, self._plan  # processes are not sent along

    @property
    def restarts(self) -> int:
        """How many processes have died and been replaced."""
        return self._pool.restarts + self._alone.restarts

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play one rollout in the process that has the fewest.

        If that process dies, the rollout is played again; if that happens again, in a process of
        its own.

        Raises:
            TimeoutError: it did not end within ``timeout_s``.
            RuntimeError: a process of its own died, too, or none can be started. What the
                environment raises is raised.
        """
        for _ in range(SHARED_TRIES):
            with contextlib.suppress(ProcessDied):
                return await self._play(self._pool, task, engine, params)
        return await self._play(self._alone, task, engine, params)

    async def _play(
        self, pool: ProcessPool, task: Task, engine: Engine, params: SamplingParams
    ) -> Rollout:
        child = None
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline, pool.process() as child:
                with self._engines.lease(engine, child.notify) as address:
                    rollout: Rollout = await child.call("play", dict(task), address, params)
                return rollout
        except asyncio.CancelledError:
            if child is not None:  # if it is blocked, it would attract all further rollouts
                pool.check(child)
            raise
        except TimeoutError:
            if not deadline.expired():
                raise  # the environment's own
            if child is not None:
                await pool.check(child)
            raise TimeoutError(
                f"the rollout did not end within {self._timeout_s:.0f} s"
                if child is not None
                else f"no environment process was free within {self._timeout_s:.0f} s"
            ) from None

    def members(self) -> list[dict[str, Any]]:
        """The processes: ``name``, ``pid``, ``alive``."""
        children = [*self._pool.children(), *self._alone.children()]
        return [{"name": one.name, "pid": one.pid, "alive": one.alive} for one in children]

    async def aclose(self) -> None:
        """End the processes; rollouts in flight fail."""
        await asyncio.gather(self._pool.aclose(), self._alone.aclose())
