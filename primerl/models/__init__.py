"""Loading of Hugging Face models, whole or in shards, and saving with or without adapters."""

from primerl._common.checkpoint_tensors import checkpoint_tensors
from primerl.models.adapters import adapter_targets, save_adapters
from primerl.models.pretrained import load_pretrained, save_pretrained, stop_token_ids
from primerl.models.sharded_loading import empty_model, load_shards
from primerl.models.tokenizers import refuse_other_tokenizer

__all__ = [
    "adapter_targets",
    "checkpoint_tensors",
    "empty_model",
    "load_pretrained",
    "load_shards",
    "refuse_other_tokenizer",
    "save_adapters",
    "save_pretrained",
    "stop_token_ids",
]
