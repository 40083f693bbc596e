"""Adapter for environments of the ``verifiers`` library (0.4), sampled by primerl's engines.

All code that depends on verifiers is in this package. Modules that import verifiers itself
(``agent``, ``client``, ``harness``, ``tools``) are imported when an environment is first played.
"""

from primerl.rollout.environments.verifiers_adapter.environment import verifiers

__all__ = ["verifiers"]
