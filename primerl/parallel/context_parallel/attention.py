"""Context-parallel attention functions, for transformers' ``AttentionInterface``."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl.attention.documents import Document, Layout, spans_within
from primerl.attention.kernels import attend
from primerl.attention.packed import (
    attention_options,
    not_passed_on,
    read_limits,
    refuse_other_attention,
    scaled_by_position,
)
from primerl.attention.sparse import attend_sparsely, attend_to_chosen
from primerl.parallel.collectives import gather_rows_of_all, reduce_scatter
from primerl.parallel.context_parallel.mixing import DocumentExchange
from primerl.parallel.expert_parallel.dispatch import exchange


@attrs.frozen(eq=False)
class QueryExchange:
    """The exchange of queries between ranks that balances their attention work."""

    order: Tensor
    """Permutation that sorts this rank's rows by the rank that computes their attention."""
    inverse: Tensor
    """The inverse permutation of ``order``."""
    sent: list[int]
    """Number of rows sent to each rank, including this rank itself."""
    received: list[int]
    """Number of rows received from each rank, including this rank itself."""


# Not a tuple, so that FSDP and other wrappers pass it on as a single value.
@attrs.frozen(eq=False)
class SharedRows:
    """Documents of a forward pass on several ranks: the model's argument ``documents``."""

    documents: tuple[Document, ...]
    """The documents on all ranks of ``group``."""
    longest: int
    """Number of tokens in the longest document."""
    group: dist.ProcessGroup
    """The ranks that share documents."""
    layout: Layout
    """Layout of the queries whose attention this rank computes."""
    own: Callable[[], Layout]
    """Returns the layout of the rows that this rank holds."""
    by_document: Callable[[], DocumentExchange]
    """Returns the exchange after which each rank has whole documents."""
    exchange: QueryExchange | None = None
    """The exchange of queries; None if each rank computes the attention of its own rows."""


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
    """Ulysses attention: each rank computes its share of the heads over all rows."""
    rows, options = _rows_and_options(module, query, key, attention_mask, documents, asked)
    ranks, length = dist.get_world_size(rows.group), query.shape[2]
    query = scaled_by_position(module, query, rows.own)
    if query.shape[1] % ranks:
        raise ValueError(
            f"{type(module).__name__} has {query.shape[1]} query heads, which cannot be divided "
            f'equally among {ranks} ranks; use context="gathered"'
        )
    # The fewest copies of key heads such that each rank gets the key heads of its query heads.
    copies = ranks // math.gcd(ranks, key.shape[1])
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    even = [length] * ranks
    by_rank = [_by_rank(x, ranks) for x in (query, key, value)]
    fused = torch.cat([x.flatten(2) for x in by_rank], dim=-1).flatten(0, 1)
    q, k, v = _split(exchange(fused, even, even, rows.group), [x.shape[2:] for x in by_rank])
    if (sinks := options["sinks"]) is not None:
        options["sinks"] = sinks.chunk(ranks)[dist.get_rank(rows.group)]
    attended = attend(q, k, v, rows.layout, scaling=scaling, **options)
    returned = exchange(attended.flatten(1), even, even, rows.group)
    heads = returned.reshape(ranks, length, *attended.shape[1:])
    return heads.transpose(0, 1).flatten(1, 2).unsqueeze(0), None


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Reshape ``[1, heads, t, d]`` to ``[rank, t, heads of the rank, d]``."""
    _, heads, length, width = x.shape
    return x.reshape(ranks, heads // ranks, length, width).transpose(1, 2)


def _split(fused: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Split the columns of ``fused`` into tensors whose rows have the given shapes."""
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
    """Attention with gathered keys: each rank has all keys and values, and some of the queries.

    Ranks with more than the mean work send some of their queries to other ranks.
    """
    rows, options = _rows_and_options(module, query, key, attention_mask, documents, asked)
    query = scaled_by_position(module, query, rows.own)
    q, moved = query[0].transpose(0, 1), rows.exchange
    k, v = gather_rows(key, value, rows.group)
    if moved is None:
        return attend(q, k, v, rows.layout, scaling=scaling, **options).unsqueeze(0), None
    q = exchange(q.index_select(0, moved.order), moved.sent, moved.received, rows.group)
    attended = attend(q, k, v, rows.layout, scaling=scaling, **options)
    returned = exchange(attended, moved.received, moved.sent, rows.group)
    return returned.index_select(0, moved.inverse).unsqueeze(0), None


ATTENTION = {"ulysses": _ulysses, "gathered": _gathered}


def gather_rows(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """All-gather keys and values as ``[rows of all ranks, heads, d]``.

    The backward pass reduce-scatters their gradients.
    """
    own = [x[0].transpose(0, 1) for x in (key, value)]
    fused = torch.cat([x.flatten(1) for x in own], dim=1)
    every: Tensor = _AllGather.apply(fused, group)  # type: ignore[no-untyped-call]
    return _split(every, [x.shape[1:] for x in own])


def share_sparse_context(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a model's sparse attention context parallel over the ranks of a group.

    Each rank's indexer chooses keys for the rank's own rows, from the keys of all ranks.
    """

    def gather(rows: Tensor) -> tuple[Tensor, int]:
        return gather_rows_of_all(rows, group), dist.get_rank(group)

    attend_sparsely(model, gather=gather, attention=_sparse)


def _sparse(
    module: Any,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b _ s dk"],
    value: Float[Tensor, "b _ s l"],
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    indices: Int[Tensor, "b t k"],
    scaling: float,
    documents: SharedRows | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Sparse attention: each rank gathers all latents, and attends for its own rows."""
    rows = _checked_rows(module, query, key, documents, asked)
    refuse_other_attention(module, rows.longest, asked)
    q = query[0].transpose(0, 1)
    latent, _ = gather_rows(key, value[..., :0], rows.group)  # keys begin with the values
    spans = spans_within(rows.documents, dist.get_rank(rows.group) * len(q), len(q))
    attended = attend_to_chosen(
        *(module, q, latent.squeeze(1), rows.layout, spans, indices[0]), scaling=scaling
    )
    return attended.unsqueeze(0), None


def _rows_and_options(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    rows: SharedRows | None,
    asked: dict[str, Any],
) -> tuple[SharedRows, dict[str, Any]]:
    """Return ``rows``, and the arguments of ``attend`` for what the model requests."""
    rows = _checked_rows(module, query, key, rows, asked)
    limits = read_limits(module, attention_mask)
    return rows, attention_options(module, rows.longest, limits, asked)


def _checked_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    rows: SharedRows | None,
    asked: dict[str, Any],
) -> SharedRows:
    """Return ``rows``, after checking that this attention supports what the model requests."""
    if rows is None:
        raise ValueError(f"{not_passed_on(module)}, or was called without its model")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            "this model was sharded with cp > 1, which does not support a key-value cache; call it "
            "with packed documents and use_cache=False"
        )
    if asked.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} uses attention dropout (dropout={asked['dropout']}), which "
            "context parallelism does not support; set the model's attention_dropout to 0"
        )
    return rows


class _AllGather(torch.autograd.Function):
    """All-gather of rows; the backward pass reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows_of_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(
            gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:]
        )
        reduce_scatter(own, gradient.contiguous(), group=ctx.group)
        return own, None
