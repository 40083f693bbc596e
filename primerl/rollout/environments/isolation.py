"""Environments isolated in child processes, so that a hang or crash does not affect others."""

import asyncio
import contextlib
import functools
from typing import Any

from primerl._common.processes.launch import LaunchContext
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.remote import EngineHost
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.environments.process_pool import ProcessPool
from primerl.rollout.processes.child import ProcessDied
from primerl.rollout.processes.pickling import pickle_arguments
from primerl.rollout.processes.supervised import SupervisedProcess
from primerl.types import Rollout, SamplingParams

SHARED_TRIES = 2  # another rollout may have caused the death of a shared process


def isolated(
    environment: Environment,
    *,
    processes: int = 2,
    timeout_s: float = 600.0,
    threads: int = 1,
) -> "IsolatedEnvironment":
    """Return an environment that plays ``environment`` in supervised child processes.

        environment = rollout.isolated(heavy_environment, processes=4)

    Use it for environments that compute heavily, block their event loop, or crash. Each process
    plays many rollouts at once, and samples from the parent process's engine. If a process dies, it
    is replaced and its rollouts are played again, in the end with one rollout per process, so that
    only the rollout that kills its process fails. If a process's event loop is blocked when a
    rollout times out, the process is killed.

    Args:
        environment: the environment, which is pickled into each process; lambdas and local
            functions are supported.
        processes: the number of processes; a new rollout goes to the one with the fewest rollouts.
        timeout_s: timeout of one rollout, including the wait for a process.
        threads: the number of threads of numerical libraries in each process.

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
    """An environment that is played in a pool of child processes, made by ``isolated``.

    The first rollout starts the processes, as children of the process that plays it. They end on
    ``aclose``, which a worker calls, or with their parent process.
    """

    def __init__(
        self, arguments: dict[str, bytes], processes: int, timeout_s: float, threads: int
    ) -> None:
        self._plan = (arguments, processes, timeout_s, threads)
        self._timeout_s = timeout_s
        self._engines = EngineHost()
        handlers = {"generate": self._engines.generate}
        # Recorded now, because an environment in this process may change it.
        context = LaunchContext.current()
        make = functools.partial(SupervisedProcess, threads=threads, context=context)
        self._pool = ProcessPool(arguments, handlers, processes=processes, make=make)
        # Rollouts whose process died repeatedly are played again here, one per process.
        self._alone = ProcessPool(arguments, handlers, processes=processes, make=make, most_each=1)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the processes: a copy starts its own.
        return IsolatedEnvironment, self._plan

    @property
    def restarts(self) -> int:
        """The number of processes that have died and been replaced."""
        return self._pool.restarts + self._alone.restarts

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play one rollout in the process that has the fewest rollouts.

        If that process dies, the rollout is played again in another shared process. If that process
        dies, too, the rollout gets a process for itself.

        Raises:
            TimeoutError: the rollout did not end within ``timeout_s``.
            RuntimeError: the process that played only this rollout died, too, or no process can be
                started.
            Exception: any error of the environment.
        """
        for _ in range(SHARED_TRIES):
            with contextlib.suppress(ProcessDied):
                return await self._play(self._pool, task, engine, params)
        return await self._play(self._alone, task, engine, params)

    async def _play(
        self, pool: ProcessPool, task: Task, engine: Engine, params: SamplingParams
    ) -> Rollout:
        async with pool.process(timeout_s=self._timeout_s) as child:
            with self._engines.lease(engine, child.notify) as address:
                rollout: Rollout = await child.call("play", dict(task), address, params)
            return rollout

    def members(self) -> list[dict[str, Any]]:
        """List the processes, each with its ``name``, ``pid`` and ``alive``."""
        children = [*self._pool.children(), *self._alone.children()]
        return [{"name": one.name, "pid": one.pid, "alive": one.alive} for one in children]

    async def aclose(self) -> None:
        """End the processes; rollouts in flight fail."""
        await asyncio.gather(self._pool.aclose(), self._alone.aclose())
