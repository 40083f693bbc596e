"""Composable parts for asynchronous, agentic reinforcement learning of language models.

Each package is imported on first use, so ``import primerl`` is instant and loads no torch:

    from primerl import advantage, checkpoint, filters, loss, models, optim, packing
    from primerl import parallel, rollout, track, types, weights

Data flows from ``rollout`` through ``filters``, ``advantage``, ``packing``, ``loss``, an optimizer
and ``weights`` back to ``rollout``. No package imports another: the short scripts in ``recipes/``
wire them together.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primerl import (
        advantage as advantage,
    )
    from primerl import (
        attention as attention,
    )
    from primerl import (
        checkpoint as checkpoint,
    )
    from primerl import (
        filters as filters,
    )
    from primerl import (
        flops as flops,
    )
    from primerl import (
        loss as loss,
    )
    from primerl import (
        models as models,
    )
    from primerl import (
        optim as optim,
    )
    from primerl import (
        packing as packing,
    )
    from primerl import (
        parallel as parallel,
    )
    from primerl import (
        parity as parity,
    )
    from primerl import (
        rollout as rollout,
    )
    from primerl import (
        testing as testing,
    )
    from primerl import (
        track as track,
    )
    from primerl import (
        types as types,
    )
    from primerl import (
        weights as weights,
    )

__version__ = "0.1.0"
__all__ = [
    "advantage",
    "attention",
    "checkpoint",
    "filters",
    "flops",
    "loss",
    "models",
    "optim",
    "packing",
    "parallel",
    "parity",
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
