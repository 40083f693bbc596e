"""A curriculum that prefers tasks that the policy solves sometimes, but not always."""

import heapq
import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

from primerl.rollout.environments.environment import Task
from primerl.rollout.tasks.streams import as_task, require_state_of
from primerl.types import Group

UNSEEN, EASY, MEDIUM, HARD = POOLS = ("unseen", "easy", "medium", "hard")

DEFAULT_WEIGHTS = {UNSEEN: 1.0, EASY: 0.1, MEDIUM: 1.0, HARD: 0.2}


class DifficultyPools:
    """A task stream that draws tasks by their solve rates.

    A task's solve rate is an exponential average of its groups' mean rewards, which must lie in
    [0, 1]: ``rate = momentum * rate + (1 - momentum) * mean``, starting with the first mean. It
    determines the task's pool: unseen (no group yet), easy (``rate >= easy``), hard
    (``rate <= hard``) or medium. A draw picks a non-empty pool at random by weight, and then
    the pool's first task that was never drawn, or the task that was drawn longest ago.

    A draw costs O(log n). The state stores the rates by task id. If the list of tasks may change,
    give tasks their own ids, so that the remaining tasks keep their rates.

    Args:
        tasks: an iterable of mappings, which is read into a list.
        easy: the lowest solve rate of an easy task.
        hard: the highest solve rate of a hard task.
        weights: the weights of the pools ``unseen``, ``easy``, ``medium`` and ``hard``; by default
            1, 0.1, 1 and 0.2.
        momentum: the weight of the previous rate, in [0, 1); with 0, the rate is the last mean.
        seed: the seed of the random choice of pools.

    Raises:
        ValueError: a task is not a mapping, two tasks have the same id, or a number is out of
            range.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        easy: float = 0.8,
        hard: float = 0.2,
        weights: Mapping[str, float] | None = None,
        momentum: float = 0.5,
        seed: int,
    ) -> None:
        if not 0 <= hard < easy <= 1:
            raise ValueError(f"hard={hard} and easy={easy}, expected 0 <= hard < easy <= 1")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, expected 0 <= momentum < 1")
        self._weights = dict(DEFAULT_WEIGHTS if weights is None else weights)
        if set(self._weights) != set(POOLS):
            raise ValueError(
                f"the weights are for {sorted(self._weights)}, expected {sorted(POOLS)}"
            )
        for pool, weight in self._weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {pool!r} is {weight}, expected a positive number")
        self._easy, self._hard, self._momentum, self._seed = easy, hard, momentum, seed
        self._tasks = [as_task(row, index) for index, row in enumerate(tasks)]
        self._index = {task["id"]: index for index, task in enumerate(self._tasks)}
        if len(self._index) < len(self._tasks):
            twice = next(t["id"] for i, t in enumerate(self._tasks) if self._index[t["id"]] != i)
            raise ValueError(f"two tasks have the id {twice!r}; their solve rates would be mixed")
        self._draws = 0
        self._restored = False
        self._fill({}, {})

    def draw(self) -> dict[str, Any] | None:
        """Return the next task; None if there are no tasks."""
        pools = [pool for pool in POOLS if self._counts[pool]]
        if not pools:
            return None
        rng = random.Random(f"{self._seed} {self._draws}")
        pool = rng.choices(pools, [self._weights[pool] for pool in pools])[0]
        index = self._pop(pool)
        self._last_drawn[index] = self._draws
        self._draws += 1
        self._push(index)
        return dict(self._tasks[index])

    def report(self, task: Task, group: Group | None) -> None:
        """Update the task's solve rate with the group's mean reward.

        After ``restore``, a task that is not in the list is ignored: it may have been in flight
        when the state was taken, and removed from the list since.

        Raises:
            ValueError: a reward is outside [0, 1]; or, before any ``restore``, the task is unknown.
        """
        if group is None or len(group.rollouts) == 0:
            return
        index = self._index.get(task["id"])
        if index is None and self._restored:
            return
        if index is None:
            raise ValueError(
                f"the task {task['id']!r} is not one of the {len(self._tasks)} tasks here"
            )
        rewards = group.rewards
        if rewards.min() < 0 or rewards.max() > 1:
            raise ValueError(
                f"the rewards of task {task['id']!r} are {rewards.tolist()}; solve rates need "
                "rewards in [0, 1]: scale them, or draw tasks from another stream"
            )
        mean, before = float(rewards.mean()), self._rates[index]
        self._rates[index] = (
            mean if before is None else self._momentum * before + (1 - self._momentum) * mean
        )
        pool = self._pool_of(index)
        if pool != self._pools[index]:
            self._counts[self._pools[index]] -= 1
            self._counts[pool] += 1
            self._pools[index] = pool
            self._push(index)

    def solve_rates(self) -> dict[str, float]:
        """Return the solve rate of each task that has one, by task id."""
        rates = zip(self._tasks, self._rates, strict=True)
        return {task["id"]: rate for task, rate in rates if rate is not None}

    def pool_sizes(self) -> dict[str, int]:
        """Return the number of tasks in each pool, by the pool's name."""
        return dict(self._counts)

    def state(self) -> dict[str, Any]:
        """Return ``{"draws", "seed", "rates", "last_drawn"}``.

        ``draws`` is the number of draws so far. ``rates`` and ``last_drawn``, the number of a
        task's last draw, are by task id.
        """
        drawn = zip(self._tasks, self._last_drawn, strict=True)
        return {
            "draws": self._draws,
            "seed": self._seed,
            "rates": self.solve_rates(),
            "last_drawn": {task["id"]: number for task, number in drawn if number >= 0},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; tasks that are not in it begin as unseen.

        Raises:
            ValueError: the seed has changed, or the state is that of another kind of stream.
        """
        require_state_of(self, state, keys=("draws", "rates", "last_drawn"), optional=["seed"])
        if state.get("seed", self._seed) != self._seed:
            raise ValueError(
                f"the state was taken with seed={state['seed']}, not {self._seed}: other tasks "
                "would be drawn; restore with the same seed, or begin a new stream"
            )
        self._draws = state["draws"]
        self._restored = True
        self._fill(state["rates"], state["last_drawn"])

    def _fill(self, rates: Mapping[str, float], last_drawn: Mapping[str, int]) -> None:
        ids = list(self._index)
        self._rates: list[float | None] = [rates.get(task_id) for task_id in ids]
        self._last_drawn = [last_drawn.get(task_id, -1) for task_id in ids]
        self._pools = [self._pool_of(index) for index in range(len(ids))]
        self._counts = {pool: self._pools.count(pool) for pool in POOLS}
        self._heaps: dict[str, list[tuple[int, int]]] = {pool: [] for pool in POOLS}
        for index in range(len(ids)):
            self._push(index)

    def _pool_of(self, index: int) -> str:
        rate = self._rates[index]
        if rate is None:
            return UNSEEN
        if rate >= self._easy:
            return EASY
        return HARD if rate <= self._hard else MEDIUM

    def _push(self, index: int) -> None:
        heapq.heappush(self._heaps[self._pools[index]], (self._last_drawn[index], index))

    def _pop(self, pool: str) -> int:
        """Return the pool's task that was drawn longest ago.

        Skip outdated entries, whose tasks have since been drawn or moved to another pool.
        """
        while True:
            last_drawn, index = heapq.heappop(self._heaps[pool])
            if self._pools[index] == pool and self._last_drawn[index] == last_drawn:
                return index
