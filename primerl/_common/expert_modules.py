"""The modules of a model that hold routed experts."""

from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Whether transformers computes a module through its registry of experts functions."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a layer's experts as stacked matrices, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}
