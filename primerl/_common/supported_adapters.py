"""The kind of ``peft`` adapters that can be saved, published and resumed, and errors of others."""

import math
from collections import Counter
from typing import Any

from torch import Tensor, nn

from primerl._common.adapters import (
    adapter_config,
    adapter_configs,
    adapts_experts,
    is_factor,
    lora_layers,
)

_INSTEAD = (
    "use a plain LoRA of linear layers: "
    "peft.LoraConfig(r=..., target_modules=models.adapter_targets(model))"
)

# Initial values that leave the base weights as they are. The others change them, so that neither
# the saved adapter nor a server's base model would fit.
_INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva")

# By the name of peft's class: what was asked for, and what to do instead.
_OTHER_MODULES = {
    "ModulesToSaveWrapper": (
        "a copy that is trained (modules_to_save); leave out modules_to_save, and call "
        "requires_grad_(True) on the module itself after peft.inject_adapter_in_model"
    ),
    "TrainableTokensWrapper": (
        "an embedding of which some rows are trained (trainable_token_indices); leave that out, or "
        "call requires_grad_(True) on the whole module after peft.inject_adapter_in_model"
    ),
    "ParamWrapper": (
        "LoRA of another parameter than stacked experts, such as a router (target_parameters; in "
        f"many mixtures of experts peft also adapts routers for all-linear); {_INSTEAD}"
    ),
    "Embedding": (
        "LoRA of an embedding; leave it out of target_modules, or call requires_grad_(True) on it "
        "after peft.inject_adapter_in_model"
    ),
}


def refuse_virtual_tokens(model: nn.Module) -> None:
    """Refuse ``peft`` adapters that prepend virtual tokens or keys, such as prompt tuning.

    With virtual tokens, the rows of a pack would not match its labels, and all documents would
    share the tokens before the first document. Engines can't load such adapters either.

    Raises:
        ValueError: the model has such an adapter.
    """
    for name, config in adapter_configs(model).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the model's adapter {name!r} is of peft's type {_kind(config)} "
                f"({type(config).__name__}), which prepends virtual tokens to each sequence; "
                "packed documents cannot be trained with it. Use peft.LoraConfig, or train the "
                "model's own weights"
            )


def refuse_unsupported_adapters(model: nn.Module) -> None:
    """Refuse adapters that can't be merged, saved alone, published and resumed exactly.

    Supported is plain LoRA (arXiv:2106.09685), also with rank-stabilized scales, and with ranks and
    scales that differ between layers. It adapts linear layers that share their weight with no other
    layer, or stacked experts, and is enabled and not merged. Sharding, checkpoints, transports and
    saving all call this function, so a model that is trained can also be saved.

    Raises:
        ValueError: there is another kind of adapter; the message names the adapter or the layer,
            and says what to use instead.
    """
    refuse_virtual_tokens(model)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "transformers added the model's adapters (add_adapter or load_adapter), and would save "
            "only them; load the base model, and add adapters by peft.inject_adapter_in_model"
        )
    for name, config in adapter_configs(model).items():
        _refuse_config(name, config)
    owners = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    for name, module in model.named_modules():
        if _from_peft(module):
            _refuse_module(name, module, owners)


def _refuse_config(name: str, config: Any) -> None:
    if _kind(config) != "LORA":
        raise ValueError(
            f"the model's adapter {name!r} is of peft's type {_kind(config)}, which cannot be "
            f"merged into the published weights; {_INSTEAD}"
        )
    initial = config.init_lora_weights
    if initial not in _INITIAL_VALUES:
        raise ValueError(
            f"the model's adapter {name!r} has init_lora_weights={initial!r}, which can change the "
            "base weights, so that the saved adapter would not fit the base model; expected one "
            f"of {', '.join(map(repr, _INITIAL_VALUES))}"
        )
    if config.layer_replication:
        raise ValueError(
            f"the model's adapter {name!r} repeats layers (layer_replication), which the saved "
            "model would lack; leave out layer_replication"
        )


def _refuse_module(name: str, module: Any, owners: Counter[int]) -> None:
    if not name:
        raise ValueError(
            f"the model is wrapped in peft's {type(module).__name__}, so its tensors have other "
            "names; pass the model itself: add adapters by peft.inject_adapter_in_model, or call "
            "get_base_model() on the wrapper"
        )
    kind = type(module).__name__
    if adapts_experts(module):
        fault = _fault(module, module.get_param(), owners)
    elif kind in _OTHER_MODULES:
        fault = _OTHER_MODULES[kind]
    elif kind != "Linear" or not hasattr(module, "lora_A"):
        fault = f"peft's {kind}; {_INSTEAD}"
    else:
        fault = _fault(module, module.base_layer.weight, owners)
    if fault:
        raise ValueError(
            f"the adapter of {name} is not a plain, unmerged LoRA of a linear layer but {fault}"
        )


def _fault(module: Any, weight: Tensor, owners: Counter[int]) -> str:
    """Return why a LoRA of ``weight`` is not supported; empty if it is."""
    base = module.base_layer
    faults = {
        f"LoRA of a {type(base).__name__}": not (
            isinstance(base, nn.Linear)
            or module.fan_in_fan_out  # a Conv1D, as in GPT-2
            or adapts_experts(module)
        ),
        "a variant of LoRA, such as DoRA (use_dora)": bool(
            module.lora_variant or module.lora_magnitude_vector
        ),
        "LoRA with a bias (lora_bias)": any(b.bias is not None for b in module.lora_B.values()),
        "merged (call unmerge())": module.merged,
        "disabled (enable its adapters)": module.disable_adapters,
        "LoRA whose scale was changed from that of its configuration": any(
            not _has_own_scale(module, adapter) for adapter in module.lora_A
        ),
        "LoRA of a weight that another module shares (tie_word_embeddings)": owners[id(weight)] > 1,
    }
    return next((f"{fault}; {_INSTEAD}" for fault, found in faults.items() if found), "")


def _has_own_scale(module: Any, adapter: str) -> bool:
    rank, alpha = module.r[adapter], module.lora_alpha[adapter]
    return module.scaling[adapter] in (alpha / rank, alpha / math.sqrt(rank))


def _from_peft(module: nn.Module) -> bool:
    return any(one.__module__.partition(".")[0] == "peft" for one in type(module).__mro__)


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def require_servable(model: nn.Module, adapter: str) -> None:
    """Check that an engine can load an adapter, and that nothing outside it is trained.

    Raises:
        ValueError: there is no such adapter; it is not supported; another adapter is active; or
            parameters that belong to no adapter are trained too.
    """
    adapter_config(model, adapter)
    refuse_unsupported_adapters(model)
    for name, layer in lora_layers(model):
        if adapts_experts(layer):
            raise ValueError(
                f"the adapter of {name} is of experts, which engines don't receive alone: publish "
                "merged weights, or leave target_parameters out"
            )
        others = set(layer.active_adapters) & set(layer.lora_A) - {adapter}
        if others:
            raise ValueError(
                f"{name} also applies the adapter {min(others)!r}, and engines would apply only "
                f"{adapter!r}: publish merged weights, or activate only {adapter!r}"
            )
    trained = [n for n, p in model.named_parameters() if p.requires_grad and not is_factor(n)]
    if trained:
        raise ValueError(
            f"{trained[0]} is trained too ({len(trained)} parameters outside adapters are), but an "
            "adapter alone would not update them: publish merged weights, or freeze the parameters"
        )
