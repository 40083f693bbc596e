"""Low-rank adapters (LoRA) of a model: the layers to adapt, and saving an adapter alone."""

import os
from collections import Counter

from torch import nn

from primerl._common.adapters import adapter_config, adapter_tensors, write_adapter
from primerl._common.files import saved_folder
from primerl._common.optional import require
from primerl._common.ranks import on_first_rank_gathering
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl.attention.admission import named_mixers

# ``peft`` 0.21 takes these names to mean the routed experts and the router in many mixtures, even
# where a shared expert, a dense MLP or an attention layer has them.
_NAMES_OF_EXPERTS = {"gate", "router", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def adapter_targets(model: nn.Module) -> list[str]:
    """Return the names of the linear layers to adapt: ``target_modules`` of ``peft.LoraConfig``.

    These are all linear layers except the head, layers that share their weight, and two projections
    of state-space layers, of the time steps and of the outputs, whose weights fused kernels read
    past an adapter. In a mixture of experts, only layers outside the MLPs are included: there,
    ``peft`` takes the names of shared experts and dense MLPs to mean the routed experts. To adapt
    the routed experts too, pass their stacked matrices as ``target_parameters``.

    Args:
        model: a ``transformers`` model without adapters, before sharding.

    Raises:
        ValueError: the model has no such layer.
    """
    conv1d = require("transformers.pytorch_utils", extra="transformers").Conv1D
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    owners = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    left_out = _parts_of_mixture(model)
    read_past = {
        f"{name}.{projection}"
        for name, part in model.named_modules()
        if hasattr(part, "A_log") and hasattr(part, "in_proj")  # a state-space layer
        for projection in ("dt_proj", "out_proj")
    }
    found = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, conv1d))
        and layer is not head
        and owners[id(layer.weight)] == 1
        and not hasattr(layer, "n_groups")  # of DeepSeek-V4; an adapter would ignore groups
        and left_out.isdisjoint(name.split("."))
        and name not in read_past
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer to adapt, except its head")
    return found


def _parts_of_mixture(model: nn.Module) -> set[str]:
    """Return the parts of names that layers have in a mixture's MLPs; empty for a dense model."""
    of_mixers = {id(p) for _, mixer in named_mixers(model) for p in mixer.parameters()}
    stacks = {
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3
        and not name.endswith(".weight")  # of a convolution
        and id(parameter) not in of_mixers
    }
    if not stacks:
        return set()
    # "mlp" of model.layers.3.mlp.experts, or "experts" of model.layers.3.experts; all layers of
    # Nemotron-H have a part "mixer".
    parts = {
        next(part for part in stack.split(".")[-2:] if not part.isdigit() and part != "mixer")
        for stack in stacks
    }
    return parts | _NAMES_OF_EXPERTS


def save_adapters(
    model: nn.Module, folder: str | os.PathLike[str] | None, *, adapter: str = "default"
) -> None:
    """Write a model's adapter as a ``peft`` folder, which vLLM can load too, atomically.

    All ranks call this, because a sharded model is gathered; rank 0 writes. Parameters that are
    trained beside the adapter, such as norms, are written too: ``peft`` loads them, but vLLM
    refuses a folder that has them.

    Args:
        model: a model with adapters from ``peft.inject_adapter_in_model``, sharded or not.
        folder: the folder to write; may be None on ranks other than 0.
        adapter: the adapter's name.

    Raises:
        ValueError: the model has no such adapter, or adapters other than plain LoRA; rank 0 has
            no folder, or the folder exists but is not a saved adapter.
        RuntimeError: on the other ranks, if rank 0 could not write.
    """
    config = adapter_config(model, adapter)
    refuse_unsupported_adapters(model)
    tensors = adapter_tensors(model, adapter)

    def write() -> None:
        if folder is None:
            raise ValueError("folder is None; rank 0 writes the adapter, so pass it a path")
        with saved_folder(folder, marker="adapter_config.json") as partial:
            write_adapter(partial, config, dict(tensors))

    on_first_rank_gathering(write, tensors)
