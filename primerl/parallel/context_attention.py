"""Attention over the rows of several ranks: entries of transformers' ``AttentionInterface``."""

import math
from typing import Any

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from primerl.attention.documents import Document, Layout
from primerl.attention.kernels import attend
from primerl.attention.packed import not_passed_on, refuse_other_attention
from primerl.parallel.collectives import all_gather, reduce_scatter
from primerl.parallel.dispatch import exchange


@attrs.frozen(eq=False)
class Work:
    """Which rows a rank attends for, where they are not only its own."""

    order: Tensor
    """This rank's rows, sorted by the rank that attends for them."""
    back: Tensor
    """The inverse of ``order``."""
    sent: list[int]
    received: list[int]
    """Rows to and from each rank, this one included."""


# No tuple, so that what passes it on, such as FSDP, does not walk through its documents.
@attrs.frozen(eq=False)
class SharedRows:
    """The rows of a forward pass, of all ranks: the model's argument ``documents``."""

    documents: tuple[Document, ...]
    """Of all ranks."""
    longest: int
    """Tokens of the longest of them."""
    group: dist.ProcessGroup
    layout: Layout
    """What this rank attends for."""
    work: Work | None = None
    """None: each rank attends for its own rows."""


def _ulysses(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    documents: SharedRows | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Each rank gets all rows of its share of the heads."""
    rows = checked_rows(module, query, key, attention_mask, documents, asked)
    ranks, length = dist.get_world_size(rows.group), query.shape[2]
    if query.shape[1] % ranks:
        raise ValueError(
            f"{type(module).__name__} has {query.shape[1]} query heads, which {ranks} ranks cannot "
            'have in equal numbers; use context="gathered"'
        )
    # As few copies as let each rank have the heads of its queries: one for each is enough.
    copies = ranks // math.gcd(ranks, key.shape[1])
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    even = [length] * ranks
    of_ranks = [_by_rank(x, ranks) for x in (query, key, value)]
    fused = torch.cat([x.flatten(2) for x in of_ranks], dim=-1).flatten(0, 1)
    q, k, v = _apart(exchange(fused, even, even, rows.group), [x.shape[2:] for x in of_ranks])
    attended = attend(q, k, v, rows.layout, scaling=scaling)
    returned = exchange(attended.flatten(1), even, even, rows.group)
    heads = returned.reshape(ranks, length, *attended.shape[1:])
    return heads.transpose(0, 1).flatten(1, 2).unsqueeze(0), None


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """``[1, heads, t, d]`` as ``[rank, t, heads of the rank, d]``."""
    _, heads, length, width = x.shape
    return x.reshape(ranks, heads // ranks, length, width).transpose(1, 2)


def _apart(fused: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """The tensors whose rows ``fused`` has side by side."""
    parts = torch.split(fused, [shape.numel() for shape in shapes], dim=1)
    return [part.reshape(len(part), *shape) for part, shape in zip(parts, shapes, strict=True)]


def _gathered(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    documents: SharedRows | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Each rank gets all keys and values, and queries of ranks that have too many."""
    rows = checked_rows(module, query, key, attention_mask, documents, asked)
    q, work = query[0].transpose(0, 1), rows.work
    k, v = gather_rows(key, value, rows.group)
    if work is None:
        return attend(q, k, v, rows.layout, scaling=scaling).unsqueeze(0), None
    q = exchange(q.index_select(0, work.order), work.sent, work.received, rows.group)
    attended = attend(q, k, v, rows.layout, scaling=scaling)
    returned = exchange(attended, work.received, work.sent, rows.group)
    return returned.index_select(0, work.back).unsqueeze(0), None


ATTENTION = {"ulysses": _ulysses, "gathered": _gathered}


def gather_rows(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Keys and values ``[rows of all ranks, heads, d]``; the gradients of all ranks are added."""
    own = [x[0].transpose(0, 1) for x in (key, value)]
    fused = torch.cat([x.flatten(1) for x in own], dim=1)
    every: Tensor = _AllGather.apply(fused, group)  # type: ignore[no-untyped-call]
    return _apart(every, [x.shape[1:] for x in own])


def checked_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    rows: SharedRows | None,
    asked: dict[str, Any],
) -> SharedRows:
    """The rows of the forward pass, once it is sure that attention can be computed over them."""
    if rows is None:
        raise ValueError(f"{not_passed_on(module)}, or was called without its model")
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError(
            "this model was divided by parallel.shard with cp > 1, which computes neither padding "
            "nor a cache of keys; call it with packed documents and use_cache=False"
        )
    if asked.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} drops attention weights (dropout={asked['dropout']}), which "
            "is not computed over several ranks; set the model's attention_dropout to 0"
        )
    refuse_other_attention(module, rows.longest, asked)
    return rows


class _AllGather(torch.autograd.Function):
    """The rows of all ranks; the gradients of all ranks are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        all_gather(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(
            gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:]
        )
        reduce_scatter(own, gradient.contiguous(), group=ctx.group)
        return own, None
