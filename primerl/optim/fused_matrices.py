"""Layouts of fused parameters: the matrices that a weight of a ``transformers`` model holds.

Fused layers are recognized by class names and attributes. Tests trace each model family's forward
pass to check that every entry is right and that none is missing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from primerl._common.expert_modules import is_experts


@attrs.frozen(kw_only=True)
class Matrices:
    """Description of the matrices that a parameter ``[.., outputs, inputs]`` holds.

    ``optim.Matrices()`` describes a single matrix. ``split=(a, b)`` describes two: in each run of
    a + b outputs, the first a belong to one matrix and the next b to the other. For n outputs,
    ``(n / 2, n / 2)`` means two halves, ``(1, 1)`` means that the outputs of two matrices
    alternate, and ``(size,) * heads`` means one matrix per head.

    Attributes:
        split: number of outputs of each matrix, repeated until the outputs end; None for a single
            matrix.
        transposed: whether the parameter is ``[.., inputs, outputs]``.
        names: names of the matrices, for display.
    """

    split: tuple[int, ...] | None = None
    transposed: bool = False
    names: tuple[str, ...] = ()

    def outputs(self, parameter: Tensor) -> int:
        """Return the number of outputs of the parameter."""
        return parameter.shape[-1 if self.transposed else -2]

    def fits(self, parameter: Tensor) -> bool:
        """Whether the parameter's outputs can be divided by ``split``."""
        if self.split is None:
            return True
        whole = all(isinstance(size, int) and size > 0 for size in self.split)
        return whole and bool(self.split) and self.outputs(parameter) % sum(self.split) == 0


def split_outputs(stack: Tensor, matrices: Matrices) -> list[Tensor]:
    """Split a stack ``[n, rows, columns]`` into its ``[n, repeats, outputs, inputs]`` matrices."""
    stack = stack.mT if matrices.transposed else stack
    split = matrices.split or (stack.shape[1],)
    period = sum(split)
    repeated = stack.reshape(len(stack), -1, period, stack.shape[2])
    return list(torch.split(repeated, list(split), dim=2))


def join_outputs(parts: list[Tensor], matrices: Matrices) -> Tensor:
    """Join matrices into a stack ``[n, rows, columns]``: the inverse of ``split_outputs``."""
    stack = torch.cat(parts, dim=2).flatten(1, 2)
    return stack.mT if matrices.transposed else stack


Parts = tuple[tuple[str, ...], tuple[int, ...]]
"""Names of a weight's matrices, and their numbers of outputs."""
Layout = Callable[[Any, int], Parts]
"""``(module that owns the layer, outputs of the layer) -> parts of the layer's weight``."""


def _equal(*names: str) -> Layout:
    return lambda _, outputs: (names, (outputs // len(names),) * len(names))


def _query_key_value(owner: Any, outputs: int) -> Parts:
    """Query, key and value one after the other, with grouped-query attention."""
    keys = owner.config.num_key_value_heads * owner.head_dim
    return ("query", "key", "value"), (outputs - 2 * keys, keys, keys)


def _by_head(owner: Any, outputs: int) -> Parts:
    """Query, key and value of each head in turn."""
    heads = owner.config.num_attention_heads
    return ("query", "key", "value"), (outputs // (3 * heads),) * 3


def _lightning_by_head(owner: Any, outputs: int) -> Parts:  # noqa: ARG001
    return ("query", "key", "value"), (owner.head_dim,) * 3


def _gpt_bigcode(owner: Any, outputs: int) -> Parts:
    if not owner.multi_query:
        return ("query", "key", "value"), (owner.head_dim,) * 3
    return ("query", "key", "value"), (outputs - 2 * owner.kv_dim, owner.kv_dim, owner.kv_dim)


def _by_layer(owner: Any, outputs: int) -> Parts:
    layers = owner.config.num_hidden_layers
    return tuple(f"layer {n}" for n in range(layers)), (outputs // layers,) * layers


def _latent_and_rotary_key(owner: Any, outputs: int) -> Parts:
    return ("latent", "rotary key"), (owner.kv_lora_rank, outputs - owner.kv_lora_rank)


def _latent_keys_and_values(owner: Any, outputs: int) -> Parts:  # noqa: ARG001
    return ("key", "value"), (owner.qk_nope_head_dim, owner.v_head_dim)


def _query_and_gate(owner: Any, outputs: int) -> Parts:  # noqa: ARG001
    """The query and the output gate of each head in turn."""
    return ("query", "gate"), (owner.head_dim, owner.head_dim)


def _delta_rule_by_head(owner: Any, outputs: int) -> Parts:
    """The inputs of the delta rule, and its output gate, of each key head in turn."""
    key, value = owner.head_k_dim, (outputs // owner.num_k_heads - 2 * owner.head_k_dim) // 2
    return ("query", "key", "value", "gate"), (key, key, value, value)


def _delta_rule(owner: Any, outputs: int) -> Parts:  # noqa: ARG001
    return ("query", "key", "value"), (owner.key_dim, owner.key_dim, owner.value_dim)


def _write_strength_and_decay(owner: Any, outputs: int) -> Parts:
    values = outputs // (2 * owner.num_k_heads)
    return ("write strength", "decay"), (values, values)


GATE_UP = _equal("gate", "up")
# Layouts by the class of the module that owns the layer, and by the layer's attribute name.
FUSED: dict[str, dict[str, Layout]] = {
    **{
        name: {"gate_up_proj": GATE_UP}
        for name in ("GlmMLP", "Glm4MLP", "Phi3MLP", "MiniMaxM3VLDenseMLP")
    },
    "ModernBertDecoderMLP": {"Wi": GATE_UP},
    "Phi3Attention": {"qkv_proj": _query_key_value},
    **{name: {"query_key_value": _by_head} for name in ("GPTNeoXAttention", "PersimmonAttention")},
    "GPT2Attention": {"c_attn": _equal("query", "key", "value")},
    "GPTBigCodeAttention": {"c_attn": _gpt_bigcode},
    "JetMoeAttention": {"kv_proj": _equal("key", "value")},
    "AriaExperts": {"fc1": GATE_UP},
    "JetMoeMoE": {"input_linear": GATE_UP},
    "LongcatFlashExperts": {"gate_up_proj": GATE_UP},
    "Llama4TextExperts": {"gate_up_proj": GATE_UP},
    "MiniMaxLightningAttention": {"qkv_proj": _lightning_by_head},
    **{
        name: {"in_proj": _equal("input gate", "output gate", "value")}
        for name in ("Lfm2ShortConv", "Lfm2MoeShortConv")
    },
    **{
        name: {"q_proj": _query_and_gate}
        for name in ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")
    },
    "Qwen3NextGatedDeltaNet": {
        "in_proj_qkvz": _delta_rule_by_head,
        "in_proj_ba": _write_strength_and_decay,
    },
    **{
        name: {"in_proj_qkv": _delta_rule}
        for name in ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
    },
    **{
        name: {"per_layer_model_projection": _by_layer}
        for name in ("Gemma3nTextModel", "Gemma4TextModel", "Gemma4UnifiedTextModel")
    },
}
# Layouts of latent attention (arXiv:2405.04434), which are the same in every model family.
LATENT: dict[str, Layout] = {
    "kv_a_proj_with_mqa": _latent_and_rotary_key,
    "kv_b_proj": _latent_keys_and_values,
}
# Classes that hold stacked experts but are not in transformers' registry of experts; the value is
# whether the matrices are transposed.
STACKED = {
    "AriaGroupedExpertsGemm": True,  # transformers 5.17; later versions have Aria in the registry
    "JetMoeParallelExperts": False,
    "Llama4TextExperts": True,
    "LongcatFlashExperts": False,
}
# Modules whose linear layers produce coefficients that mix the model's streams.
COEFFICIENTS = ("Gemma3nTextAltUp",)


def classes(module: nn.Module) -> set[str]:
    """Return the names of a module's class and of its base classes."""
    return {kind.__name__ for kind in type(module).__mro__}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, with its weight transposed or not."""
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``: GPT-2's linear layer with transposed weight."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def stacked_matrices(
    owner: nn.Module | None, layer: str, module: Any, name: str, weight: Tensor
) -> Matrices | None:
    """Return the matrices of a weight that stacks experts; None if its layout is unknown.

    ``weight`` is the parameter ``name`` of ``module``, which is the child ``layer`` of ``owner``.
    """
    if is_experts(module):
        one = Matrices(transposed=module.is_transposed)
        if name != "gate_up_proj":
            return one if name in ("up_proj", "down_proj") else None
        half = one.outputs(weight) // 2
        split = (half, half) if getattr(module, "is_concatenated", True) else (1, 1)
        return attrs.evolve(one, split=split, names=("gate", "up"))
    known = classes(module) & STACKED.keys()
    if not known:
        return None
    transposed = STACKED[known.pop()]
    if name == "weight" and owner is not None:
        return linear_matrices(owner, layer, weight, transposed=transposed)
    return linear_matrices(module, name, weight, transposed=transposed)


def linear_matrices(
    owner: Any, layer: str, weight: Tensor, *, transposed: bool = False
) -> Matrices:
    """Return the matrices of a linear layer's weight, or of its adapter's output matrix."""
    one = Matrices(transposed=transposed)
    found = list(_layouts(owner, layer))
    if not found:
        return one
    names, split = found[0](owner, one.outputs(weight))
    return attrs.evolve(one, names=names, split=split)


def _layouts(owner: Any, layer: str) -> Iterator[Layout]:
    if hasattr(owner, "kv_lora_rank") and layer in LATENT:
        yield LATENT[layer]
    for kind in classes(owner) & FUSED.keys():
        if layer in FUSED[kind]:
            yield FUSED[kind][layer]


def is_known(owner: nn.Module, layer: str) -> bool:
    """Whether this module knows how ``owner`` uses the outputs of its layer."""
    latent = hasattr(owner, "kv_lora_rank") or hasattr(owner, "index_topk")
    return latent or any(_layouts(owner, layer))


def inner(module: nn.Module) -> nn.Module:
    """Return the module that is wrapped by adapters, or the module itself."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def sizes(linear: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    if is_transposed_linear(linear):
        inputs, outputs = linear.weight.shape
        return inputs, outputs
    return linear.in_features, linear.out_features


def linear_children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers that are direct children of a module, without their adapters."""
    children = {name: inner(child) for name, child in module.named_children()}
    return {name: child for name, child in children.items() if is_linear(child)}


def unknown(what: str, why: str) -> ValueError:
    """Return the error for a parameter whose role is unknown."""
    return ValueError(
        f"the role of {what} for Muon is unknown: {why}. Pass it to muon_parameters(model, "
        "roles={'NAME OR PATTERN': ROLE}), where the role is 'adamw', optim.Matrices() for one "
        "matrix (or one per expert), or optim.Matrices(split=(outputs of each matrix, ...), "
        "transposed=...) for several"
    )
