"""Advantage estimators for episodes of several agents."""

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
    problem, while all proposers had the same task. So a rollout is compared with the rollouts of
    the same agent, and for ``inner_agents`` only with those of the same episode. A rollout that
    has nothing to be compared with gets 0 from the estimators of this package.

    Args:
        group: the rollouts of all agents in all episodes of a task.
        inner_agents: names of the agents that act on something their own episode produced.
        baseline: any estimator that returns one number per rollout. It is called once for each set
            of rollouts that are compared.

    Raises:
        ValueError: ``inner_agents`` is one string, or a rollout of an inner agent has no
            ``episode_id``.
    """
    if isinstance(inner_agents, str):
        raise ValueError(f"inner_agents is {inner_agents!r}, expected a list: [{inner_agents!r}]")
    compared: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for index, rollout in enumerate(group.rollouts):
        inner = rollout.agent in inner_agents
        if inner and not rollout.episode_id:
            raise ValueError(
                f"task {group.task_id!r}: a rollout of the inner agent {rollout.agent!r} has no "
                "episode_id, so it is unknown which rollouts to compare it with; set episode_id in "
                "the environment"
            )
        compared[rollout.agent, rollout.episode_id if inner else None].append(index)
    advantages = np.zeros(len(group.rollouts))
    for indices in compared.values():
        rollouts = [group.rollouts[index] for index in indices]
        advantages[indices] = baseline(attrs.evolve(group, rollouts=rollouts))
    return advantages


@attrs.define(eq=False, kw_only=True)
class AgentBaselines:
    """An estimator whose baseline is each agent's running mean reward in its environment.

        estimator = advantage.AgentBaselines(decay=0.95)
        samples = advantage.assign(groups, estimator)

    For every (environment, agent), b is a running mean of rewards that starts at 0. Rollouts are
    processed in the order of the groups and within them::

        A_i = R_i - b        then        b = decay * b + (1 - decay) * R_i

    In a zero-sum game, the mean reward of a group is 0 whatever the agents do. This estimator
    distinguishes an agent that improves from one that merely has the better role. It is the
    role-conditioned advantage estimation of SPIRAL (arXiv:2506.24119, equation 2 and algorithm 1).
    The paper updates b before it computes A_i, which would scale all advantages by ``decay``.

    A call changes the baselines, so call it once per group. ``state`` and ``restore`` save and
    resume the baselines exactly.

    Raises:
        ValueError: ``decay`` is not within [0, 1].
    """

    decay: float = 0.95
    _baselines: dict[tuple[str, str], float] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay is {self.decay}, expected a number within [0, 1]")

    def __call__(self, group: Group) -> Float64[np.ndarray, " g"]:
        """Return one advantage per rollout, and update the baselines."""
        return np.array([self._score(group.environment, one) for one in group.rollouts], np.float64)

    def state(self) -> dict[str, Any]:
        """The baselines as a list of ``[environment, agent, baseline]``, in JSON types."""
        return {"baselines": [[*key, value] for key, value in sorted(self._baselines.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the baselines that ``state`` returned."""
        self._baselines = {
            (environment, agent): float(baseline)
            for environment, agent, baseline in state["baselines"]
        }

    def _score(self, environment: str, rollout: Rollout) -> float:
        key = environment, rollout.agent
        baseline = self._baselines.get(key, 0.0)
        self._baselines[key] = self.decay * baseline + (1 - self.decay) * rollout.reward
        return rollout.reward - baseline
