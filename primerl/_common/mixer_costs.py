"""Weights and multiply-adds of linear attention, state-space layers and convolutions.

The multiply-adds are those of the chunked algorithms: the delta rule (arXiv:2412.06464), Mamba 2
(arXiv:2405.21060) and lightning attention (arXiv:2401.04658). In a chunk of C tokens, a token meets
C others; from chunk to chunk, a state is carried. So they grow linearly with long documents.

In plain torch, ``transformers`` computes more for Mamba 2: it repeats the keys and queries (B and
C) of a group for each head, and computes the states of chunks by a product over all pairs of
chunks, which grows quadratically. The algorithm doesn't need that, so it is not counted.
"""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from jaxtyping import Float64

# The chunk of the delta rule, which no config names.
DELTA_CHUNK = 64


@attrs.frozen(kw_only=True)
class MixerCost:
    """The cost of a mixer."""

    weights: int
    """Number of weights of its projections, each a multiply-add per token."""
    filters: int = 0
    """Number of weights of its convolutions, each a multiply-add per token."""
    per_token: int = 0
    """Multiply-adds per token with a state."""
    block: int = 1
    """Number of tokens of a chunk."""
    per_pair: int = 0
    """Multiply-adds of a token with each token of its chunk, earlier or later."""

    def mixing(self, tokens: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
        """Return the multiply-adds for documents, without the projections."""
        within = self.per_pair * np.minimum(tokens, self.block)
        return np.asarray(tokens * (self.per_token + self.filters + within))


def _gated_delta_rule(config: Any) -> MixerCost:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    size, value = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * size, heads * value
    return MixerCost(
        weights=hidden * (2 * keys + 3 * values + 2 * heads),
        filters=config.linear_conv_kernel_dim * (2 * keys + values),
        **_delta_rule(heads, size, value),
    )


def _kimi_delta_rule(config: Any) -> MixerCost:
    hidden, heads, size = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    inner = heads * size
    return MixerCost(
        weights=4 * hidden * inner + 2 * size * (hidden + inner) + hidden * heads,
        filters=3 * config.linear_conv_kernel_dim * inner,
        **_delta_rule(heads, size, size),
    )


def _delta_rule(heads: int, size: int, value: int) -> dict[str, int]:
    """Count the products of the delta rule, without the triangular systems of its chunks."""
    return {
        "per_token": 3 * heads * size * value,
        "block": DELTA_CHUNK,
        "per_pair": heads * (2 * size + value),
    }


def _mamba_2(config: Any) -> MixerCost:
    hidden = config.hidden_size
    heads = _either(config, "mamba_n_heads", "mamba_num_heads")
    size = _either(config, "mamba_d_head", "mamba_head_dim")
    state = _either(config, "mamba_d_state", "ssm_state_size")
    inner, groups = heads * size, _either(config, "mamba_n_groups", "n_groups")
    mixed = inner + 2 * groups * state
    return MixerCost(
        weights=hidden * (inner + mixed + heads) + inner * hidden,
        filters=_either(config, "mamba_d_conv", "conv_kernel") * mixed,
        per_token=2 * inner * state,
        block=_either(config, "mamba_chunk_size", "chunk_size"),
        per_pair=groups * state + heads * size,  # the heads of a group share B and C
    )


def _mamba_1(config: Any) -> MixerCost:
    hidden, state, rank = config.hidden_size, config.mamba_d_state, config.mamba_dt_rank
    inner = config.mamba_expand * hidden
    return MixerCost(
        weights=3 * hidden * inner + inner * (2 * rank + 2 * state),
        filters=config.mamba_d_conv * inner,
        per_token=inner * state,
    )


def _short_convolution(config: Any) -> MixerCost:
    hidden = config.hidden_size
    return MixerCost(weights=4 * hidden**2, filters=config.conv_L_cache * hidden)


def _lightning(config: Any) -> MixerCost:
    heads, size = config.num_attention_heads, config.head_dim
    return MixerCost(
        weights=5 * config.hidden_size * heads * size,
        per_token=2 * heads * size**2,
        block=config.block_size,
        per_pair=2 * heads * size,
    )


def _either(config: Any, *names: str) -> Any:
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


_BY_FAMILY: dict[str, Callable[[Any], MixerCost]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta_rule),
    "olmo_hybrid": _gated_delta_rule,
    "kimi_linear": _kimi_delta_rule,
    **dict.fromkeys(("nemotron_h", "falcon_h1", "granitemoehybrid", "bamba"), _mamba_2),
    "jamba": _mamba_1,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_convolution),
    "minimax": _lightning,
}
MIXED_FAMILIES = frozenset(_BY_FAMILY)
"""Families with mixers of which the cost is known."""


def mixer_cost(config: Any, kind: str) -> MixerCost | None:
    """Return the cost of the mixer in a layer of a kind; None for a layer without one."""
    family = getattr(config, "model_type", "") or ""
    if family not in MIXED_FAMILIES or kind not in ("linear_attention", "conv", "mamba", "hybrid"):
        return None
    return _BY_FAMILY[family](config)
