"""Triton kernel of an indexer's scores, which holds the scores of single heads in registers only.

    score_ij = sum_h weight_ih max(0, q_ih . k_j)

The torch form writes and reads the products of all heads, which take 32 times the memory of the
scores in GLM-5. Here, a program multiplies the heads of a few queries with a block of keys, and
writes the sums over heads. With heads of 128 numbers in 16 bits, ``[128, 128]`` by ``[128, 128]``
takes 64 KB of shared memory and, with 8 warps, 64 of a thread's registers.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

ROWS, KEYS = 128, 128
"""Heads of all queries, and keys, of a program."""


# ``no_type_check``: the wrappers of runtime type checks lack the names of this module.
@triton.jit
@no_type_check
def _index_scores(
    queries: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    scores: tl.tensor,
    count: tl.tensor,
    seen: tl.tensor,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first = tl.program_id(0) * QUERIES
    row = first * HEADS + tl.arange(0, QUERIES * HEADS)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, SIZE)
    valid, exists = row < count * HEADS, key < seen
    q = tl.load(queries + row[:, None].to(tl.int64) * SIZE + column, mask=valid[:, None], other=0.0)
    k = tl.load(keys + key[:, None].to(tl.int64) * SIZE + column, mask=exists[:, None], other=0.0)
    weight = tl.load(weights + row, mask=valid, other=0.0)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    weighted = tl.maximum(products, 0.0) * weight[:, None]
    total = tl.sum(tl.reshape(weighted, [QUERIES, HEADS, KEYS]), 1)
    query = (first + tl.arange(0, QUERIES)).to(tl.int64)
    tl.store(
        scores + query[:, None] * seen + key[None, :],
        total,
        mask=(query < count)[:, None] & exists[None, :],
    )


def index_scores(
    queries: Float[Tensor, "t heads d"],
    weights: Float[Tensor, "t heads"],
    keys: Float[Tensor, "s d"],
) -> Float[Tensor, "t s"]:
    """Compute the scores of all pairs, in float32."""
    count, heads, size = queries.shape
    scores = queries.new_empty(count, len(keys), dtype=torch.float32)
    at_once = max(1, ROWS // heads)
    _index_scores[(triton.cdiv(count, at_once), triton.cdiv(len(keys), KEYS))](
        *(queries.contiguous(), weights.contiguous(), keys.contiguous(), scores, count, len(keys)),
        QUERIES=at_once,
        HEADS=heads,
        KEYS=KEYS,
        SIZE=size,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",  # of 16 bits, it's unused
        num_warps=8,
    )
    return scores
