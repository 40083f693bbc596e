"""The modules of a model that hold routed experts."""

from torch import nn


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a layer's experts as stacked matrices, by name.

    They are those that ``transformers`` calls through its registry of experts functions.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    }
