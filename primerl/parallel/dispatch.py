"""Sending tokens to the ranks that hold their experts, and what the experts make of them back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from primerl.parallel.collectives import all_to_all

Compute = Callable[[Tensor, Tensor], Tensor]
"""What this rank's experts make of tokens ``[n, h]``, sorted by expert, ``counts[e]`` of each."""

Dispatch = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""``(hidden[t, h], indices[t, k], weights[t, k], compute) -> [t, h]``: each token by its k experts,
wherever they are, and their outputs added by weight."""


@attrs.frozen(eq=False)
class AllToAll:
    """A ``Dispatch`` by collectives of ``torch.distributed``, on any device and backend.

        y_t = sum_k  weights[t, k] * expert_{indices[t, k]}(hidden_t)

    Each choice of an expert travels by itself. Ranks may send any number of tokens anywhere, also
    none. The host waits for the device once, for the counts.
    """

    experts: int
    """Of all ranks; rank r of the group has the r-th equal part of them."""
    group: dist.ProcessGroup | None = None
    """None: this rank has them all."""

    def __call__(
        self,
        hidden: Float[Tensor, "t h"],
        indices: Int[Tensor, "t k"],
        weights: Float[Tensor, "t k"],
        compute: Compute,
    ) -> Float[Tensor, "t h"]:
        """Send tokens, compute and bring back what comes of it."""
        way = dispatch(hidden, indices, experts=self.experts, group=self.group)
        return combine(compute(way.tokens, way.counts), way, weights, group=self.group)


class Dispatched(NamedTuple):
    """Tokens on the rank of their experts, and the way back."""

    tokens: Float[Tensor, "n h"]
    """Sorted by expert."""
    counts: Int[Tensor, " experts"]
    """Of each expert of this rank."""
    order: Tensor
    """Where each sent token was in ``[t * k]`` choices, sorted by expert."""
    arrival: Tensor | None
    """Where each token of ``tokens`` was when it arrived: by rank, then by expert."""
    sent: list[int]
    received: list[int]
    """Tokens to and from each rank of the group."""


def dispatch(
    hidden: Float[Tensor, "t h"],
    indices: Int[Tensor, "t k"],
    *,
    experts: int,
    group: dist.ProcessGroup | None = None,
) -> Dispatched:
    """Send each token to its k experts, which lie in equal numbers on the ranks of ``group``."""
    chosen = indices.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=experts)
    tokens = hidden[order // indices.shape[1]]
    if group is None:
        return Dispatched(tokens, counts, order, None, [], [])
    ranks = dist.get_world_size(group)
    equal = [counts.numel() // ranks] * ranks
    theirs = all_to_all(counts, equal, equal, group)
    by_rank = torch.stack([counts.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1)])
    sent, received = by_rank.tolist()  # the host waits here, once
    arrived = exchange(tokens, sent, received, group)
    theirs = theirs.view(ranks, -1)
    local = torch.arange(theirs.shape[1], device=theirs.device).repeat(ranks)
    expert = torch.repeat_interleave(local, theirs.reshape(-1), output_size=sum(received))
    arrival = torch.argsort(expert, stable=True)
    return Dispatched(arrived[arrival], theirs.sum(0), order, arrival, sent, received)


def combine(
    outputs: Float[Tensor, "n h"],
    way: Dispatched,
    weights: Float[Tensor, "t k"],
    *,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "t h"]:
    """Bring the experts' outputs back and add each token's k, by weight.

    y_t = sum_k  weights[t, k] * expert_{indices[t, k]}(hidden_t)
    """
    if way.arrival is not None and group is not None:
        outputs = torch.zeros_like(outputs).index_copy(0, way.arrival, outputs)
        outputs = exchange(outputs, way.received, way.sent, group)
    chosen = torch.zeros_like(outputs).index_copy(0, way.order, outputs)
    chosen = chosen.view(*weights.shape, outputs.shape[1])
    return (chosen * weights.unsqueeze(-1).to(chosen.dtype)).sum(1)


def exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of rows: ``sent[r]`` of them to rank r, ``received[r]`` from it, with gradient."""
    exchanged: Tensor = _Exchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = (received, sent, group)
        return all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, *ctx.way), None, None, None
