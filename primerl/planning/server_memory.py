"""The memory plan of an inference server's GPUs: published weights, and the KV cache."""

import re
from collections.abc import Iterator
from typing import Any

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
from primerl.planning.kv_cache import KVDtype, kv_bytes
from primerl.planning.trainer_memory import GIB

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
    """Bytes of KV cache per token of a sequence of ``max_model_len`` tokens, rounded up."""
    kv_asked: int
    """Bytes of KV cache per GPU for ``max_num_seqs`` sequences of ``max_model_len`` tokens."""
    kv_room: int
    """Bytes per GPU that are left for the KV cache; vLLM preempts sequences that don't fit."""
    kv_tokens: int
    """Number of tokens per GPU whose KV cache fits, in sequences of ``max_model_len`` tokens."""
    kv_cache_dtype: KVDtype = "auto"
    refusal: str | None = None
    """The constraint that the server violates; None if it fits."""

    def weights_of(self, workers: int) -> int:
        """Return the bytes of the published weights that so many consecutive GPUs need together."""
        elsewhere = self.published - self.weights  # the experts of all other GPUs
        others = min(workers, self.ep) - 1
        return self.weights + (elsewhere * others // (self.ep - 1) if others else 0)


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
        ValueError: an argument is out of range, or the size of keys and values can't be derived
            from the model's config.
    """
    _check(
        gpus=gpus,
        ep=ep,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_bytes=gpu_bytes,
    )
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}, expected above 0 and at most 1"
        )
    if reserved < 0:
        raise ValueError(f"reserved is {reserved}, expected at least 0 bytes")
    experts, others = published_bytes(model, dtype=dtype, quantize=quantize)
    weights = -(-experts // ep) + others
    sequence = kv_bytes(model.config, kv_cache_dtype, tokens=max_model_len)
    room = int(gpu_bytes * gpu_memory_utilization) - reserved - weights
    counts = {len(next(module.parameters())) for module in expert_modules(model).values()}
    refusal = None
    if gpus % ep:
        refusal = f"experts: ep={ep} does not divide the server's {gpus} GPUs"
    elif any(count % ep for count in counts):
        refusal = f"experts: {max(counts)} experts are not divisible by ep={ep}"
    elif room < 0:
        refusal = (
            f"memory: weights take {weights / GIB:.1f} GiB, and {reserved / GIB:.1f} GiB are "
            "allowed for activations and CUDA graphs, but vLLM uses only "
            f"{gpu_bytes * gpu_memory_utilization / GIB:.1f} GiB of a GPU"
        )
    elif room < sequence:
        refusal = (
            f"memory: a sequence of {max_model_len} tokens takes {sequence / GIB:.1f} GiB of KV "
            f"cache, but weights and allowances leave only {room / GIB:.1f}"
        )
    return ServerPlan(
        gpus=gpus,
        ep=ep,
        weights=weights,
        published=experts + others,
        kv_token=-(-sequence // max_model_len),
        kv_asked=max_num_seqs * sequence,
        kv_room=room,
        kv_tokens=max(room, 0) * max_model_len // max(sequence, 1),
        kv_cache_dtype=kv_cache_dtype,
        refusal=refusal,
    )


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}, expected at least 1")


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
