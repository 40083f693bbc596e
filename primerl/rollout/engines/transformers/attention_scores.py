"""The arithmetic of attention over one request's keys, or over those of several in rows.

In float32 on a CPU, the result for a token has the same bits whatever else is in the batch, and
however its request is divided into steps: products have at least ``LEAST_ROWS`` rows, and sums over
keys are taken in blocks that begin at a multiple of ``KEY_BLOCK`` tokens of the request. Some CPU
libraries still round products of more rows differently, in the last digits.
"""

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# Below this number of rows, the matrix products of CPU libraries round differently.
LEAST_ROWS = 4
# The number of keys whose weighted values are summed in one product.
KEY_BLOCK = 512


@attrs.define(eq=False)
class Scoring:
    """How the scores of queries and keys become weights."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """One score for each head, of a key without a value."""


def causal_mask(
    positions: Int[Tensor, "t 1"], seen: int, window: int | None
) -> Float[Tensor, "t s"]:
    """Return 0 where a token sees a key, else minus infinity."""
    keys = torch.arange(seen, device=positions.device)
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    return torch.zeros(visible.shape, device=positions.device).masked_fill_(~visible, float("-inf"))


def mask_of_chosen(chosen: Int[Tensor, "t k"], seen: int) -> Float[Tensor, "t s"]:
    """Return 0 at the chosen keys, or everywhere in rows of -1, else minus infinity."""
    hidden = torch.ones(len(chosen), seen, dtype=torch.bool, device=chosen.device)
    hidden.scatter_(1, chosen.clamp(min=0), False)
    hidden &= chosen[:, :1] >= 0
    return torch.zeros(hidden.shape, device=chosen.device).masked_fill_(hidden, float("-inf"))


def weigh(
    query: Float[Tensor, "n kv_heads rows d"],
    key: Float[Tensor, "n kv_heads s d"],
    value: Float[Tensor, "n kv_heads s dv"],
    mask: Float[Tensor, "n 1 q s"],
    scoring: Scoring,
) -> Float[Tensor, "n kv_heads rows dv"]:
    """Return the values, weighted by ``softmax(scaling query . key + mask)``."""
    plain = scoring.softcap is None and scoring.sinks is None
    exact = query.dtype == torch.float32 and query.device.type == "cpu"
    if plain and not exact:
        mask = mask.to(query.dtype).expand(-1, -1, query.shape[2], -1)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scaling
        )
    rows = query.shape[2]
    if rows < LEAST_ROWS:
        query = F.pad(query, (0, 0, 0, LEAST_ROWS - rows))
        mask = mask if mask.shape[2] == 1 else F.pad(mask, (0, 0, 0, LEAST_ROWS - rows))
    scores = torch.matmul(query * scoring.scaling, key.transpose(2, 3)).float()
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh_() * scoring.softcap
    scores += mask
    weights = _softmax(scores, scoring.sinks, rows).to(value.dtype)
    result = torch.matmul(weights[..., :KEY_BLOCK], value[:, :, :KEY_BLOCK])
    for start in range(KEY_BLOCK, value.shape[2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        result += torch.matmul(weights[..., block], value[:, :, block])
    return result[:, :, :rows]


def _softmax(scores: Tensor, sinks: Tensor | None, rows: int) -> Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    kv_heads, padded = scores.shape[1:3]
    each = sinks.view(1, kv_heads, -1, 1).float()  # heads of a group are equal parts of the rows
    each = each.repeat_interleave(rows // each.shape[2], dim=2)
    each = F.pad(each, (0, 0, 0, padded - rows)).expand(len(scores), -1, -1, -1)
    return torch.cat([scores, each], dim=-1).softmax(dim=-1)[..., :-1]
