"""The bytes of a server's KV cache: kept for a sequence, and read to decode its next token."""

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

from primerl import flops

KVDtype = Literal["auto", "fp8"]
# vLLM quantizes latents and indexers' keys with one float32 scale per this many entries.
QUANTIZED = 128


def kv_bytes(config: Any, kv_cache_dtype: KVDtype = "auto", *, tokens: int = 1) -> int:
    """Return the bytes of KV cache of a sequence in vLLM 0.32, over all layers.

    Latent attention keeps a latent and a rotated key, in FP8 with one byte per number. With an
    indexer, FP8 means FlashMLA's sparse format: the latent with its scales, the rotated key in 16
    bits, and the indexer's key in FP8 with its scale.

    Assumed: a layer with a sliding window or chunks keeps at most that many tokens, and blocks are
    not rounded up. Layers without attention (linear attention, state spaces, convolutions, or
    feed-forward layers) keep no bytes per token; their states, of one size per sequence, are not
    counted.

    Raises:
        ValueError: the size of the cache of this model can't be derived from its config.
    """
    layers = _layers(config, kv_cache_dtype)
    return sum(own * min(tokens, most) + indexed * tokens for own, most, indexed in layers)


def kv_read(config: Any, kv_cache_dtype: KVDtype = "auto", *, tokens: int) -> int:
    """Return the bytes of KV cache that are read to decode a token after ``tokens`` others.

    Layers read what they keep. With an indexer, they read all of its keys, but only the top-k
    latents.

    Raises:
        ValueError: as for ``kv_bytes``.
    """
    chosen = getattr(config.get_text_config(), "index_topk", None) or tokens
    layers = _layers(config, kv_cache_dtype)
    return sum(own * min(tokens, most, chosen) + indexed * tokens for own, most, indexed in layers)


def _layers(config: Any, kv_cache_dtype: KVDtype) -> Iterator[tuple[int, int, int]]:
    """Yield each layer's bytes of keys and values per token, and the most tokens that keep them.

    The third number is the bytes of an indexer's key per token.
    """
    if kv_cache_dtype not in get_args(KVDtype):
        expected = " or ".join(map(repr, get_args(KVDtype)))
        raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}, expected {expected}")
    text = config.get_text_config()
    family = getattr(text, "model_type", "")
    known = family in flops.FAMILIES or getattr(text, "layer_types", None)
    if family == "minimax_m3_vl_text":  # the format of its indexer's keys in vLLM is not known
        known = False
    if not known or not getattr(text, "num_attention_heads", None):
        raise ValueError(
            f"the KV cache of model_type {family!r} can't be derived from its config; expected "
            "another family of primerl.flops, or a config with layer_types and num_attention_heads"
        )
    for index, layer in enumerate(flops.layer_configs(text)):
        most = _kept_tokens(layer, index)
        yield (
            _token_bytes(layer, index, kv_cache_dtype) if most else 0,
            most,
            _indexer_bytes(layer, index) if most else 0,
        )


def _kept_tokens(config: Any, index: int) -> int:
    """Return the largest number of tokens of a sequence whose keys and values a layer keeps."""
    if not flops.keeps_keys(config, index):
        return 0
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] == "chunked_attention":
        return int(config.attention_chunk_size)
    keys = flops.visible_keys(config, index)
    return 2**63 if math.isinf(keys) else int(keys)


def _token_bytes(config: Any, index: int, kv_cache_dtype: KVDtype) -> int:
    number = 1 if kv_cache_dtype == "fp8" else 2
    latent = getattr(config, "kv_lora_rank", None)
    if latent is None:
        sizes = flops.head_sizes(config, index)
        return number * sizes.key_heads * (sizes.key + sizes.value)
    rope = config.qk_rope_head_dim
    if getattr(config, "index_topk", None) is not None and kv_cache_dtype == "fp8":
        return int(latent + 4 * (latent // QUANTIZED) + 2 * rope)
    return int(number * (latent + rope))


def _indexer_bytes(config: Any, index: int) -> int:
    if getattr(config, "index_topk", None) is None:
        return 0
    kinds = getattr(config, "indexer_types", None)
    if kinds and kinds[index] != "full":
        return 0
    return int(config.index_head_dim + 4 * (config.index_head_dim // QUANTIZED))
