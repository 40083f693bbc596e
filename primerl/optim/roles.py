"""Which parameters of a model are matrices for ``Muon``, and which are left to AdamW."""

from typing import Any

from torch import nn

CHOOSING = ("gate", "router", "shared_expert_gate", "weights_proj")
"""Names of linear layers whose few outputs choose among experts or keys, and mix nothing."""


def muon_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """The groups that ``Muon`` takes: a model's matrices, and everything else for AdamW.

    Matrices are the weights of linear layers and of stacked experts. Everything else is embeddings
    and the head, routers, norms, biases, and what is tied to any of them. In ``transformers``'
    experts, gate and up projections share a parameter: their group says so, by ``halves``, unless
    their rows alternate, which are then made orthogonal together.

    Args:
        model: a Hugging Face model, sharded or not; frozen parameters are left out.

    Returns:
        Groups that are not empty. Give one other hyperparameters by adding them to it.
    """
    matrices: list[nn.Parameter] = []
    halves: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    kept = _kept_apart(model)
    seen: set[int] = set()
    for name, module in model.named_modules():
        of_experts = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        for of_parameter, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if of_experts and parameter.ndim == 3:
                split = of_parameter == "gate_up_proj" and _is_stacked(module)
                (halves if split else matrices).append(parameter)
            elif (
                isinstance(module, nn.Linear)
                and of_parameter == "weight"
                and id(parameter) not in kept
                and name.rpartition(".")[2] not in CHOOSING
            ):
                matrices.append(parameter)
            else:
                others.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "algorithm": "muon"},
        {"params": halves, "algorithm": "muon", "halves": -2},
        {"params": others, "algorithm": "adamw"},
    ]
    return [group for group in groups if group["params"]]


def _is_stacked(experts: Any) -> bool:
    return bool(getattr(experts, "is_concatenated", False)) and not experts.is_transposed


def _kept_apart(model: Any) -> set[int]:
    """Embeddings and heads, which linear layers may be tied to."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_output_embeddings"):
        embeddings += [model.get_input_embeddings(), model.get_output_embeddings()]
    return {
        id(parameter)
        for module in embeddings
        if module is not None
        for parameter in module.parameters(recurse=False)
    }
