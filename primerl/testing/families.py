"""Tiny versions of any causal language model family of transformers, for tests.

``tiny_family`` keeps the structure of a family (kinds of layers, grouped heads, latent attention,
shared experts, groups of experts, biases, tied embeddings) and shrinks every size.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from primerl._common.multimodal import auto_class, freeze_encoders
from primerl._common.optional import require

VOCABULARY = 96
HEADS = 4
# Errors that other libraries' constructors and models raise.
BUILD_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                RuntimeError, TypeError, ValueError)  # fmt: skip
MAX_PARAMETERS = 4_000_000

# The maximum of each size; settings that a family lacks are left out.
_LARGEST: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("emb_dim", "embedding_dim", "hidden_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "dff", "dim_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "router_hidden_size"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("global_head_dim", "swa_v_head_dim", "attention_head_size"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "index_head_dim", "kv_channels", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_headdim", "dim_head", "d_head"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "rotary_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "linear_conv_kernel_dim"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "d_rel"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("query_pre_attn_scalar", "laurel_rank", "adapter_rank"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "heads_per_ngram", "n_groups"), 2),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "num_mem_heads"), 8),
    **dict.fromkeys(("mamba_d_ssm", "d_inner"), 128),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("moe_topk", "moe_k", "moe_top_k", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_interval", "decoder_sparse_step"), 1),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "o_groups"), 2),
    **dict.fromkeys(("global_attn_every_n_layers", "no_rope_layer_interval"), 2),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), 2),
    **dict.fromkeys(("hc_mult", "hc_count", "num_layers_per_stack", "max_window_layers"), 2),
    **dict.fromkeys(("ngram_vocab_size_base", "split_ngram_parts", "ple_embed_dim"), 128),
    **dict.fromkeys(("vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    # Windows are shorter than a test's documents, and fewer keys are chosen than documents have.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("out_hidden_size", "num_position_embeddings"), 64),  # of encoders
    "projector_hidden_size": 64,
    "depth": 2,
    "floor_scale": 4,  # of positions that change the scale of queries
    **dict.fromkeys(("index_topk", "indexer_budget"), 8),
    "index_n_heads": 8,  # with fewer, many keys tie at a score of exactly 0
    **dict.fromkeys(("index_block_size", "index_topk_blocks"), 2),
}
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
          "decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads",
          "num_encoder_attention_heads", "swa_num_attention_heads")  # fmt: skip
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads",
              "num_global_key_value_heads", "n_head_kv")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
           "num_decoder_layers", "num_blocks")  # fmt: skip
_LAYER_LISTS = ("moe_layers", "mlp_only_layers", "hybrid_layer_ids", "full_attn_idxs",
                "cross_attention_layers", "ple_layer_ids")  # fmt: skip

# Settings that configuration classes leave unset, although all released models set them.
_UNSET: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
}
# The delta rule's output for a first token is normalized, though it may be near 0. A larger epsilon
# keeps this from amplifying rounding without bounds. docs/families.md says so.
_CONDITIONED: dict[str, Any] = {"rms_norm_eps": 1e-2}
# A block that two layers share.
_SHARED_BLOCK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
}
_USUAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"), _CONDITIONED
    ),
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"mamba_d_head": 16},
    "flex_olmo": {"num_experts": 8},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            }
        }
    },
    "zamba": {**_SHARED_BLOCK, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {
        **_SHARED_BLOCK,
        "hybrid_layer_ids": [1, 2],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}


def tiny_config(source: str | os.PathLike[str], **settings: Any) -> Any:
    """Make the configuration of a family's tiny version; if multimodal, of its language model.

    Args:
        source: a ``model_type``; or a class such as ``"Gemma3ForConditionalGeneration"``, for the
            model with encoders of a family that also has a class without; or a model folder (its
            ``config.json`` is read, not its weights).
        settings: settings that override the tiny ones.

    Raises:
        ValueError: there is no such family or folder, it has no causal language model, or no tiny
            version can be made.
    """
    config = full_config(source)
    small = _shrunk(config.to_dict())
    alias = type(config).attribute_map  # some settings have two names
    small = {alias.get(name, name): value for name, value in small.items()}
    settings = {alias.get(name, name): value for name, value in settings.items()}
    small.pop("quantization_config", None)
    if not Path(source, "config.json").is_file():
        unset = {k: v for k, v in _UNSET.items() if small.get(k, 0) is None}
        small |= unset | _USUAL.get(config.model_type, {})
        text = small.get("text_config")  # of a model with encoders
        if text:
            small["text_config"] = {**text, **_USUAL.get(text["model_type"], {})}
    try:
        return type(config).from_dict({**small, **settings})
    except _config_errors() as error:
        raise ValueError(f"no tiny version of {os.fspath(source)}: {error}") from error


def full_config(source: str | os.PathLike[str]) -> Any:
    """Load the configuration of a family's language model, in full size.

    It includes encoders if a folder's checkpoint or the class has them, or if the family always has
    them.

    The arguments and errors are those of ``tiny_config``.
    """
    transformers = require("transformers", extra="transformers")
    name, folder = os.fspath(source), Path(source)
    with_encoders = _kinds_with_encoders()
    if (folder / "config.json").is_file():
        config = _made(transformers.AutoConfig.from_pretrained, name, trust_remote_code=False)
    elif name in with_encoders:
        made = transformers.AutoConfig.for_model
        config = _made(made, with_encoders[name], architectures=[name])
    elif name not in transformers.CONFIG_MAPPING:
        if folder.exists() or "/" in name or os.sep in name:
            raise ValueError(f"{name} is not a model folder: it has no config.json")
        raise ValueError(f"transformers {transformers.__version__} knows no model_type {name!r}")
    else:
        config = _made(transformers.AutoConfig.for_model, name)
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    multimodal = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in causal and type(config) not in multimodal:
        raise ValueError(f"transformers has no causal language model of {config.model_type}")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder with a decoder; expected a decoder")
    if auto_class(config) is not transformers.AutoModelForCausalLM:
        return config
    text = config.get_text_config(decoder=True)
    return text if type(text) in causal else config


def _kinds_with_encoders() -> dict[str, str]:
    """Return the ``model_type`` of each class with encoders of images."""
    auto = require("transformers.models.auto.modeling_auto", extra="transformers")
    names: dict[str, Any] = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kinds: dict[str, str] = {}
    for kind, made in names.items():
        if isinstance(made, str):
            kinds.setdefault(made, kind)  # other kinds, such as shieldgemma2, share a class
    return kinds


def _made(make: Callable[..., Any], name: str, **options: Any) -> Any:
    try:
        return make(name, **options)
    except _config_errors() as error:
        raise ValueError(f"{name} has no configuration that can be read: {error}") from error


def _config_errors() -> tuple[type[Exception], ...]:
    strict = require("huggingface_hub.errors", extra="transformers").StrictDataclassError
    return (strict, AttributeError, LookupError, OSError, TypeError, ValueError)


def tiny_family(source: str | os.PathLike[str], *, seed: int = 0, **settings: Any) -> Any:
    """Make a family's tiny model in float32, ready to train, without dropout.

    Parameters are drawn so that each has an effect: matrices keep the scale of their inputs, and
    norms, biases and routing biases differ from 1 and 0. A model freshly initialized by
    transformers could pass tests that a trained model fails.

    Args:
        source: as in ``tiny_config``, which raises the same errors.
        seed: seed of the parameters; the global generator is not used.
        settings: settings that override those of the tiny configuration.
    """
    import torch

    config = tiny_config(source, **settings)
    with torch.device("meta"):
        size = _built(config, source).num_parameters()
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"no tiny version of {os.fspath(source)}: {size:,} parameters remain, which is too many"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _built(config, source).float().train()
        freeze_encoders(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("bias") and buffer.is_floating_point():
                    buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def refuse_full_size(source: str | os.PathLike[str]) -> None:
    """Refuse a family if its full-size model, built on the meta device, can't be packed.

    Called for families without a tiny version, to give the better reason.

    Raises:
        ValueError: the error that ``parallel.shard`` would raise.
    """
    import torch

    from primerl.attention.admission import refuse_unpackable

    with torch.device("meta"):
        model = _built(full_config(source), source)
    refuse_unpackable(model)


def _built(config: Any, source: Any) -> Any:
    try:
        return auto_class(config).from_config(config)
    except BUILD_ERRORS as error:
        raise ValueError(
            f"no tiny version of {os.fspath(source)}: {type(error).__name__}: {error}"
        ) from error


def _shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Shrink the settings of a configuration."""
    small = {name: _smaller(name, value) for name, value in config.items()}
    for name in _HEADS:
        if isinstance(config.get(name), int):
            small[name] = min(config[name], HEADS)
    heads = max((config[name] for name in _HEADS if isinstance(config.get(name), int)), default=0)
    for name in _KEY_HEADS:
        if isinstance(config.get(name), int) and config[name] > 1:
            small[name] = min(HEADS if config[name] == heads else HEADS // 2, config[name])
    if config.get("vocab_size"):
        small["vocab_size"] = min(config["vocab_size"], VOCABULARY)
    if "qk_head_dim" in small:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if small.get("n_group", 1) == 1 and "topk_group" in small:
        small["topk_group"] = 1
    if config.get("model_type") == "glm4v_moe_text":  # whose default is that of its full size
        small["rope_parameters"] = {**small["rope_parameters"], "mrope_section": [2, 1, 1]}
    return small | _fewer_layers(config, small)


def _fewer_layers(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the layers to one of each kind, in order, but at least two."""
    name = next((name for name in _LAYERS if isinstance(config.get(name), int)), None)
    if name is None:
        return {}
    depth = config[name]
    per_layer = {
        key: value
        for key, value in config.items()
        if isinstance(value, list | tuple) and len(value) == depth and depth > 2
    }
    kind_lists = [v for v in per_layer.values() if isinstance(v[0], str) or set(v) <= {0, 1}]
    kinds = [tuple(str(value[layer]) for value in kind_lists) for layer in range(depth)]
    kept = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    shared = int(bool(config.get("num_kv_shared_layers"))) * len(kept)
    if shared:
        kept = kept * 2
    elif len(kept) == 1:
        kept = [0, min(1, depth - 1)][: max(depth, 1)]
    fewer: dict[str, Any] = {key: [small[key][layer] for layer in kept] for key in per_layer}
    for layers in _LAYERS:
        if isinstance(config.get(layers), int):
            fewer[layers] = min(config[layers], len(kept))
    if shared:
        fewer["num_kv_shared_layers"] = shared
    if isinstance(config.get("moe_layer_end_index"), int):
        fewer["moe_layer_end_index"] = len(kept) - 1
    for key, value in config.items():
        if isinstance(value, list) and value and key not in per_layer and key in _LAYER_LISTS:
            fewer[key] = [layer for layer in value if layer < len(kept)]
        elif key == "per_layer_config" and value:
            by_layer = {int(layer): settings for layer, settings in value.items()}
            fewer[key] = {
                str(new): {k: _smaller(k, v) for k, v in by_layer[old].items()}
                for new, old in enumerate(kept)
                if old in by_layer
            }
    return fewer


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float) and ("drop" in name or "jitter" in name):
        return type(value)(0)
    if name.endswith("token_id") or name in ("mask_index", "unk_index"):
        if isinstance(value, list):
            return [token % VOCABULARY for token in value]
        return value % VOCABULARY if value >= 0 else value
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        largest = _LARGEST.get(name, HEADS if name.startswith("num_attention_heads") else None)
        return value if largest is None else [min(v, largest) for v in value]
    if isinstance(value, Mapping) and name in ("rope_parameters", "rope_scaling"):
        return {k: _smaller_rotary(value, k, v) for k, v in value.items()}
    if isinstance(value, int) and name in _LARGEST:
        return min(value, _LARGEST[name])
    if isinstance(value, Mapping) and name.endswith("_config") and name != "quantization_config":
        return _shrunk(value)
    return value


def _smaller_rotary(rope: Mapping[str, Any], name: str, value: Any) -> Any:
    """Cut rotary factors to the number of rotated pairs of heads of size 16."""
    pairs = int(16 * (rope.get("partial_rotary_factor") or 1.0)) // 2
    if name == "mrope_section":  # pairs for time, height and width
        return [pairs // 2, pairs // 4, pairs // 4]
    return value[:pairs] if name in ("short_factor", "long_factor") else value
