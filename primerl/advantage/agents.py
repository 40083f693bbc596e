"""Estimators for episodes of several agents."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import numpy as np
from jaxtyping import Float64

from primerl.advantage.estimators import Rewards, centered
from primerl.types import Group, Rollout


def hierarchical(
    group: Group,
    *,
    inner_agents: Collection[str],
    baseline: Callable[[Group], Any] = centered,
) -> Rewards:
    """Compare inner agents within their episode, and every other agent across the group.

    If a proposer sets a problem and solvers try it, only the solvers of one episode had the same
    problem, while all proposers had the same task. So a rollout is compared with those of its
    agent, and, for ``inner_agents``, only with those of its episode. A rollout without any other
    to be compared with gets 0 from the baselines here.

    Args:
        group: the rollouts of all agents in all episodes of a task.
        inner_agents: the names of agents that act on what their own episode produced.
        baseline: any estimator with one number for each rollout; called with each set of rollouts.

    Raises:
        ValueError: ``inner_agents`` is one string, or a rollout of an inner agent has no
            ``episode_id``.
    """
    if isinstance(inner_agents, str):
        raise ValueError(f"inner_agents is {inner_agents!r}, expected names: [{inner_agents!r}]")
    compared: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for index, rollout in enumerate(group.rollouts):
        inner = rollout.agent in inner_agents
        if inner and not rollout.episode_id:
            raise ValueError(
                f"task {group.task_id!r}: a rollout of the inner agent {rollout.agent!r} has no "
                "episode_id, so what it is compared with is unknown; set it in the environment"
            )
        compared[rollout.agent, rollout.episode_id if inner else None].append(index)
    advantages = np.zeros(len(group.rollouts))
    for indices in compared.values():
        rollouts = [group.rollouts[index] for index in indices]
        advantages[indices] = baseline(attrs.evolve(group, rollouts=rollouts))
    return advantages


@attrs.define(eq=False, kw_only=True)
class AgentBaselines:
    """An estimator that compares each agent with its usual reward in the environment.

        estimator = advantage.AgentBaselines(decay=0.95)
        samples = advantage.assign(groups, estimator)

    For every (environment, agent), b is a running mean of rewards that starts at 0. Rollouts are
    processed in the order of the groups and within them::

        A_i = R_i - b        then        b = decay * b + (1 - decay) * R_i

    In a zero-sum game the mean of a group is 0 whatever the agents do; this distinguishes an agent
    that improves from one that has the better role. Role-conditioned advantage estimation (SPIRAL,
    arXiv:2506.24119, equation 2 and algorithm 1); updating b first, as written there, would scale
    all advantages by ``decay``.

    A call changes the baselines, so call it once for each group. ``state`` and ``restore`` resume
    it exactly.

    Raises:
        ValueError: ``decay`` is not within [0, 1].
    """

    decay: float = 0.95
    _baselines: dict[tuple[str, str], float] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay is {self.decay}, expected a number within [0, 1]")

    def __call__(self, group: Group) -> Float64[np.ndarray, " g"]:
        """One advantage for each rollout."""
        return np.array([self._score(group.environment, one) for one in group.rollouts], np.float64)

    def state(self) -> dict[str, Any]:
        """The baselines as ``[environment, agent, baseline]``, in JSON types."""
        return {"baselines": [[*key, value] for key, value in sorted(self._baselines.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where the estimator of ``state`` was."""
        self._baselines = {
            (environment, agent): float(baseline)
            for environment, agent, baseline in state["baselines"]
        }

    def _score(self, environment: str, rollout: Rollout) -> float:
        key = environment, rollout.agent
        baseline = self._baselines.get(key, 0.0)
        self._baselines[key] = self.decay * baseline + (1 - self.decay) * rollout.reward
        return rollout.reward - baseline
