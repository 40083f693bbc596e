"""Composable packages for asynchronous, agentic reinforcement learning of language models.

Each package is imported on first use, so ``import primerl`` is instant and does not load torch:

    from primerl import advantage, checkpoint, data, filters, fp8, loss, models, optim
    from primerl import packing, parallel, rollout, sandbox, serving, track, types, weights

Data flows from ``rollout`` through ``filters``, ``advantage``, ``packing``, ``loss``, an optimizer
and ``weights`` back to ``rollout``. These packages do not import each other: the short scripts in
``recipes/`` wire them together. ``serving``, for vLLM, builds on ``rollout`` and ``weights``.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"
__all__ = [
    "advantage",
    "attention",
    "checkpoint",
    "data",
    "evaluation",
    "filters",
    "flops",
    "fp8",
    "loss",
    "models",
    "optim",
    "packing",
    "parallel",
    "parity",
    "planning",
    "replay",
    "rollout",
    "sandbox",
    "serving",
    "testing",
    "track",
    "types",
    "weights",
]


def __getattr__(name: str) -> ModuleType:
    # Only ``primerl.loss`` after ``import primerl`` needs this; ``from primerl import loss``
    # imports the submodule without it.
    if name in __all__:
        return importlib.import_module(f"primerl.{name}")
    raise AttributeError(f"module 'primerl' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
