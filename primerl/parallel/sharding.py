"""Fully sharded data parallelism (FSDP2) for unmodified models."""

from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

M = TypeVar("M", bound=nn.Module)


def shard(model: M) -> M:
    """Shard a model's parameters over all ranks, in place, and return it.

    Each layer (an entry of the model's outermost ``nn.ModuleList``) is gathered while it computes,
    and what is around the layers with the whole model (``torch.distributed.fsdp.fully_shard``).
    Every rank starts from rank 0's values. Gradients are *summed* over ranks, not averaged: each
    rank's loss is already divided by the global number of trained tokens. Make the optimizer
    afterwards. In a world of one, the model is left as it is.

    Args:
        model: on this rank's device, the same architecture on every rank.

    Raises:
        ValueError: the model is sharded already, or a layer shares a weight with another part, from
            which sharding would part it.
    """
    if not dist.is_initialized():
        return model
    if isinstance(model, FSDPModule):
        raise ValueError("the model is sharded already; call parallel.shard once")
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)
    layers = _layers(model)
    _require_own_weights(model, list(layers))
    mesh = init_device_mesh(tensors[0].device.type, (dist.get_world_size(),))
    parts: list[nn.Module] = [*layers.values(), model]
    for part in parts:
        sharded = fully_shard(part, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
    return model


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The entries of the outermost module lists, by name: experts may be a list in a layer."""
    lists = {n: part for n, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    return {
        f"{name}.{index}": layer
        for name, part in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
        for index, layer in enumerate(part)
    }


def _require_own_weights(model: nn.Module, layers: list[str]) -> None:
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), "")
        if owners.setdefault(id(parameter), owner) != owner:
            raise ValueError(
                f"{name} is shared between a layer and another part of the model; sharding would "
                "part the two. Only weights outside the layers, or within one, may be shared"
            )
