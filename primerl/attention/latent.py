"""Attention of each query to its chosen keys, in time and memory proportional to their number.

Keys are latents (arXiv:2405.04434): one vector for all heads, whose first part is also the value.

    y_i = sum_j softmax_j(scaling q_i . k_j) k_j[:width]    over the keys j that query i chose

Two forms compute it. On a GPU, a Triton kernel does (``latent_triton``). The torch form gathers the
keys of some queries at a time, so that each query needs only products of small matrices, ``[heads,
d]`` by ``[d, chosen]``. Its backward pass gathers them again, and adds the gradients of keys into
the latents by ``index_add_``.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primerl._common.forward_passes import has_values
from primerl._common.triton_failure import failure_of_triton

# Numbers that the torch form gathers at a time on a CPU: 1 MB in float32, which fits into the cache
# of a core. It took 1.7 times as long with 16 MB.
MAX_GATHERED = 2**18
# The same on a GPU, where it takes many queries at a time to fill the device.
MAX_GATHERED_ON_GPU = 2**27


def attend_to_latents(
    query: Float[Tensor, "t heads d"],
    latent: Float[Tensor, "s d"],
    chosen: Int[Tensor, "t k"],
    starts: Int[Tensor, " t"],
    table: Int[Tensor, " n"],
    *,
    width: int,
    scaling: float,
) -> Float[Tensor, "t heads width"]:
    """Compute the attention of each query to the latents that were chosen for it.

    Args:
        query: queries in the space of the latents.
        latent: keys; the first ``width`` entries of each are also its value.
        chosen: int32, for each query the positions of its keys in its document, then -1. Each query
            has at least one key.
        starts: int32, where in ``table`` the document of each query begins.
        table: int32, the rows of the keys of all documents, in order.
        width: number of entries of a value.
        scaling: the factor that multiplies the scores.
    """
    attended: Tensor = _attend(query, latent, chosen, starts, table, width, scaling)[0]
    return attended


def reason_against_triton(query: Tensor, width: int) -> str | None:
    """Return why Triton's kernel can't be used for a query, or None if it can."""
    if not query.is_cuda:
        return f"it runs on CUDA devices, not on {query.device.type}"
    if query.dtype != torch.bfloat16:  # gradients of scores can exceed the range of float16
        return f"it computes in bfloat16, not in {query.dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return "it adds the gradients of keys in no fixed order, against the deterministic mode"
    for size in (width, query.shape[2] - width):
        if size < 16 or size & (size - 1):
            return f"its blocks have powers of 2 from 16 on as widths, not {size}"
    return _failure_of_triton(query.device) if has_values(query) else None


@functools.cache
def _failure_of_triton(device: torch.device) -> str | None:
    consequence = "Attention to chosen latents runs without its kernel, more slowly."
    return failure_of_triton(_run_once, device, consequence=consequence)


def _run_once(device: torch.device) -> None:
    """Run the kernel of the forward pass for one query and one key, of the smallest sizes."""
    from primerl.attention import latent_triton

    query = torch.zeros(1, 16, 32, device=device, dtype=torch.bfloat16)
    first = torch.zeros(1, device=device, dtype=torch.int32)
    outputs = _empty_outputs(query, 16)
    latent_triton.forward(query, query[:, 0], first.view(1, 1), first, first, 1.0, *outputs)


@torch.library.custom_op("primerl::attend_to_latents", mutates_args=())
def _attend(
    q: Tensor,
    latent: Tensor,
    chosen: Tensor,
    starts: Tensor,
    table: Tensor,
    width: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[t, heads, width]``, and the logsumexp of the scores ``[t, heads]``."""
    out, logsumexp = _empty_outputs(q, width)
    if reason_against_triton(q, width) is None:
        from primerl.attention import latent_triton

        latent_triton.forward(q, latent, chosen, starts, table, scaling, out, logsumexp)
        return out, logsumexp
    for rows, keys, missing in _blocks(chosen, starts, table, latent):
        gathered = _gather(latent, keys)
        scores = _scores(q[rows], gathered, missing, scaling)
        logsumexp[rows] = scores.logsumexp(-1)
        weights = (scores - logsumexp[rows].unsqueeze(-1)).exp_()
        out[rows] = torch.bmm(weights, gathered[..., :width]).to(q.dtype)
    return out, logsumexp


@torch.library.custom_op("primerl::attend_to_latents_backward", mutates_args=())
def _gradients(
    gradient: Tensor,
    q: Tensor,
    latent: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    chosen: Tensor,
    starts: Tensor,
    table: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    width = out.shape[2]
    grad_q = _empty_gradient(q)
    grad_latent = latent.new_zeros(latent.shape, dtype=logsumexp.dtype)
    shifts = (gradient.to(logsumexp.dtype) * out).sum(-1)
    if reason_against_triton(q, width) is None:
        from primerl.attention import latent_triton

        latent_triton.backward(
            *(gradient, q, latent, logsumexp, shifts, chosen, starts, table),
            *(scaling, grad_q, grad_latent),
        )
        return grad_q, grad_latent.to(latent.dtype)
    for rows, keys, missing in _blocks(chosen, starts, table, latent):
        gathered = _gather(latent, keys)
        queries, upstream = (x[rows].to(gathered.dtype) for x in (q, gradient))
        weights = _scores(queries, gathered, missing, scaling)
        weights = weights.sub_(logsumexp[rows].unsqueeze(-1)).exp_()
        grad_scores = torch.bmm(upstream, gathered[..., :width].transpose(1, 2))
        grad_scores.sub_(shifts[rows].unsqueeze(-1)).mul_(weights).mul_(scaling)
        grad_q[rows] = torch.bmm(grad_scores, gathered).to(q.dtype)
        grad_keys = torch.bmm(grad_scores.transpose(1, 2), queries)
        grad_keys[..., :width] += torch.bmm(weights.transpose(1, 2), upstream)
        grad_latent.index_add_(0, keys.flatten(), grad_keys.flatten(0, 1))
    return grad_q, grad_latent.to(latent.dtype)


def _blocks(
    chosen: Tensor, starts: Tensor, table: Tensor, latent: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some queries at a time, the rows of their keys, and which of these are missing."""
    most = MAX_GATHERED if latent.device.type == "cpu" else MAX_GATHERED_ON_GPU
    at_once = max(1, most // (chosen.shape[1] * latent.shape[1]))
    for begin in range(0, len(chosen), at_once):
        rows = slice(begin, begin + at_once)
        positions = chosen[rows]
        positions = positions[:, : int((positions >= 0).sum(1).max())]
        keys = table[starts[rows].unsqueeze(1) + positions.clamp(min=0)]
        yield rows, keys, positions < 0


def _gather(latent: Tensor, keys: Tensor) -> Tensor:
    gathered = latent.index_select(0, keys.flatten()).view(*keys.shape, latent.shape[1])
    return gathered if latent.dtype == torch.float64 else gathered.float()


def _scores(queries: Tensor, gathered: Tensor, missing: Tensor, scaling: float) -> Tensor:
    scores = torch.bmm(queries.to(gathered.dtype), gathered.transpose(1, 2)).mul_(scaling)
    return scores.masked_fill_(missing.unsqueeze(1), -torch.inf)


def _empty_gradient(q: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)  # as the kernel writes it


def _empty_outputs(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:2], width), q.new_empty(q.shape[:2], dtype=wide)


@_attend.register_fake
def _(
    q: Tensor, _latent: Tensor, _chosen: Tensor, _s: Tensor, _t: Tensor, width: int, _scaling: float
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, width)


@_gradients.register_fake
def _(_gradient: Tensor, q: Tensor, latent: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_gradient(q), torch.empty_like(latent)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, latent, chosen, starts, table, _, ctx.scaling = inputs
    ctx.save_for_backward(q, latent, *output, chosen, starts, table)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors, ctx.scaling), *(None,) * 5


def _refuse_second_derivative(*_: Any) -> None:
    raise RuntimeError(
        "sparse attention has no second derivative; compute gradients without create_graph=True"
    )


_attend.register_autograd(_backward, setup_context=_save_inputs)
_gradients.register_autograd(_refuse_second_derivative)
