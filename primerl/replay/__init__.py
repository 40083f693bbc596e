"""Router replay (R3): the trainer computes each token with the experts that the sampler chose.

It is not a replay buffer. See ``docs/router_replay.md``.
"""

from primerl.replay.shapes import RouteShape

__all__ = ["RouteShape"]
