"""Advantages: how much better a rollout did than what it is compared with.

An estimator is a function of a ``Group`` that returns one value per rollout, or per-token values;
``assign`` turns groups and an estimator into training samples:

    samples = advantage.assign(groups, advantage.centered)
    samples = advantage.assign(groups, functools.partial(advantage.pass_at_k, k=4))
    samples = advantage.assign(groups, lambda group: group.rewards - 0.5)

Estimators that need only the rewards are written on ``rewards[g]`` and lifted with ``of_rewards``,
so that they can be tested on a bare array: ``centered(np.array([1.0, 0.0]))``. They compare the
rollouts that are there: of a group that lost some, the survivors. Where all rewards are equal, or
there is only one, their advantages are exactly 0.
"""

from primerl.advantage.agents import AgentBaselines, hierarchical
from primerl.advantage.assignment import assign, whitened
from primerl.advantage.estimators import (
    centered,
    leave_one_out,
    max_rl,
    of_rewards,
    pass_at_k,
    standardized,
)
from primerl.advantage.penalties import penalized

__all__ = [
    "AgentBaselines",
    "assign",
    "centered",
    "hierarchical",
    "leave_one_out",
    "max_rl",
    "of_rewards",
    "pass_at_k",
    "penalized",
    "standardized",
    "whitened",
]
