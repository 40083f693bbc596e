"""Triton kernels of attention to chosen latents; see ``latent`` for what they compute.

A program computes some heads of one query. All heads share the query's keys, so a step over
``KEYS`` keys gathers them once, ``[KEYS, width + rotated]``, and multiplies them with the queries
of all heads, ``[HEADS, width + rotated]``, on tensor cores. No two queries have the same keys, so
nothing is gained by a block of queries.

Sizes for GLM-5 (64 heads, latents of 512 + 64 numbers, 16 bits) on a GPU of 228 KB of shared memory
and 64 K registers per multiprocessor:

- Forward, 64 heads, 8 warps: the queries take 72 KB of shared memory, and a block of 32 keys 36 KB,
  twice, because the next block is fetched during the products. The sums ``[64, 512]`` in float32
  take 128 of a thread's 255 registers.
- Backward, 32 heads, 8 warps: the queries and the gradient of the output take 36 and 32 KB, a block
  of 32 keys 36 KB. The gradient of the queries, ``[32, 576]``, takes 72 registers of a thread. The
  gradient of the keys, ``[32, 512]``, takes 64 more. Atomic additions in float32 sum it over the
  queries that chose a key, in an order that varies, as do the last bits of the sum. Under
  ``torch.use_deterministic_algorithms``, the torch form computes it.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 32
"""Number of keys that a step gathers."""
FORWARD_HEADS, BACKWARD_HEADS = 64, 32
"""The maximum number of heads that a program computes; products need at least 16."""


# ``no_type_check``: the wrappers of runtime type checks lack the names of this module.
@triton.jit
@no_type_check
def _rows_of_keys(
    chosen: tl.tensor,
    starts: tl.tensor,
    table: tl.tensor,
    query: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the rows of some keys of a query, and whether they exist."""
    place = first + tl.arange(0, KEYS)
    position = tl.load(chosen + query * count + place, mask=place < count, other=-1)
    exists = position >= 0
    rows = tl.load(table + tl.load(starts + query) + position, mask=exists, other=0)
    return rows.to(tl.int64), exists


@triton.jit
@no_type_check
def _forward(
    q: tl.tensor,
    latent: tl.tensor,
    chosen: tl.tensor,
    starts: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    logsumexp: tl.tensor,
    scaling: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head[:, None] < heads
    column, rotated = tl.arange(0, WIDTH), WIDTH + tl.arange(0, ROTATED)
    row = (query * heads + head)[:, None]
    q_latent = tl.load(q + row * (WIDTH + ROTATED) + column, mask=valid, other=0.0)
    q_rotated = tl.load(q + row * (WIDTH + ROTATED) + rotated, mask=valid, other=0.0)
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDTH], tl.float32)
    for first in range(0, count, KEYS):
        rows, exists = _rows_of_keys(chosen, starts, table, query, first, count, KEYS)
        keys = latent + rows[:, None] * (WIDTH + ROTATED)
        k_latent = tl.load(keys + column, mask=exists[:, None], other=0.0)
        k_rotated = tl.load(keys + rotated, mask=exists[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision=PRECISION)
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision=PRECISION)
        scores = tl.where(exists[None, :], scores * scaling, -float("inf"))
        # The first block has a key, so this is finite from the first block on.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        kept = tl.exp(largest - new_largest)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None]
        sums = tl.dot(weights.to(k_latent.dtype), k_latent, sums, input_precision=PRECISION)
        largest = new_largest
    sums = sums / total[:, None]
    tl.store(out + row * WIDTH + column, sums.to(out.dtype.element_ty), mask=valid)
    tl.store(logsumexp + query * heads + head, largest + tl.log(total), mask=head < heads)


@triton.jit
@no_type_check
def _backward(
    gradient: tl.tensor,
    q: tl.tensor,
    latent: tl.tensor,
    logsumexp: tl.tensor,
    shifts: tl.tensor,
    chosen: tl.tensor,
    starts: tl.tensor,
    table: tl.tensor,
    grad_q: tl.tensor,
    grad_latent: tl.tensor,
    scaling: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head[:, None] < heads
    column, rotated = tl.arange(0, WIDTH), WIDTH + tl.arange(0, ROTATED)
    row = (query * heads + head)[:, None]
    q_latent = tl.load(q + row * (WIDTH + ROTATED) + column, mask=valid, other=0.0)
    q_rotated = tl.load(q + row * (WIDTH + ROTATED) + rotated, mask=valid, other=0.0)
    upstream = tl.load(gradient + row * WIDTH + column, mask=valid, other=0.0)
    # Heads that don't exist have queries and gradients of 0, and so contribute nothing.
    normalizer = tl.load(logsumexp + query * heads + head, mask=head < heads, other=0.0)
    shift = tl.load(shifts + query * heads + head, mask=head < heads, other=0.0)
    sums_latent = tl.zeros([HEADS, WIDTH], tl.float32)
    sums_rotated = tl.zeros([HEADS, ROTATED], tl.float32)
    for first in range(0, count, KEYS):
        rows, exists = _rows_of_keys(chosen, starts, table, query, first, count, KEYS)
        keys = latent + rows[:, None] * (WIDTH + ROTATED)
        k_latent = tl.load(keys + column, mask=exists[:, None], other=0.0)
        k_rotated = tl.load(keys + rotated, mask=exists[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision=PRECISION)
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision=PRECISION)
        weights = tl.exp(scores * scaling - normalizer[:, None])
        weights = tl.where(exists[None, :], weights, 0.0)
        grad_scores = tl.dot(upstream, tl.trans(k_latent), input_precision=PRECISION)
        grad_scores = (grad_scores - shift[:, None]) * weights * scaling
        narrow = grad_scores.to(k_latent.dtype)
        sums_latent = tl.dot(narrow, k_latent, sums_latent, input_precision=PRECISION)
        sums_rotated = tl.dot(narrow, k_rotated, sums_rotated, input_precision=PRECISION)
        of_keys = tl.dot(tl.trans(narrow), q_latent, input_precision=PRECISION)
        of_keys = tl.dot(
            tl.trans(weights.to(upstream.dtype)), upstream, of_keys, input_precision=PRECISION
        )
        into = grad_latent + rows[:, None] * (WIDTH + ROTATED)
        tl.atomic_add(into + column, of_keys, mask=exists[:, None], sem="relaxed")
        of_keys = tl.dot(tl.trans(narrow), q_rotated, input_precision=PRECISION)
        tl.atomic_add(into + rotated, of_keys, mask=exists[:, None], sem="relaxed")
    into = grad_q + row * (WIDTH + ROTATED)
    tl.store(into + column, sums_latent.to(grad_q.dtype.element_ty), mask=valid)
    tl.store(into + rotated, sums_rotated.to(grad_q.dtype.element_ty), mask=valid)


def forward(
    q: Tensor,
    latent: Tensor,
    chosen: Tensor,
    starts: Tensor,
    table: Tensor,
    scaling: float,
    out: Tensor,
    logsumexp: Tensor,
) -> None:
    """Write the outputs and the logsumexp of the scores."""
    grid, sizes = _launch(q, chosen, out.shape[2], FORWARD_HEADS)
    inputs = (x.contiguous() for x in (q, latent, chosen, starts, table))
    _forward[grid](*inputs, out, logsumexp, scaling, q.shape[1], chosen.shape[1], **sizes)


def backward(
    gradient: Tensor,
    q: Tensor,
    latent: Tensor,
    logsumexp: Tensor,
    shifts: Tensor,
    chosen: Tensor,
    starts: Tensor,
    table: Tensor,
    scaling: float,
    grad_q: Tensor,
    grad_latent: Tensor,
) -> None:
    """Write the gradient of the queries, and add that of the latents to ``grad_latent``."""
    grid, sizes = _launch(q, chosen, gradient.shape[2], BACKWARD_HEADS)
    inputs = (gradient, q, latent, logsumexp, shifts, chosen, starts, table)
    _backward[grid](
        *(x.contiguous() for x in inputs),
        *(grad_q, grad_latent, scaling, q.shape[1], chosen.shape[1]),
        **sizes,
    )


def _launch(
    q: Tensor, chosen: Tensor, width: int, most: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of programs, and the sizes of their blocks."""
    heads = min(most, max(16, triton.next_power_of_2(q.shape[1])))
    sizes = {
        "HEADS": heads,
        "KEYS": KEYS,
        "WIDTH": width,
        "ROTATED": q.shape[2] - width,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # of 16 bits, it's unused
        "num_warps": 8,
        "num_stages": 2,
    }
    return (len(chosen), triton.cdiv(q.shape[1], heads)), sizes
