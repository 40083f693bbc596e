"""Environments in processes of their own: what hangs or dies there takes one process with it."""

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

SHARED_TRIES = 2  # a process may have died for another's sake


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
    rollouts at once, and calls back for the engine's completions. A process that dies is started
    again, and its rollouts are played again, if need be one to a process: the one that brings its
    process down fails, the others don't. A process that is blocked when a rollout's time is up is
    killed.

    Args:
        environment: crosses into each process by pickle, lambdas and local functions included.
        processes: a new rollout goes to the one with the fewest.
        timeout_s: how long a rollout may take, waiting for a process included.
        threads: of numerical libraries, in each process.

    Raises:
        ValueError: a number is out of range, or the environment can't cross.
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

    The processes start with the first rollout, where that is played, and end with ``aclose``,
    which a worker calls, or with the process that started them.
    """

    def __init__(
        self, arguments: dict[str, bytes], processes: int, timeout_s: float, threads: int
    ) -> None:
        self._plan = (arguments, processes, timeout_s, threads)
        self._timeout_s = timeout_s
        self._engines = EngineHost()
        handlers = {"generate": self._engines.generate}
        self._pool = ProcessPool(arguments, handlers, processes=processes, threads=threads)
        # Where rollouts are played again whose process died: one in each, so that whichever
        # brings its process down takes no other with it.
        self._alone = ProcessPool(
            arguments, handlers, processes=processes, threads=threads, most_each=1
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return IsolatedEnvironment, self._plan  # processes stay where they were started

    @property
    def restarts(self) -> int:
        """How many processes have died and been replaced."""
        return self._pool.restarts + self._alone.restarts

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play one rollout in the process that has the fewest.

        If that process dies, the rollout is played again; if it dies again, in one that the
        rollout has to itself.

        Raises:
            TimeoutError: it did not end within ``timeout_s``.
            RuntimeError: its process died when it had one to itself, or none can be started. What
                the environment raises is raised.
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
            if child is not None:  # it may be blocked, and would then attract every rollout
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
