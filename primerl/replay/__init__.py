"""Router replay (R3): the trainer computes each token with the experts that the sampler chose.

It is not a replay buffer. See ``docs/router-replay.md``. Names that need torch are imported on
first use, because the rollout worker's process has a ``Store`` but does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from primerl.replay.codec import decode, encode
from primerl.replay.recordings import RecordedRoutes
from primerl.replay.references import discard, read
from primerl.replay.shapes import RouteShape
from primerl.replay.store import BadRoutes, Store

if TYPE_CHECKING:
    from primerl.replay.fetching import fetch
    from primerl.replay.forcing import RouteCounts, forced
    from primerl.replay.recorder import CapturedRoutes, capture, shape

__all__ = [
    "BadRoutes",
    "CapturedRoutes",
    "RecordedRoutes",
    "RouteCounts",
    "RouteShape",
    "Store",
    "capture",
    "decode",
    "discard",
    "encode",
    "fetch",
    "forced",
    "read",
    "shape",
]

_LAZY = {
    "CapturedRoutes": "recorder",
    "RouteCounts": "forcing",
    "capture": "recorder",
    "fetch": "fetching",
    "forced": "forcing",
    "shape": "recorder",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'primerl.replay' has no attribute {name!r}")
    return getattr(importlib.import_module(f"primerl.replay.{_LAZY[name]}"), name)
