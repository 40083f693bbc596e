"""Fully sharded data parallelism (FSDP2), with expert and context parallelism, for any model."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from primerl._common.adapters import refuse_virtual_tokens
from primerl._common.expert_modules import expert_modules
from primerl._common.ranks import local_part
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
    """Divide a model among the ranks of a mesh, in place, and return it.

    Experts are divided over ``mesh.ep`` ranks, attention over the ``mesh.cp`` ranks that share
    documents, and each parameter over the ``fsdp * cp`` ranks of a replica: each layer (an entry
    of the model's outermost ``nn.ModuleList``) is gathered while it computes, and what is around
    the layers with the whole model (``torch.distributed.fsdp.fully_shard``). Every rank starts
    from rank 0's values. Gradients are *summed* over ranks, not averaged: each rank's loss is
    already divided by the global number of trained tokens. Make the optimizer afterwards. In a
    world of one, the model is left as it is, but for ``dtype`` and ``matmul``.

    Args:
        model: on this rank's device, the same architecture on every rank. On the ``meta`` device:
            its parameters stay without values, for ``models.load_shards``.
        mesh: made by ``parallel.mesh``; all ranks as one replica by default.
        dtype: that layers compute in, such as ``torch.bfloat16``, while parameters keep theirs and
            gradients are added in float32; None computes in the parameters' dtype.
        dispatch: how tokens are sent to their experts: ``AllToAll``, or ``DeepEP`` on GPUs.
        matmul: multiplies rows sorted by expert with each expert's matrix, ``(x[n, i],
            weights[e, i, o], ends[e]) -> [n, o]``; ``torch.nn.functional.grouped_mm`` by default.
        context: the method of context parallel attention, where ``mesh.cp > 1``: ``"ulysses"``
            (ranks exchange rows for heads) or ``"gathered"`` (each gets all keys and values); None:
            ``"ulysses"`` where ``cp`` divides the number of query heads.

    Raises:
        ValueError: the model is sharded already, a layer shares a weight with a part outside it,
            parameters have different dtypes, the family cannot be divided this way, or the model
            has an adapter of prompt or prefix tuning.
    """
    mesh = mesh or make_mesh()
    refuse_virtual_tokens(model)
    refuse_unpackable(model)
    if dtype == next(model.parameters()).dtype:
        dtype = None
    if isinstance(model, FSDPModule):
        raise ValueError("the model is sharded already; call parallel.shard once")
    if mesh.parameters is not None:
        _require_one_dtype(model)
        _require_own_weights(model, list(_layers(model)))
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
            if module in experts:  # before their layer, whose sharding then skips them
                _shard_part(module, experts.pop(module), policy)
        _shard_part(part, whole, policy)
    return model


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every forward pass of a model that is not sharded compute in ``dtype``.

    Parameters and gradients keep theirs. By ``torch.autocast``, as sharding does by gathering
    parameters in ``dtype``: matrix products and attention are in 16 bits, reductions such as norms
    and softmax in 32.
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
    """The mesh over which parameters are sharded, and replicated if there are several replicas."""
    both = mesh.parameters if dimension == "shard" else mesh.experts
    assert both is not None
    return both["replicate", dimension] if mesh.replicate > 1 else both[dimension]


def _shard_part(part: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    ranks = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard:
        # Where ranks can't have equally many experts, shard each matrix.
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
            f"parameters have different dtypes ({found}); convert the model first, such as by "
            "model.float(), and pass shard(dtype=torch.bfloat16) to compute in another"
        )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The entries of the outermost module lists, by name: a layer may have a list of experts."""
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
