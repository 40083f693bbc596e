"""FLOPs and parameter counts of a transformer, computed from its Hugging Face config.

Only matrix multiplications are counted, at 2 FLOPs per multiply-add; norms, rotary embeddings,
softmax and sampling are below one percent. A document of n tokens costs

    2 n (active weights)  +  2 pairs(n) (multiply-adds per query-key pair)

With causal attention, a query at position i = 1..n sees min(i, k) keys, where the limit k is a
sliding window or the top-k of sparse attention. So pairs(n) is n (n+1) / 2 up to n = k or without a
limit, and k (k+1) / 2 + (n - k) k for longer documents. In chunks of k tokens, it sees those of its
chunk; where blocks of keys are chosen, those of its block, and all keys of k / block - 1 blocks
before it. Extra work of kernels (masked blocks, padding) is not counted, except that ``backward``
counts the scores that they compute again.
"""

from collections import Counter
from typing import Any

import attrs
import numpy as np
from jaxtyping import Bool, Float64

from primerl._common.mixer_costs import MIXED_FAMILIES, MixerCost, mixer_cost

__all__ = [
    "Breakdown", "Parameters", "backward", "breakdown", "forward", "parameters", "training",
]  # fmt: skip

# fmt: off
FAMILIES = frozenset([  # model_type of the language model
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "cohere2",
    "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "diffllama", "dots1", "emu3_text_model", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text",
    "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss",
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "kimi_k2",
    "laguna", "llama", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama_text_model",
    "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
]) | MIXED_FAMILIES
"""Supported model families; ``tests/test_flops.py`` checks each against the operations of its
model."""

NOT_GATED = frozenset([
    "apertus", "arcee", "biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neox", "jais2", "nanochat",
    "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2",
])
"""Families whose dense layers have two matrices and no gate."""
# fmt: on
REFUSED = {
    "gemma3n_text": "keeps several streams, and mixes them by coefficients",
    "hrm_text": "runs its layers several times, and some of them without a gradient",
    "recurrent_gemma": "has recurrent layers of which torch counts only a part",
    "deepseek_v4": "compresses keys, and computes all pairs of a document's tokens",
    "longcat_flash": "has experts that compute nothing, so the cost of a token depends on routing",
}
"""Families whose FLOPs can't be computed from their config, and why; they can still be trained."""


@attrs.frozen(kw_only=True, eq=False)
class Breakdown:
    """FLOPs of a forward pass over each document, divided into parts of the model."""

    attention_projections: Float64[np.ndarray, "..."]
    attention_scores: Float64[np.ndarray, "..."]
    """Products of queries with keys, and weighted sums of values. In linear attention and
    state-space layers, products with states and within chunks, and convolutions."""
    indexer: Float64[np.ndarray, "..."]
    """Choice of keys in sparse attention; quadratic, because it scores all query-key pairs. It is 0
    for documents of at most top-k tokens."""
    mlp: Float64[np.ndarray, "..."]
    """Dense feed-forward layers."""
    experts: Float64[np.ndarray, "..."]
    """The chosen routed experts, the shared experts, and the router."""
    head: Float64[np.ndarray, "..."]

    @property
    def total(self) -> Float64[np.ndarray, "..."]:
        """Total FLOPs of each document: the sum of all parts."""
        return np.asarray(sum(attrs.asdict(self, recurse=False).values()))


@attrs.frozen(kw_only=True)
class Parameters:
    """Parameter counts of a model: all, and those active for each token (without embeddings).

    Only matrices are counted; norms and biases are well below 0.1 %.
    """

    total: int
    active: int


def forward(config: Any, lengths: Any) -> Float64[np.ndarray, "..."]:
    """Return the FLOPs of a forward pass over each document, with the head at every token.

    Args:
        config: a Hugging Face config, or any object with its attributes.
        lengths: number of tokens of each document, as an array of any shape.

    Raises:
        ValueError: the model family is unknown, the config lacks an attribute that the family
            needs, or a length is negative or not a whole number.
    """
    return breakdown(config, lengths).total


def training(config: Any, lengths: Any, *, recompute: bool = False) -> Float64[np.ndarray, "..."]:
    """Return the FLOPs of training on each document: 3 forward passes, or 4 with ``recompute``.

    For each multiplication of the forward pass, the backward pass has two: one for the gradient of
    the input and one for that of the weight. The indexer of sparse attention gets no gradient, so
    it has no backward pass. Errors are those of ``forward``.

    Args:
        config: as for ``forward``.
        lengths: as for ``forward``.
        recompute: whether all activations are recomputed in the backward pass.
    """
    parts = breakdown(config, lengths)
    forwards = 2 if recompute else 1
    total = forwards * parts.total + 2 * (parts.total - parts.indexer)
    return np.asarray(total)


def backward(config: Any, lengths: Any) -> Float64[np.ndarray, "..."]:
    """Return the FLOPs of the backward pass over each document, as this library computes it.

    For each product of the forward pass, the backward pass computes two. Kernels of attention don't
    keep the scores of query-key pairs, and also compute these again. The LM head is counted without
    recomputed logits. Arguments and errors are those of ``forward``.
    """
    parts = breakdown(config, lengths)
    tokens = np.asarray(lengths).astype(np.float64)
    again = np.zeros_like(tokens)
    for layer, count in Counter(_layers(_language_model(config))).items():
        widths = np.where(layer.chooses(tokens), layer.per_latent_score, layer.per_score)
        again += 2 * count * widths * layer.pairs(tokens)
    return np.asarray(2 * (parts.total - parts.indexer) + again)


def breakdown(config: Any, lengths: Any) -> Breakdown:
    """Return the FLOPs of a forward pass over each document, by part of the model.

    Attention costs ``heads (q + v)`` multiply-adds per query-key pair, where q and v are the sizes
    of a head's query and value. Latent attention (arXiv:2405.04434) is counted as in training.
    Attention over all keys expands keys and values, so q = nope + rope. With an indexer (DeepSeek
    V3.2, arXiv:2512.02556), the top-k keys of longer documents differ for every query, so kernels
    stay in the latent space: q = kv_lora_rank + rope and v = kv_lora_rank. The projections cost the
    same in both cases. The indexer does not run for documents of at most top-k tokens.

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
        chooses = layer.chooses(tokens)
        of_pair = np.where(chooses, layer.per_latent_pair, layer.per_pair)
        indexed = layer.indexer_per_pair * _pairs(tokens, np.inf) * chooses
        for name, weights, per_pair in (
            ("attention_projections", layer.projections, 0),
            ("attention_scores", 0, of_pair * layer.pairs(tokens) + layer.mixing(tokens)),
            ("indexer", layer.indexer * chooses, indexed),
            ("mlp", layer.mlp, 0),
            ("experts", layer.experts, 0),
        ):
            parts[name] += 2 * count * (tokens * weights + per_pair)
    return Breakdown(**parts)


def parameters(config: Any) -> Parameters:
    """Return a model's number of parameters, and how many of them are active for each token.

    Raises:
        ValueError: the model family is unknown, or the config lacks an attribute that it needs.
    """
    tied = getattr(config, "tie_word_embeddings", False)  # of the whole model
    config = _language_model(config)
    layers, embeddings = _layers(config), config.vocab_size * config.hidden_size
    active = _head(config) + sum(layer.active for layer in layers)
    idle = sum(layer.idle_experts + layer.idle_heads for layer in layers)
    # Mllama's embedding table has 8 extra rows for image tokens.
    embeddings += 8 * config.hidden_size if _family(config) == "mllama_text_model" else 0
    embedding = 0 if tied else embeddings
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
    """Cost of one layer: weights by part, and multiply-adds per query-key pair."""

    projections: int
    per_pair: int = 0
    per_score: int = 0
    """The part of ``per_pair`` that computes scores; the rest weighs values."""
    keys: float = np.inf
    mixer: MixerCost | None = None
    block: int = 0
    """If above 0, a query sees ``keys / block`` blocks of keys: its own, up to itself, and others
    before it. Chunks are such blocks, of which it sees one."""
    per_latent_pair: int = 0
    """Multiply-adds per pair where an indexer chooses the keys; 0 without an indexer."""
    per_latent_score: int = 0
    indexer: int = 0
    indexer_per_pair: int = 0
    mlp: int = 0
    experts: int = 0
    idle_experts: int = 0
    idle_heads: int = 0

    def pairs(self, tokens: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
        """Return the number of query-key pairs of each document."""
        if not self.block:
            return _pairs(tokens, self.keys)
        whole, others = tokens // self.block, self.keys / self.block - 1
        rest = tokens - whole * self.block
        own = (whole * self.block * (self.block + 1) + rest * (rest + 1)) / 2
        ramp = np.minimum(whole, others + 1)
        earlier = self.block * (ramp * (ramp - 1) / 2 + (whole - ramp) * others)
        return np.asarray(own + self.block * (earlier + rest * np.minimum(whole, others)))

    def mixing(self, tokens: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
        """Return the multiply-adds of a mixer, without its projections."""
        return np.zeros_like(tokens) if self.mixer is None else self.mixer.mixing(tokens)

    def chooses(self, tokens: Float64[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Whether a document is so long that an indexer chooses keys."""
        return np.asarray((tokens > self.keys) & (self.per_latent_pair > 0))

    @property
    def active(self) -> int:
        filters = 0 if self.mixer is None else self.mixer.filters
        return self.projections + filters + self.indexer + self.mlp + self.experts


def _language_model(config: Any) -> Any:
    config = getattr(config, "text_config", None) or config
    family = _family(config)
    if family in REFUSED:
        raise ValueError(f"the FLOPs of {family} are not counted: it {REFUSED[family]}")
    if family and family not in FAMILIES:
        raise ValueError(
            f"config.model_type {family!r} is not supported by primerl.flops; expected one of "
            f"{', '.join(sorted(FAMILIES))}. To count a similar transformer, pass an object with "
            "the attributes of its config but no model_type"
        )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        _need(config, name)
    for layer in layer_configs(config):
        for name, without in UNCOUNTED.items():
            value = getattr(layer, name, without)
            if value not in (without, None):
                raise ValueError(f"config.{name} is {value}; only {without} is supported")
    if (getattr(config, "word_embed_proj_dim", None) or config.hidden_size) != config.hidden_size:
        raise ValueError("config.word_embed_proj_dim differs from hidden_size; expected them equal")
    return config


# Layer types without a sliding window. Transformers has had two names for layers with an indexer.
WITHOUT_WINDOW = (
    "full_attention", "attention", "hybrid", "indexed_attention", "deepseek_sparse_attention",
)  # fmt: skip
UNCOUNTED = {"num_kv_shared_layers": 0, "attention_k_eq_v": False, "enable_moe_block": False}
"""Config attributes of some families, with the only supported value of each."""


def _need(config: Any, *names: str) -> Any:
    """Return the first attribute that is set: families name the same quantity differently."""
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
        _Layer(**_mixing(layer, index), **_feed_forward(layer, index))
        for index, layer in enumerate(layer_configs(config))
    ]


def chosen_experts(config: Any) -> list[int]:
    """Return how many routed experts each layer chooses for a token; 0 for dense layers.

    Raises:
        ValueError: as for ``parameters``.
    """
    config = _language_model(config)
    return [_chosen(layer, index) for index, layer in enumerate(layer_configs(config))]


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer: the model's own, unless its layers differ."""
    count = config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[index] for index in range(count)]
    return [config] * count


def _kind(config: Any, index: int) -> str:
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    return kinds[index] if kinds else ""


def keeps_keys(config: Any, index: int) -> bool:
    """Whether a layer has attention, not only a state or a feed-forward layer."""
    kinds_without = ("linear_attention", "mamba", "conv", "mlp", "moe")
    return _kind(config, index) not in kinds_without


@attrs.frozen(kw_only=True)
class HeadSizes:
    """The numbers and sizes of the heads of a layer's attention, where it keeps no latents."""

    heads: int
    key_heads: int
    key: int
    """Size of a query and of a key."""
    value: int


def head_sizes(config: Any, index: int) -> HeadSizes:
    """Return the numbers and sizes of the heads of a layer's attention."""
    layer_heads = getattr(config, "num_attention_heads_per_layer", None)
    heads = layer_heads[index] if layer_heads else config.num_attention_heads
    size = value = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    key_heads = 1 if getattr(config, "multi_query", False) else key_heads
    if _family(config) == "mimo_v2_flash":
        value = config.v_head_dim
        key_heads *= 1 if np.isinf(visible_keys(config, index)) else 2
    return HeadSizes(heads=heads, key_heads=key_heads, key=size, value=value)


def _mixing(config: Any, index: int) -> dict[str, Any]:
    """Return the cost of a layer's attention, of its mixer, or of both."""
    kind = _kind(config, index)
    if _family(config) == "nemotron_h" and kind in ("mlp", "moe"):
        return {"projections": 0}
    if _family(config) == "falcon_h1":
        kind = "hybrid"
    mixer = mixer_cost(config, kind)
    if mixer is None:
        return _attention(config, index)
    attention = _attention(config, index) if kind == "hybrid" else {"projections": 0}
    projections = attention["projections"] + mixer.weights
    return {**attention, "projections": projections, "mixer": mixer}


def _attention(config: Any, index: int) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if _kind(config, index) == "minimax_m3_sparse":
        return _block_attention(config, index)
    keys = visible_keys(config, index)
    if getattr(config, "kv_lora_rank", None) is None:
        sizes = head_sizes(config, index)
        heads, size, value = sizes.heads, sizes.key, sizes.value
        projections = hidden * (size + value) * (heads + sizes.key_heads)
        # Differential attention computes scores twice, once for each half of the values.
        scored = 2 if _family(config) == "diffllama" else 1
        return {
            "projections": projections + _gates_and_routers(config, heads, size),
            "idle_heads": _idle_heads(config, size),
            "per_pair": heads * (size + value) * scored,
            "per_score": heads * size * scored,
            "keys": keys,
            "block": int(keys) if _is_chunked(config, index) else 0,
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
        "per_score": heads * (nope + rope),
        "keys": keys,
    }
    if getattr(config, "index_topk", None) is not None:
        result |= {
            "per_latent_pair": heads * (2 * latent + rope),
            "per_latent_score": heads * (latent + rope),
            "keys": float(config.index_topk),
        }
        if _runs_indexer(config, index):
            index_heads, size = _need(config, "index_n_heads"), _need(config, "index_head_dim")
            # All heads share one key, and their scores are added by weight.
            result["indexer"] = _need(config, "q_lora_rank") * index_heads * size + hidden * (
                size + index_heads
            )
            result["indexer_per_pair"] = index_heads * (size + 1)
    return result


def _block_attention(config: Any, index: int) -> dict[str, Any]:
    """Return the cost of attention to blocks of keys, which an indexer chooses for each key head.

    The indexer always chooses a query's own block.
    """
    if config.index_local_blocks < 1:
        raise ValueError("config.index_local_blocks is 0; expected at least 1, a query's own block")
    sizes, hidden, size = head_sizes(config, index), config.hidden_size, config.index_head_dim
    per_score = sizes.heads * sizes.key
    per_pair = per_score + sizes.heads * sizes.value
    return {
        "projections": hidden * (sizes.key + sizes.value) * (sizes.heads + sizes.key_heads),
        "per_pair": per_pair,
        "per_score": per_score,
        "keys": float(config.index_topk_blocks * config.index_block_size),
        "block": config.index_block_size,
        "per_latent_pair": per_pair,  # there are no latents
        "per_latent_score": per_score,
        "indexer": hidden * (config.index_n_heads + 1) * size,  # all heads share one key
        "indexer_per_pair": config.index_n_heads * size,
    }


def _gates_and_routers(config: Any, heads: int, size: int) -> int:
    """Return the number of weights in gates on attention outputs and routers of attention heads."""
    family, hidden = _family(config), config.hidden_size
    if family in ("afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return int(hidden * heads * size)
    if family == "laguna":
        for_each_head = getattr(config, "gating", True) in (True, "per-head")
        return int(hidden * heads * (1 if for_each_head else size))
    if family == "jetmoe":
        return int(hidden * config.num_local_experts)
    return 0


def _idle_heads(config: Any, size: int) -> int:
    """Return the number of weights in JetMoE's attention experts that are idle for each token."""
    if _family(config) != "jetmoe":
        return 0
    idle = config.num_local_experts - config.num_experts_per_tok
    return int(idle * 2 * config.hidden_size * config.num_key_value_heads * size)


def visible_keys(config: Any, index: int) -> float:
    """Return the largest number of keys that a query of this layer sees."""
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    if kinds is None:
        slides = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if slides else None
        return float(window or np.inf)
    if kinds[index] == "sliding_attention":
        return float(_need(config, "sliding_window"))
    if kinds[index] == "chunked_attention":
        return float(_need(config, "attention_chunk_size"))
    if kinds[index] in WITHOUT_WINDOW:
        return float(np.inf)
    raise ValueError(
        f"config.layer_types[{index}] is {kinds[index]!r}, which primerl.flops does not support; "
        "expected full_attention, sliding_attention, chunked_attention or indexed_attention"
    )


def _is_chunked(config: Any, index: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[index] == "chunked_attention"


def seen_keys(config: Any, positions: Any) -> Float64[np.ndarray, "..."]:
    """Return how many keys queries at these positions of a document see, the mean over layers.

    Layers whose number of keys is unknown, or which choose keys, count as full attention.
    """
    text = getattr(config, "text_config", None) or config
    places = np.asarray(positions).astype(np.float64)
    total = np.zeros_like(places)
    count = text.num_hidden_layers
    for index in range(count):
        try:
            keys = visible_keys(text, index)
        except ValueError:
            keys = np.inf
        before = places % keys if _is_chunked(text, index) else places
        total += np.minimum(before + 1, keys)
    return np.asarray(total / count)


def _runs_indexer(config: Any, index: int) -> bool:
    """Whether a layer runs its own indexer; others reuse an earlier layer's (arXiv:2603.12201)."""
    kinds = getattr(config, "indexer_types", None) or getattr(config, "index_topk_pattern", None)
    if kinds:
        return bool(kinds[index] in ("full", "F"))
    every = getattr(config, "index_topk_freq", None) or 1
    first = getattr(config, "index_skip_topk_offset", None)
    return max(index - (2 if first is None else first) + 1, 0) % every == 0


def _feed_forward(config: Any, index: int) -> dict[str, Any]:
    """Return the weights of a feed-forward layer: 3 matrices per MLP or expert, 2 without gates."""
    hidden, family = config.hidden_size, _family(config)
    matrices = 2 if family in NOT_GATED else 3
    active = _chosen(config, index)
    # Gemma's per-layer embeddings are projected from the hidden state, and back into it.
    layer_embeddings = 3 * hidden * _first(config, "hidden_size_per_layer_input")
    if family in ("nemotron_h", "granitemoehybrid", "jamba", "lfm2", "llama4_text"):
        return _feed_forward_of_its_own(config, index)
    if not active:
        if family in ("gpt2", "gpt_bigcode"):
            size = getattr(config, "n_inner", None) or 4 * hidden
        elif family == "minimax_m3_vl_text":
            size = config.dense_intermediate_size
        else:
            size = _need(config, "intermediate_size", "ffn_dim", "dff")
        return {"mlp": matrices * hidden * size + layer_embeddings}
    expert = 3 * hidden * _need(config, "moe_intermediate_size", "intermediate_size")
    experts = _routed_experts(config)
    return {
        "experts": active * expert + _shared_experts(config, expert) + hidden * experts,
        "idle_experts": (experts - active) * expert,
    }


def _feed_forward_of_its_own(config: Any, index: int) -> dict[str, int]:
    """Return the weights of feed-forward layers in families with other names or shapes."""
    hidden, family, experts = config.hidden_size, _family(config), _routed_experts(config)
    dense = 3 * hidden * config.intermediate_size
    if family == "lfm2":
        if not config.block_auto_adjust_ff_dim:
            return {"mlp": dense}
        multiple = config.block_multiple_of
        size = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
        return {"mlp": 3 * hidden * -(-size // multiple) * multiple}
    if family == "nemotron_h":
        kind = _kind(config, index)
        if kind != "moe":
            return {"mlp": 2 * hidden * config.intermediate_size if kind == "mlp" else 0}
        latent = config.moe_latent_size or hidden
        expert = 2 * latent * config.moe_intermediate_size
        around = 2 * hidden * latent if config.moe_latent_size else 0
        shared = 2 * hidden * config.moe_shared_expert_intermediate_size
        return _expert_weights(config, expert, hidden * experts + around + shared)
    if family == "granitemoehybrid":
        shared = 3 * hidden * config.shared_intermediate_size
        if not experts:
            return {"mlp": shared}
        return _expert_weights(config, dense, hidden * experts + shared)
    if family == "jamba":
        if not _chosen(config, index):
            return {"mlp": dense}
        return _expert_weights(config, dense, hidden * experts)
    if not _chosen(config, index):  # Llama 4
        return {"mlp": 3 * hidden * config.intermediate_size_mlp}
    return _expert_weights(config, dense, hidden * experts + dense)


def _expert_weights(config: Any, expert: int, others: int) -> dict[str, int]:
    """Return the weights of a layer with experts: those chosen for each token, and those idle."""
    chosen, experts = config.num_experts_per_tok, _routed_experts(config)
    return {"experts": chosen * expert + others, "idle_experts": (experts - chosen) * expert}


def _routed_experts(config: Any) -> int:
    return _first(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def _chosen(config: Any, index: int) -> int:
    """Return how many routed experts a layer chooses for a token; 0 if it is dense."""
    if not _routed_experts(config) or not _has_experts(config, index):
        return 0
    chosen = _need(config, "num_experts_per_tok", "moe_topk")
    return int(chosen[index] if isinstance(chosen, list | tuple) else chosen)


def _shared_experts(config: Any, expert: int) -> int:
    hidden, family = config.hidden_size, _family(config)
    if family == "hunyuan_v1_moe":
        return int(3 * hidden * config.intermediate_size)
    if size := _first(config, "shared_expert_intermediate_size", "shared_intermediate_size"):
        gate = 0 if family in ("laguna", "granitemoeshared", "minimax_m3_vl_text") else hidden
        return int(3 * hidden * size + gate)
    return expert * _first(
        config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    )


def _first(config: Any, *names: str) -> int:
    """Return the first attribute that is above 0, or 0."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _has_experts(config: Any, index: int) -> bool:
    family = _family(config)
    if family == "nemotron_h":
        return _kind(config, index) == "moe"
    if family == "jamba":  # with a single expert, its layers are dense
        sparse = index % config.expert_layer_period == config.expert_layer_offset
        return bool(_routed_experts(config) > 1 and sparse)
    if family == "llama4_text":
        return index in config.moe_layers
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
