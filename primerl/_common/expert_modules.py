"""Functions that find the modules of a model that hold routed experts."""

from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Check whether ``transformers`` runs a module through its registry of experts functions."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold a layer's experts as stacked matrices, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}
