"""The time of a GPU's products, from FLOPs."""

import math
from typing import Any

import attrs
import numpy as np

from primerl import flops
from primerl.planning.hardware import Hardware
from primerl.planning.trainer_memory import RankMemory

NEWTON_SCHULZ = 5
"""Iterations of Muon's orthogonalization."""


def compute_seconds(
    config: Any, tokens: int, speeds: Hardware, *, fp8: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of one GPU for a document, forward and backward, by part of the model."""
    text = config.get_text_config()
    parts = attrs.asdict(flops.breakdown(text, tokens), recurse=False)
    own = {name: float(np.asarray(value)) for name, value in parts.items()}
    sparse = own["indexer"] > 0
    products = speeds.fp8_products if fp8 else speeds.products
    attention = speeds.sparse_attention if sparse else speeds.attention
    fractions = {
        "attention_projections": products,
        "mlp": products,
        "experts": products * speeds.grouped,
        "indexer": speeds.indexer,
        "head": speeds.head,
    }
    # The backward pass has two products for each one forward, and computes scores again.
    again = float(np.asarray(flops.backward(text, tokens)))
    again -= 2 * (sum(own.values()) - own["indexer"])
    forward = fractions | {"attention_scores": attention}
    backward = fractions | {
        "attention_scores": speeds.sparse_attention if sparse else speeds.attention_backward
    }
    twice = {name: 2 * size for name, size in own.items() if name != "indexer"}
    twice["attention_scores"] += again
    return (
        {name: size / (speeds.bf16 * forward[name]) for name, size in own.items()},
        {name: size / (speeds.bf16 * backward[name]) for name, size in twice.items()},
    )


def orthogonalized(memory: RankMemory) -> float:
    """Return the FLOPs of a rank's share of Muon's Newton-Schulz iterations."""
    total = 0.0
    for part in memory.parts:
        if len(part.shape) < 2 or "embed" in part.name or "lm_head" in part.name:
            continue
        *stacked, a, b = part.shape
        short, long = min(a, b), max(a, b)
        share = math.prod(part.local_shape) / math.prod(part.shape)
        products = 4 * short**2 * long + 2 * short**3
        total += part.count * math.prod(stacked) * NEWTON_SCHULZ * products * share
    return total
