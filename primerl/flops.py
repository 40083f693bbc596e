"""FLOPs of a transformer, from its Hugging Face config, for documents of given lengths.

Only matrix multiplications are counted, at 2 FLOPs per multiply-add: norms, rotary embeddings,
softmax and sampling are below a percent. A document of n tokens costs

    2 n (active weights)  +  2 pairs(n) (multiply-adds for each query and key)

where a causal query at position i sees min(i, k) keys, so that pairs(n) = n (n+1) / 2 without a
limit k, and k (k+1) / 2 + (n - k) k with one: a sliding window, or the top-k of sparse attention.
What kernels compute beyond that (masked blocks, padding) is not counted.
"""

from collections import Counter
from typing import Any

import attrs
import numpy as np
from jaxtyping import Float64

__all__ = ["Breakdown", "Parameters", "breakdown", "forward", "parameters", "training"]

# fmt: off
FAMILIES = frozenset([  # by the model_type of the language model
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "cohere2",
    "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama",
    "dots1", "emu3_text_model", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss",
    "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "hy_v3", "hyperclovax", "jais2", "jetmoe", "kimi_k2", "laguna", "llama", "mellum", "minicpm3",
    "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mllama_text_model",
    "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "youtu",
])
"""``tests/test_flops.py`` compares each with the operations that its model runs."""

NOT_GATED = frozenset([
    "apertus", "arcee", "biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neox", "jais2", "nanochat",
    "nemotron", "opt", "persimmon", "phi", "starcoder2",
])
"""Families whose dense layers have two matrices, without a gate."""
# fmt: on
REFUSED = {
    "gemma3n_text": "keeps several streams, and mixes them by coefficients",
    "hrm_text": "runs its layers several times, and some of them without a gradient",
    "longcat_flash": "has experts that compute nothing, so that a token's cost depends on it",
}
"""Families whose FLOPs don't follow from their config, and why; they can still be trained."""


@attrs.frozen(kw_only=True, eq=False)
class Breakdown:
    """FLOPs of a forward pass over each document, by part."""

    attention_projections: Float64[np.ndarray, "..."]
    attention_scores: Float64[np.ndarray, "..."]
    """Scores of queries against keys, and weighted sums of values."""
    indexer: Float64[np.ndarray, "..."]
    """The choice of keys in sparse attention, over all pairs: still quadratic."""
    mlp: Float64[np.ndarray, "..."]
    """Dense layers."""
    experts: Float64[np.ndarray, "..."]
    """The chosen routed experts, the shared experts, and the router."""
    head: Float64[np.ndarray, "..."]

    @property
    def total(self) -> Float64[np.ndarray, "..."]:
        """The sum of the parts."""
        return np.asarray(sum(attrs.asdict(self, recurse=False).values()))


@attrs.frozen(kw_only=True)
class Parameters:
    """Numbers of weights in matrices: all, and those active for a token (without embeddings).

    Norms and biases, well below 0.1 %, are not counted.
    """

    total: int
    active: int


def forward(config: Any, lengths: Any) -> Float64[np.ndarray, "..."]:
    """FLOPs of a forward pass over each document, the head at every token: ``breakdown`` summed.

    Args:
        config: a Hugging Face config, or any object with its attributes.
        lengths: tokens of each document, of any shape.

    Raises:
        ValueError: the family is unknown, an attribute that it needs is missing, or a length is
            negative or no whole number.
    """
    return breakdown(config, lengths).total


def training(config: Any, lengths: Any, *, recompute: bool = False) -> Float64[np.ndarray, "..."]:
    """FLOPs of training on each document: three forward passes, or four with ``recompute``.

    The backward pass has two multiplications for each one: for the gradients of the input and of
    the weight. The indexer of sparse attention gets no gradient and has no backward pass.

    Args:
        config: as for ``forward``, which also raises the same.
        lengths: tokens of each document, of any shape.
        recompute: whether all activations are recomputed in the backward pass.
    """
    parts = breakdown(config, lengths)
    forwards = 2 if recompute else 1
    total = forwards * parts.total + 2 * (parts.total - parts.indexer)
    return np.asarray(total)


def breakdown(config: Any, lengths: Any) -> Breakdown:
    """FLOPs of a forward pass over each document, by part.

    Attention costs ``heads (q + v)`` multiply-adds for a query and a key, with q and v the sizes of
    query and value. Latent attention (arXiv:2405.04434) is counted as in training: over all keys,
    keys and values are expanded, so q = nope + rope; over the top-k keys of an indexer (DeepSeek
    V3.2, arXiv:2512.02556), which differ for every query, kernels stay in the latent space, so
    q = kv_lora_rank + rope and v = kv_lora_rank. The projections cost the same either way.

    Arguments and errors are those of ``forward``.
    """
    tokens = np.asarray(lengths)
    whole = tokens.dtype.kind in "iuf" and bool(
        np.all(np.isfinite(tokens) & (tokens >= 0) & (tokens == np.floor(tokens)))
    )
    if not whole:
        raise ValueError(f"lengths is {lengths!r:.200}; expected whole numbers, at least 0")
    tokens = tokens.astype(np.float64)
    config = _language_model(config)
    parts = {field.name: np.zeros_like(tokens) for field in attrs.fields(Breakdown)}
    parts["head"] += 2 * tokens * _head(config)
    for layer, count in Counter(_layers(config)).items():
        pairs = _pairs(tokens, layer.keys)
        for name, weights, per_pair in (
            ("attention_projections", layer.projections, 0),
            ("attention_scores", 0, layer.per_pair * pairs),
            ("indexer", layer.indexer, layer.indexer_per_pair * _pairs(tokens, np.inf)),
            ("mlp", layer.mlp, 0),
            ("experts", layer.experts, 0),
        ):
            parts[name] += 2 * count * (tokens * weights + per_pair)
    return Breakdown(**parts)


def parameters(config: Any) -> Parameters:
    """The number of weights of a model, and of those that are active for a token.

    Raises:
        ValueError: the family is unknown, or an attribute that it needs is missing.
    """
    config = _language_model(config)
    layers, embeddings = _layers(config), config.vocab_size * config.hidden_size
    active = _head(config) + sum(layer.active for layer in layers)
    idle = sum(layer.idle_experts + layer.idle_heads for layer in layers)
    embeddings += 8 * config.hidden_size if _family(config) == "mllama_text_model" else 0  # images
    embedding = 0 if getattr(config, "tie_word_embeddings", False) else embeddings
    return Parameters(total=active + idle + embedding, active=active)


def _head(config: Any) -> int:
    transformed = config.hidden_size**2 if _family(config) == "modernbert-decoder" else 0
    return int(config.vocab_size * config.hidden_size + transformed)


def _family(config: Any) -> str:
    return getattr(config, "model_type", "") or ""


def _pairs(tokens: Float64[np.ndarray, "..."], keys: float) -> Float64[np.ndarray, "..."]:
    ramp = np.minimum(tokens, keys)
    return np.asarray(ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp)


@attrs.frozen(kw_only=True)
class _Layer:
    """Weights that are active for a token, and multiply-adds for each query and key."""

    projections: int
    per_pair: int
    keys: float
    indexer: int = 0
    indexer_per_pair: int = 0
    mlp: int = 0
    experts: int = 0
    idle_experts: int = 0
    idle_heads: int = 0

    @property
    def active(self) -> int:
        return self.projections + self.indexer + self.mlp + self.experts


def _language_model(config: Any) -> Any:
    config = getattr(config, "text_config", None) or config
    family = _family(config)
    if family in REFUSED:
        raise ValueError(f"the FLOPs of {family} are not counted: it {REFUSED[family]}")
    if family and family not in FAMILIES:
        raise ValueError(
            f"config.model_type is {family!r}, whose FLOPs are not known here; expected one of "
            f"{', '.join(sorted(FAMILIES))}. A transformer that is like one of them can be "
            "described by any object with its attributes and without a model_type"
        )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        _need(config, name)
    for layer in layer_configs(config):
        for name, without in UNCOUNTED.items():
            value = getattr(layer, name, without)
            if value not in (without, None):
                raise ValueError(f"config.{name} is {value}; only {without} is counted")
    if (getattr(config, "word_embed_proj_dim", None) or config.hidden_size) != config.hidden_size:
        raise ValueError("config.word_embed_proj_dim differs from hidden_size; that is not counted")
    return config


# Layers whose queries see all tokens; an indexer's kind has had two names in transformers.
WITHOUT_WINDOW = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
UNCOUNTED = {"num_kv_shared_layers": 0, "attention_k_eq_v": False, "enable_moe_block": False}
"""Settings of some families, and the only value of each that is supported."""


def _need(config: Any, *names: str) -> Any:
    """The first of the attributes that is set: families have different names for the same thing."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise ValueError(
        f"config ({type(config).__name__}) has no {' or '.join(names)}, which the FLOPs of "
        f"{getattr(config, 'model_type', '') or 'such a model'} depend on"
    )


def _layers(config: Any) -> list[_Layer]:
    return [
        _Layer(**_attention(layer, index), **_feed_forward(layer, index))
        for index, layer in enumerate(layer_configs(config))
    ]


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer: the model's own, where its layers are alike."""
    count = config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[index] for index in range(count)]
    return [config] * count


def _attention(config: Any, index: int) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys = _window(config, index)
    if getattr(config, "kv_lora_rank", None) is None:
        layer_heads = getattr(config, "num_attention_heads_per_layer", None)
        heads = layer_heads[index] if layer_heads else heads
        size = getattr(config, "head_dim", None) or hidden // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        key_heads = 1 if getattr(config, "multi_query", False) else key_heads
        projections = 2 * hidden * size * (heads + key_heads)
        # Differential attention scores its keys for each half of the values.
        scored = 2 if _family(config) == "diffllama" else 1
        return {
            "projections": projections + _gates_and_routers(config, heads, size),
            "idle_heads": _idle_heads(config, size),
            "per_pair": 2 * heads * size * scored,
            "keys": keys,
        }
    latent, rope = config.kv_lora_rank, _need(config, "qk_rope_head_dim")
    nope, value = _need(config, "qk_nope_head_dim"), _need(config, "v_head_dim")
    query_latent = getattr(config, "q_lora_rank", None)
    queries = heads * (nope + rope)
    result = {
        "projections": (query_latent * (hidden + queries) if query_latent else hidden * queries)
        + hidden * (latent + rope)
        + latent * heads * (nope + value)
        + heads * value * hidden,
        "per_pair": heads * (nope + rope + value),
        "keys": keys,
    }
    if getattr(config, "index_topk", None) is not None:
        result |= {"per_pair": heads * (2 * latent + rope), "keys": float(config.index_topk)}
        if _runs_indexer(config, index):
            index_heads, size = _need(config, "index_n_heads"), _need(config, "index_head_dim")
            # One key for all heads, and a weighted sum of their scores.
            result["indexer"] = _need(config, "q_lora_rank") * index_heads * size + hidden * (
                size + index_heads
            )
            result["indexer_per_pair"] = index_heads * (size + 1)
    return result


def _gates_and_routers(config: Any, heads: int, size: int) -> int:
    """Weights of gates on attention's outputs, and of routers over attention heads."""
    family, hidden = _family(config), config.hidden_size
    if family == "afmoe":
        return int(hidden * heads * size)
    if family == "laguna":
        for_each_head = getattr(config, "gating", True) in (True, "per-head")
        return int(hidden * heads * (1 if for_each_head else size))
    if family == "jetmoe":
        return int(hidden * config.num_local_experts)
    return 0


def _idle_heads(config: Any, size: int) -> int:
    """Weights of JetMoE's query and output experts that are not active for a token."""
    if _family(config) != "jetmoe":
        return 0
    idle = config.num_local_experts - config.num_experts_per_tok
    return int(idle * 2 * config.hidden_size * config.num_key_value_heads * size)


def _window(config: Any, index: int) -> float:
    """The most keys that a query of this layer sees."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        slides = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if slides else None
        return float(window or np.inf)
    if kinds[index] == "sliding_attention":
        return float(_need(config, "sliding_window"))
    if kinds[index] in WITHOUT_WINDOW:
        return float(np.inf)
    raise ValueError(
        f"config.layer_types[{index}] is {kinds[index]!r}, whose FLOPs are not known here; "
        "expected full_attention, sliding_attention or indexed_attention"
    )


def _runs_indexer(config: Any, index: int) -> bool:
    """Whether a layer selects keys itself, or shares an earlier layer's (arXiv:2603.12201)."""
    kinds = getattr(config, "indexer_types", None) or getattr(config, "index_topk_pattern", None)
    if kinds:
        return bool(kinds[index] in ("full", "F"))
    every = getattr(config, "index_topk_freq", None) or 1
    first = getattr(config, "index_skip_topk_offset", None)
    return max(index - (2 if first is None else first) + 1, 0) % every == 0


def _feed_forward(config: Any, index: int) -> dict[str, int]:
    """The matrices of a dense layer, or of each expert: three with a gate, two without."""
    hidden, family = config.hidden_size, _family(config)
    matrices = 2 if family in NOT_GATED else 3
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts",
                     "moe_num_experts")  # fmt: skip
    # Gemma's embeddings of each layer: projected from the hidden state, and into it.
    layer_embeddings = 3 * hidden * _first(config, "hidden_size_per_layer_input")
    if not experts or not _has_experts(config, index):
        if family in ("gpt2", "gpt_bigcode"):
            size = getattr(config, "n_inner", None) or 4 * hidden
        else:
            size = _need(config, "intermediate_size", "ffn_dim", "dff")
        return {"mlp": matrices * hidden * size + layer_embeddings}
    expert = 3 * hidden * _need(config, "moe_intermediate_size", "intermediate_size")
    active = _need(config, "num_experts_per_tok", "moe_topk")
    active = active[index] if isinstance(active, list | tuple) else active
    return {
        "experts": active * expert + _shared_experts(config, expert) + hidden * experts,
        "idle_experts": (experts - active) * expert,
    }


def _shared_experts(config: Any, expert: int) -> int:
    hidden, family = config.hidden_size, _family(config)
    if family == "hunyuan_v1_moe":
        return int(3 * hidden * config.intermediate_size)
    if size := _first(config, "shared_expert_intermediate_size", "shared_intermediate_size"):
        gate = 0 if family in ("laguna", "granitemoeshared") else hidden
        return int(3 * hidden * size + gate)
    return expert * _first(
        config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    )


def _first(config: Any, *names: str) -> int:
    """The first of the attributes that is above 0, or 0."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _has_experts(config: Any, index: int) -> bool:
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return bool(kinds[index] == "sparse")
    if index in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    every = _first(config, "decoder_sparse_step", "moe_layer_interval") or 1
    first = _first(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    last = getattr(config, "moe_layer_end_index", None)
    within = last is None or last < 0 or index <= last
    return within and index >= first and (index + 1) % every == 0
