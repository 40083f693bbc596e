"""Environments of the ``verifiers`` library (0.4), sampled by our engines.

Everything that knows verifiers is in this package; it is imported on first use.
"""

from primerl.rollout.environments.verifiers_adapter.environment import verifiers

__all__ = ["verifiers"]
