"""Advantage estimators, and the step from groups of rollouts to training samples.

An advantage says how much better a rollout did than the rollouts that it is compared with. An
estimator is a function of a ``Group`` that returns one value per rollout, or per-token values;
``assign`` turns groups and an estimator into training samples:

    samples = advantage.assign(groups, advantage.centered)
    samples = advantage.assign(groups, functools.partial(advantage.pass_at_k, k=4))
    samples = advantage.assign(groups, lambda group: group.rewards - 0.5)

Estimators that need only the rewards are functions of ``rewards[g]``, wrapped in ``of_rewards``.
They also accept a bare array: ``centered(np.array([1.0, 0.0]))``. If a group has lost rollouts, the
remaining ones are compared. If all rewards are equal, or there is only one, the advantages are
exactly 0.
"""

from primerl.advantage.agents import AgentBaselines, hierarchical
from primerl.advantage.assignment import assign, whitened, with_observation_weights
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
    "with_observation_weights",
]
