"""Router replay (R3): the trainer computes each token with the experts that the sampler chose.

It is not a replay buffer. See ``docs/router_replay.md``.
"""

from primerl.replay.counts import RouteCounts
from primerl.replay.forcing import forced
from primerl.replay.layers import shape
from primerl.replay.recorder import CapturedRoutes, capture
from primerl.replay.shapes import RouteShape

__all__ = ["CapturedRoutes", "RouteCounts", "RouteShape", "capture", "forced", "shape"]
