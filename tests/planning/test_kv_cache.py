"""Bytes of KV cache by hand: windows, linear attention, and families that are not known."""

import pytest
import transformers

from primerl.planning.kv_cache import kv_bytes, kv_read

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LAYER = 2 * 2 * 2 * 16  # keys and values, 16 bits, heads, size of a head


def config_of(family, **changed):
    return transformers.AutoConfig.for_model(family, **SIZES | changed)


def test_a_layer_with_a_window_keeps_at_most_that_many_tokens():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = config_of("gpt_oss", sliding_window=8, layer_types=kinds)
    assert kv_bytes(config) == 4 * LAYER
    assert kv_bytes(config, tokens=100) == 2 * LAYER * (8 + 100)
    assert kv_read(config, tokens=100) == 2 * LAYER * (8 + 100)
    everywhere = config_of("mistral", sliding_window=8)
    assert kv_bytes(everywhere, tokens=100) == 4 * LAYER * 8


def test_a_layer_with_chunks_keeps_at_most_one():
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    config = config_of("llama4_text", attention_chunk_size=32, layer_types=kinds)
    assert kv_bytes(config, tokens=100) == LAYER * (3 * 32 + 100)


def test_linear_attention_keeps_no_bytes_per_token():
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = config_of("qwen3_next", layer_types=kinds)
    assert kv_bytes(config, tokens=100) == LAYER * 100
    assert kv_bytes(config, "fp8", tokens=100) == LAYER * 50


def test_an_indexer_reads_all_of_its_keys_and_the_chosen_latents():
    config = transformers.AutoConfig.for_model(
        "glm_moe_dsa",
        num_hidden_layers=2,
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        index_head_dim=128,
        index_topk=16,
    )
    latent, key = 2 * (256 + 32), 128 + 4
    assert kv_bytes(config, tokens=100) == 2 * 100 * (latent + key)
    assert kv_read(config, tokens=100) == 2 * (16 * latent + 100 * key)
    assert kv_read(config, tokens=10) == 2 * 10 * (latent + key)


@pytest.mark.parametrize("family", ["t5", "bert", "mamba2", "recurrent_gemma"])
def test_the_cache_of_other_models_is_not_guessed(family):
    config = transformers.AutoConfig.for_model(family)
    with pytest.raises(ValueError, match=r"can't be derived|is not supported|does not support"):
        kv_bytes(config)
