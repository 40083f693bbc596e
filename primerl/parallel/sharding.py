"""Sharding of a model by FSDP2, combined with expert and context parallelism."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from primerl._common.expert_modules import expert_modules
from primerl._common.ranks import local_part, require_group
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl._common.waiting import wait_for_all
from primerl.attention.admission import refuse_unpackable
from primerl.parallel.context_parallel.sharing import share_context
from primerl.parallel.device_mesh import Mesh
from primerl.parallel.device_mesh import mesh as make_mesh
from primerl.parallel.expert_parallel.dispatch import AllToAll, Dispatch
from primerl.parallel.expert_parallel.experts import GroupedMatmul, divide_experts

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype | None = None,
    dispatch: Callable[[int, dist.ProcessGroup | None], Dispatch] = AllToAll,
    matmul: GroupedMatmul | None = None,
    context: str | None = None,
) -> M:
    """Shard a model in place over the ranks of a mesh, and return it.

    Experts are divided over ``mesh.ep`` ranks, attention over the ``mesh.cp`` ranks that share
    documents, and every parameter over the ``fsdp * cp`` ranks of a replica
    (``torch.distributed.fsdp.fully_shard``). Each layer (an entry of the model's outermost
    ``nn.ModuleList``) is gathered while it computes; parameters outside the layers are gathered
    with the whole model. All ranks start from rank 0's values. Gradients are *summed* over ranks,
    not averaged, because each rank's loss is already divided by the global number of trained
    tokens. Create the optimizer afterwards. On one rank, only ``dtype`` and ``matmul`` have an
    effect.

    Args:
        model: the model, on this rank's device, with the same architecture on every rank. On the
            ``meta`` device, its parameters stay without values until ``models.load_shards``.
        mesh: from ``parallel.mesh``; by default, all ranks form one replica.
        dtype: the dtype that layers compute in, such as ``torch.bfloat16``. Parameters keep their
            dtype and gradients are reduced in float32. None computes in the parameters' dtype.
        dispatch: how tokens are sent to their experts: ``AllToAll``, or ``DeepEP`` on GPUs.
        matmul: multiplies rows sorted by expert with each expert's matrix, ``(x[n, i],
            weights[e, i, o], ends[e]) -> [n, o]``; ``torch.nn.functional.grouped_mm`` by default.
        context: method of context-parallel attention, if ``mesh.cp > 1``: ``"ulysses"`` (each rank
            computes some heads over all rows) or ``"gathered"`` (each rank gathers all keys and
            values). None uses ``"ulysses"`` if ``cp`` divides the number of query heads.

    Raises:
        RuntimeError: torchrun started several ranks, but there is no process group.
        ValueError: the model is already sharded, a layer shares a weight with a module outside it,
            parameters have different dtypes, the model family does not support this division, or
            the model has adapters that could not be saved or published: anything but plain LoRA.
    """
    require_group()
    mesh = mesh or make_mesh()
    refuse_unsupported_adapters(model)
    refuse_unpackable(model)
    if dtype == next(model.parameters()).dtype:
        dtype = None
    if isinstance(model, FSDPModule):
        raise ValueError("the model is already sharded; call parallel.shard once")
    if mesh.parameters is not None:
        _require_one_dtype(model)
        _require_own_weights(model, list(_layers(model)))
        wait_for_all("the model of all ranks")
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), src=0)
    if mesh.cp > 1:
        share_context(model, mesh, method=context)
    experts: dict[nn.Module, DeviceMesh] = {}
    if mesh.experts is not None and (mesh.ep > 1 or matmul is not None):
        divide_experts(model, mesh.experts["expert"], dispatch=dispatch, matmul=matmul)
        experts = dict.fromkeys(expert_modules(model).values(), _replicated(mesh, "expert_shard"))
    if mesh.parameters is None:
        if matmul is not None and mesh.experts is None:
            divide_experts(model, matmul=matmul)
        if dtype is not None:
            _compute_in(model, dtype)
        return model
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    whole = _replicated(mesh, "shard")
    parts: list[nn.Module] = [*_layers(model).values(), model]
    for part in parts:
        for module in part.modules():
            if module in experts:  # before their layer, so that sharding the layer skips them
                _shard_part(module, experts.pop(module), policy)
        _shard_part(part, whole, policy)
    return model


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Run every forward pass of an unsharded model under ``torch.autocast`` to ``dtype``.

    Parameters and gradients keep their dtype. Matrix products and attention are computed in 16
    bits, and reductions such as norms and softmax in 32. A sharded model needs no autocast, because
    its parameters are gathered in ``dtype``.
    """
    entered: list[ExitStack] = []

    def enter(module: nn.Module, *_: Any) -> None:
        device = next(module.parameters()).device.type
        stack = ExitStack()
        stack.enter_context(torch.autocast(device, dtype))
        entered.append(stack)

    def leave(*_: Any) -> None:
        entered.pop().close()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _replicated(mesh: Mesh, dimension: str) -> DeviceMesh:
    """The mesh of a sharded dimension, with the replicate dimension if there are replicas."""
    both = mesh.parameters if dimension == "shard" else mesh.experts
    assert both is not None
    return both["replicate", dimension] if mesh.replicate > 1 else both[dimension]


def _shard_part(part: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    ranks = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard:
        # If the ranks can't hold equal numbers of experts, shard each matrix instead.
        sizes = local_part(parameter).shape if isinstance(parameter, DTensor) else ()
        equal = (axis for axis, size in enumerate(sizes) if size % ranks == 0)
        return Shard(next(equal, 0))

    sharded = fully_shard(part, mesh=mesh, mp_policy=policy, shard_placement_fn=place)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _require_one_dtype(model: nn.Module) -> None:
    by_dtype: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            by_dtype.setdefault(parameter.dtype, name)
    if len(by_dtype) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        raise ValueError(
            f"parameters have different dtypes ({found}); convert the model first, for example by "
            "model.float(), and pass shard(dtype=torch.bfloat16) to compute in another dtype"
        )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The model's layers by name: entries of module lists that are not inside another list."""
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
                f"{name} is shared between a layer and another part of the model, so sharding "
                "would separate the two. Only weights outside all layers, or within one layer, may "
                "be shared"
            )
