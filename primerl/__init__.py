"""Composable parts for asynchronous, agentic reinforcement learning of language models.

Each package is imported on first use, so ``import primerl`` is instant and loads no torch:

    from primerl import advantage, filters, loss, packing, rollout, track, types, weights

Data flows ``rollout -> filters -> advantage -> packing -> loss -> optimizer -> weights -> rollout``;
no package imports another, and the short scripts in ``recipes/`` wire them together.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primerl import (
        advantage as advantage,
        filters as filters,
        loss as loss,
        packing as packing,
        rollout as rollout,
        testing as testing,
        track as track,
        types as types,
        weights as weights,
    )

__version__ = "0.1.0"
__all__ = [
    "advantage",
    "filters",
    "loss",
    "packing",
    "rollout",
    "testing",
    "track",
    "types",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"primerl.{name}")
    raise AttributeError(f"module 'primerl' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
