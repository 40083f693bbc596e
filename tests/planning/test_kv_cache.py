"""Bytes of KV cache by hand and in transformers: windows, linear attention, unknown families."""

import pytest
import torch
import transformers

from primerl import flops
from primerl.planning.kv_cache import kv_bytes, kv_read
from primerl.testing.families import tiny_config, tiny_family

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


@pytest.mark.parametrize(
    ("family", "settings", "layers"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, 2),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2}, 2),
        (
            "nemotron_h",
            {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
            1,
        ),
    ],
)
def test_layers_without_attention_keep_no_bytes(family, settings, layers):
    config = config_of(family, **settings)
    assert kv_bytes(config, tokens=100) == layers * LAYER * 100
    assert kv_read(config, tokens=100) == layers * LAYER * 100


def test_layers_with_windows_may_have_other_heads_and_values():
    kinds = ["full_attention", "sliding_attention"] * 2
    config = config_of("mimo_v2_flash", v_head_dim=8, sliding_window=8, layer_types=kinds)
    full, windowed = 2 * 2 * (16 + 8), 2 * 4 * (16 + 8)
    assert kv_bytes(config, tokens=100) == 2 * (full * 100 + windowed * 8)


TOKENS = 6  # shorter than the windows and chunks of tiny models


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", sorted(flops.FAMILIES))
def test_a_sequence_keeps_what_the_cache_of_transformers_keeps(family):
    try:
        config = tiny_config(family)
        planned = kv_bytes(config, tokens=TOKENS)
    except ValueError as error:
        pytest.skip(str(error))
    if getattr(config.get_text_config(), "kv_lora_rank", None) is not None:
        pytest.skip("transformers expands latents before it keeps them")
    model = tiny_family(family).eval()
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True).past_key_values

    tensors = [getattr(one, name, None) for one in cache.layers for name in ("keys", "values")]
    kept = sum(x.numel() for x in tensors if x is not None)
    assert kept > 0
    assert planned == 2 * kept  # in 16 bits


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


@pytest.mark.parametrize(
    "family", ["t5", "bert", "mamba2", "recurrent_gemma", "minimax_m3_vl_text"]
)
def test_the_cache_of_other_models_is_not_guessed(family):
    config = transformers.AutoConfig.for_model(family)
    with pytest.raises(ValueError, match=r"can't be derived|is not supported|does not support"):
        kv_bytes(config)
