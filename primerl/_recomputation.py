"""The names that releases of transformers give to activation checkpointing."""

from collections.abc import Callable
from typing import Any

from torch import nn

# Since 5.23, then before: the earlier names are deprecated.
_NAMES = ("activation_checkpointing", "gradient_checkpointing")


def recomputes(model: nn.Module) -> bool:
    """Whether layers of a model recompute their activations in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def recomputation_method(model: nn.Module, *, enable: bool = True) -> Callable[..., None] | None:
    """The model's method that starts or stops it; its first argument is ``checkpoint``'s options.

    None if the model is not one of transformers.
    """
    for name in _NAMES:
        method: Any = getattr(model, f"{name}_{'enable' if enable else 'disable'}", None)
        if method is not None:
            found: Callable[..., None] = method
            return found
    return None
