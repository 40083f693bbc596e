"""Gradient clipping across device meshes, and freezing of sparse-attention indexers."""

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from primerl._common.ranks import local_part


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Float[Tensor, ""]:
    """Clip gradients in place, so that their norm over all ranks is at most ``max_norm``.

        norm = (sum_i |g_i|^2)^(1/2),    g_i <- g_i min(1, max_norm / norm)

    Returns the norm before clipping, in at least float32 and on the gradients' device. It is the
    same on every rank, and the host does not wait for the device. If it is infinite or NaN,
    gradients become 0 or NaN, and ``UpdateGuard`` decides what happens next. Each element counts
    once, however many ranks hold it. Call it on all ranks; parameters without a gradient are
    skipped.

        norm = parallel.clip_gradients(model.parameters(), 1.0)

    Args:
        parameters: ``DTensor`` parameters, which may be on different meshes, or plain tensors,
            whose gradients must be the same on every rank.
        max_norm: the largest norm, above 0; ``math.inf`` only computes the norm.

    Raises:
        ValueError: ``max_norm`` is not above 0, a mesh does not include all ranks, or a gradient
            is not reduced over its ranks.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, expected a number above 0")
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Depends on parameters, not gradients: a rank without gradients must join the all-reduce too.
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        copies = _copies(gradient) if sharded else 1
        by_copies.setdefault(copies, []).append(local_part(gradient))
    device = local_part(parameters[0]).device if parameters else torch.device("cpu")
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    square = torch.zeros((), dtype=dtype, device=device)
    for copies, alike in by_copies.items():
        norms = torch._foreach_norm(alike, 2, dtype=dtype)
        square += torch.stack([norm.to(device) for norm in norms]).square().sum() / copies
    if sharded:
        dist.all_reduce(square)
    total = square.sqrt()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for alike in by_copies.values():
        torch._foreach_mul_(alike, scale)
    return total


def _copies(gradient: Tensor) -> int:
    """Number of ranks that hold each element of a gradient."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    mesh = gradient.device_mesh
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"a gradient is on a mesh of {mesh.size()} ranks, but there are "
            f"{dist.get_world_size()}; expected meshes of all ranks, as parallel.shard uses them"
        )
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ValueError(
            f"a gradient is not reduced over its ranks (placements {gradient.placements}); "
            "redistribute it before clipping"
        )
    copies = 1
    for dimension, placement in enumerate(gradient.placements):
        copies *= mesh.size(dimension) if isinstance(placement, Replicate) else 1
    return copies


def freeze_indexer(model: nn.Module) -> list[str]:
    """Freeze the indexers of sparse attention, and return the names of their parameters.

    An indexer's choice of keys is not differentiable, so a policy loss doesn't train its
    parameters. With zero gradients, as after ``zero_grad(set_to_none=False)``, weight decay would
    still shrink them. Frozen (``requires_grad=False``), they stay bitwise the same, and are still
    published and saved. Call it before or after ``shard``, but before creating the optimizer, and
    give the optimizer only parameters that require a gradient.

    Raises:
        ValueError: the model has no indexer.
    """
    names = [
        f"{name}.{parameter_name}"
        for name, module in model.named_modules()
        if name.split(".")[-1] == "indexer"
        for parameter_name, _ in module.named_parameters()
    ]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no indexer to freeze: none of its modules is named indexer"
        )
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names
