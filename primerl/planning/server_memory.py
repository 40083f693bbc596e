"""The memory plan of an inference server's GPUs: published weights, and the KV cache."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import (
    Quantizer,
    converted,
    distinct_tensors,
    layers_of,
    wire_dtypes,
)
from primerl._common.expert_modules import expert_modules
from primerl.flops import layer_configs
from primerl.planning.trainer_memory import GIB

KVDtype = Literal["auto", "fp8"]
# vLLM quantizes latents and indexers' keys with one float32 scale per this many entries.
QUANTIZED = 128
_NUMBER = re.compile(r"\d+")


@attrs.frozen(kw_only=True)
class ServerPlan:
    """The memory of a server's GPU, or the reason why the server can't run."""

    gpus: int
    ep: int
    weights: int
    """Bytes of weights per GPU: its share of the experts, and all other weights."""
    published: int
    """Bytes of all weights, as one publication."""
    kv_token: int
    """Bytes of KV cache per token: keys, values and an indexer's keys."""
    kv_asked: int
    """Bytes of KV cache per GPU for ``max_num_seqs`` sequences of ``max_model_len`` tokens."""
    kv_room: int
    """Bytes per GPU that are left for the KV cache; vLLM preempts sequences that don't fit."""
    kv_tokens: int
    """Number of tokens per GPU whose KV cache fits."""
    refusal: str | None = None
    """The constraint that the server violates; None if it fits."""


def plan_server(
    model: nn.Module,
    *,
    gpus: int,
    ep: int = 1,
    max_model_len: int,
    max_num_seqs: int,
    gpu_bytes: int,
    gpu_memory_utilization: float = 0.9,
    reserved: int = 0,
    kv_cache_dtype: KVDtype = "auto",
    quantize: Quantizer | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ServerPlan:
    """Plan the memory of a server with data-parallel attention and ``ep`` ranks of experts.

    Args:
        model: the model before it is sharded, on the ``meta`` device.
        gpus: the number of GPUs of the server.
        ep: the number of ranks that share the experts of a layer.
        max_model_len: the maximum number of tokens of a sequence.
        max_num_seqs: the number of concurrent sequences per GPU.
        gpu_bytes: memory per GPU.
        gpu_memory_utilization: the fraction of it that vLLM uses.
        reserved: bytes of this fraction that are neither weights nor KV cache, such as activations.
        kv_cache_dtype: ``"auto"`` for 16 bits, or ``"fp8"``.
        quantize: quantizes the published weights: ``fp8.CheckpointQuantizer``. None: not quantized.
        dtype: dtype of weights that are not quantized.

    Raises:
        ValueError: the size of keys and values can't be derived from the model's config.
    """
    experts, others = published_bytes(model, dtype=dtype, quantize=quantize)
    weights = -(-experts // ep) + others
    token = kv_bytes(model.config, kv_cache_dtype)
    asked = max_model_len * max_num_seqs * token
    room = int(gpu_bytes * gpu_memory_utilization) - reserved - weights
    counts = {len(next(module.parameters())) for module in expert_modules(model).values()}
    refusal = None
    if gpus % ep:
        refusal = f"experts: ep={ep} does not divide the server's {gpus} GPUs"
    elif any(count % ep for count in counts):
        refusal = f"experts: {max(counts)} experts are not divisible by ep={ep}"
    elif room < 0:
        refusal = (
            f"memory: weights take {weights / GIB:.1f} GiB, but vLLM uses only "
            f"{gpu_bytes * gpu_memory_utilization / GIB:.1f} GiB of a GPU"
        )
    elif room < max_model_len * token:
        refusal = (
            f"memory: a sequence of {max_model_len} tokens takes {max_model_len * token / GIB:.1f} "
            f"GiB of KV cache, but weights leave only {room / GIB:.1f}"
        )
    return ServerPlan(
        gpus=gpus,
        ep=ep,
        weights=weights,
        published=experts + others,
        kv_token=token,
        kv_asked=asked,
        kv_room=room,
        kv_tokens=max(room, 0) // token,
        refusal=refusal,
    )


def published_bytes(
    model: nn.Module, *, dtype: torch.dtype, quantize: Quantizer | None = None
) -> tuple[int, int]:
    """Return the published bytes of routed experts, and of all other weights."""
    layers = published_layers(model, dtype=dtype, quantize=quantize)
    return sum(experts for experts, _ in layers), sum(others for _, others in layers)


def published_layers(
    model: nn.Module, *, dtype: torch.dtype | None, quantize: Quantizer | None = None
) -> list[tuple[int, int]]:
    """Return the published bytes of routed experts and of other weights, for each layer.

    Sizes are those of ``checkpoint_tensors``, and layers those of ``layers_of``. Layers with equal
    tensors are converted once, and all are counted. With ``dtype=None``, parameters keep theirs.
    """
    dtypes = wire_dtypes(model, dtype, quantize)
    tensors = {
        name: tensor.to("meta", dtypes[name]) for name, tensor in distinct_tensors(model).items()
    }
    modules = tuple(f"{name}." for name in expert_modules(model))
    known: dict[Any, int] = {}
    layers = []
    for names in layers_of(tensors):
        experts = others = 0
        for name in names:
            tensor = tensors[name]
            kind = (_NUMBER.sub("*", name), tensor.shape, tensor.dtype)
            if kind not in known:
                known[kind] = sum(one.nbytes for one in _sent(model, name, tensor, quantize))
            if name.startswith(modules):
                experts += known[kind]
            else:
                others += known[kind]
        layers.append((experts, others))
    return layers


def _sent(
    model: nn.Module, name: str, tensor: Tensor, quantize: Quantizer | None
) -> Iterator[Tensor]:
    seen: dict[Any, list[Tensor]] = {}
    for own, piece in converted(model, {name: tensor}).items():
        kind = (_NUMBER.sub("*", own), piece.shape)
        if kind not in seen:
            seen[kind] = [piece] if quantize is None else [*quantize(own, piece).values()]
        yield from seen[kind]


def kv_bytes(config: Any, kv_cache_dtype: KVDtype = "auto") -> int:
    """Return the bytes of KV cache per token in vLLM 0.32, over all layers.

    Latent attention keeps a latent and a rotated key, in FP8 with one byte per number. With an
    indexer, FP8 means FlashMLA's sparse format: the latent with its scales, the rotated key in 16
    bits, and the indexer's key in FP8 with its scale.

    Raises:
        ValueError: the config has neither sizes of keys and values nor of latents.
    """
    text = config.get_text_config()
    layers = text.num_hidden_layers
    number = 1 if kv_cache_dtype == "fp8" else 2
    if getattr(text, "kv_lora_rank", None) is None:
        return number * sum(2 * _key_size(layer) for layer in layer_configs(text))
    latent, rope = text.kv_lora_rank, text.qk_rope_head_dim
    sparse = getattr(text, "index_topk", None) is not None
    each = number * (latent + rope)
    if sparse and kv_cache_dtype == "fp8":
        each = latent + 4 * (latent // QUANTIZED) + 2 * rope
    total = layers * each
    if sparse:
        kinds = getattr(text, "indexer_types", None) or ["full"] * layers
        size = text.index_head_dim
        total += sum(kind == "full" for kind in kinds) * (size + 4 * (size // QUANTIZED))
    return int(total)


def _key_size(layer: Any) -> int:
    """Return how many numbers a token's keys have in a layer, over all heads."""
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return int(size * heads)
