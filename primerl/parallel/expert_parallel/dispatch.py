"""Token dispatch: send tokens to the ranks of their experts, and combine the experts' outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from primerl._common.forward_passes import has_values
from primerl.parallel.collectives import all_to_all

Compute = Callable[[Tensor, Tensor], Tensor]
"""``(tokens[n, h], counts[e]) -> [n, h]``: applies this rank's experts to tokens sorted by
expert."""

Dispatch = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""``(hidden[t, h], indices[t, k], weights[t, k], compute) -> [t, h]``: computes the weighted sum of
each token's k experts, on whichever ranks they are."""


@attrs.frozen(eq=False)
class AllToAll:
    """``Dispatch`` with ``torch.distributed`` collectives, on any device and backend.

        y_t = sum_k  weights[t, k] * expert_{indices[t, k]}(hidden_t)

    A token is sent once for each of its k experts. A rank may send any number of tokens to another,
    including none. The host waits for the device once, to read the counts.
    """

    experts: int
    """Total number of experts; rank r of the group holds the r-th of equal contiguous parts."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the experts; None if this rank holds all of them."""

    def __call__(
        self,
        hidden: Float[Tensor, "t h"],
        indices: Int[Tensor, "t k"],
        weights: Float[Tensor, "t k"],
        compute: Compute,
    ) -> Float[Tensor, "t h"]:
        """Dispatch tokens, compute, and combine the experts' outputs."""
        sent = dispatch(hidden, indices, experts=self.experts, group=self.group)
        return combine(compute(sent.tokens, sent.counts), sent, weights, group=self.group)


class Dispatched(NamedTuple):
    """Tokens received by this rank's experts, and what ``combine`` needs to return outputs."""

    tokens: Float[Tensor, "n h"]
    """Received tokens, sorted by expert."""
    counts: Int[Tensor, " experts"]
    """Number of tokens for each expert of this rank."""
    order: Tensor
    """Permutation that sorts the choices ``[t * k]`` by expert."""
    arrival: Tensor | None
    """Permutation that sorts received tokens, which arrive by rank and then by expert, by expert;
    None without a group."""
    sent: list[int]
    """Number of tokens sent to each rank of the group."""
    received: list[int]
    """Number of tokens received from each rank of the group."""


def dispatch(
    hidden: Float[Tensor, "t h"],
    indices: Int[Tensor, "t k"],
    *,
    experts: int,
    group: dist.ProcessGroup | None = None,
) -> Dispatched:
    """Send each token to its k experts, which are divided equally among the ranks of ``group``."""
    chosen = indices.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = count_choices(chosen, experts)
    tokens = hidden[order // indices.shape[1]]
    if group is None:
        return Dispatched(tokens, counts, order, None, [], [])
    ranks = dist.get_world_size(group)
    equal = [counts.numel() // ranks] * ranks
    theirs = all_to_all(counts, equal, equal, group)
    by_rank = torch.stack([counts.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1)])
    if not has_values(by_rank):  # assume that each rank is chosen equally often
        sent = received = [len(part) for part in order.tensor_split(ranks)]
    else:
        sent, received = by_rank.tolist()  # the only place where the host waits for the device
    arrived = exchange(tokens, sent, received, group)
    theirs = theirs.view(ranks, -1)
    local = torch.arange(theirs.shape[1], device=theirs.device).repeat(ranks)
    expert = torch.repeat_interleave(local, theirs.reshape(-1), output_size=sum(received))
    arrival = torch.argsort(expert, stable=True)
    return Dispatched(arrived[arrival], theirs.sum(0), order, arrival, sent, received)


def count_choices(chosen: Int[Tensor, " n"], experts: int) -> Int[Tensor, " experts"]:
    """Count how often each expert was chosen, without waiting for the GPU as ``bincount`` does."""
    counts = chosen.new_zeros(experts, dtype=torch.int64)
    return counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))


def combine(
    outputs: Float[Tensor, "n h"],
    dispatched: Dispatched,
    weights: Float[Tensor, "t k"],
    *,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "t h"]:
    """Send the experts' outputs back to their tokens, and return each token's weighted sum of k."""
    if dispatched.arrival is not None and group is not None:
        outputs = torch.zeros_like(outputs).index_copy(0, dispatched.arrival, outputs)
        outputs = exchange(outputs, dispatched.received, dispatched.sent, group)
    chosen = torch.zeros_like(outputs).index_copy(0, dispatched.order, outputs)
    chosen = chosen.view(*weights.shape, outputs.shape[1])
    return (chosen * weights.unsqueeze(-1).to(chosen.dtype)).sum(1)


def exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[r]`` rows to rank r and receive ``received[r]`` (differentiable all-to-all)."""
    exchanged: Tensor = _TokenExchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.reverse = (received, sent, group)
        return all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, *ctx.reverse), None, None, None
