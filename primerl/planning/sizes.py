"""Parameter counts of a model: all parameters, those active per token, and those of experts."""

from typing import Any

import attrs
from torch import nn

from primerl import replay
from primerl._common.expert_modules import expert_modules


@attrs.frozen(kw_only=True)
class ModelSize:
    """Numbers of parameters of a model."""

    total: int
    active: int
    """Parameters that a token is multiplied with: k of e experts, without input embeddings."""
    experts: int
    """Parameters of all routed experts."""


def model_size(model: nn.Module) -> ModelSize:
    """Count a model's parameters, on any device, before it is sharded.

    Layers that predict several tokens (MTP) count if the model has them; models of ``transformers``
    don't.

    Raises:
        ValueError: the model has experts, but its config does not say how many a token uses.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = idle = 0
    for module in expert_modules(model).values():
        routes = replay.shape(model)
        own = sum(parameter.numel() for parameter in module.parameters())
        experts += own
        idle += own // routes.experts * (routes.experts - routes.k)
    config: Any = getattr(model, "config", None)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    embeddings = (
        0
        if tied
        else sum(
            module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)
        )
    )
    return ModelSize(total=total, active=total - idle - embeddings, experts=experts)
