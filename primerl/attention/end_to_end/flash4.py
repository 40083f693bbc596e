"""Calls of FlashAttention 4, the package ``flash-attn-4``, for all spans at once."""

import functools
import importlib
import importlib.metadata
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from primerl.attention.end_to_end.interface import SpanInputs, equally_wide, narrowed, widened

MODULE = "flash_attn.cute.interface"
FORWARD_NAME = "flash_attn_varlen_func"
BACKWARD_NAME = "_flash_attn_bwd"  # the package exports no backward function under another name

# The arguments that are passed to FlashAttention 4 by name, and the order of the others.
_OF_BOTH = {"softmax_scale", "causal", "softcap", "deterministic"}
_OF_BOTH |= {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
_ARGUMENTS = {
    FORWARD_NAME: (["q", "k", "v"], {"window_size", "return_lse", *_OF_BOTH}),
    BACKWARD_NAME: (
        ["q", "k", "v", "out", "dout", "lse"],
        {"window_size_left", "window_size_right", *_OF_BOTH},
    ),
}


@functools.cache
def refusal() -> str | None:
    """Return why FlashAttention 4 can't be used; None if it can."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    try:
        library = _library()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"flash-attn-4 {version} can't be loaded: {type(error).__name__}: {error}"
    return signature_refusal(library, version)


def signature_refusal(library: Any, version: str) -> str | None:
    """Return which function or argument a version of FlashAttention 4 lacks; None if it has all."""
    for name, (in_order, by_name) in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is None:
            return f"flash-attn-4 {version} has no {name}"
        taken = list(inspect.signature(function).parameters)
        if taken[: len(in_order)] != in_order:
            return f"{name} of flash-attn-4 {version} does not take {', '.join(in_order)} first"
        missing = sorted(by_name - set(taken))
        if missing:
            return f"{name} of flash-attn-4 {version} does not take {', '.join(missing)}"
    return None


@functools.cache
def _library() -> ModuleType:
    return importlib.import_module(MODULE)


# FlashAttention 4 launches on the current device, which need not be that of the tensors.


def forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs and logsumexp."""
    q, k, v = _padded(x.q, x.k, x.v)
    longest, longest_keys = x.sizes
    with torch.no_grad(), torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        # Betas have returned two to five results.
        out, logsumexp, *_ = getattr(_library(), FORWARD_NAME)(
            *(q, k, v),
            cu_seqlens_q=x.layout.query_ends,
            cu_seqlens_k=x.layout.key_ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest_keys,
            softmax_scale=x.scaling,
            causal=True,
            window_size=(x.window - 1, 0) if x.window else (None, None),
            softcap=x.cap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            return_lse=True,
        )
    return out[..., : x.v.shape[-1]], logsumexp


def backward(x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values."""
    q, k, v = _padded(x.q, x.k, x.v)
    longest, longest_keys = x.sizes
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        found = getattr(_library(), BACKWARD_NAME)(
            *(q, k, v, widened(out, v.shape[-1]), widened(gradient, v.shape[-1]), logsumexp),
            softmax_scale=x.scaling,
            causal=True,
            softcap=x.cap,
            window_size_left=x.window - 1 if x.window else None,
            window_size_right=0 if x.window else None,
            cu_seqlens_q=x.layout.query_ends,
            cu_seqlens_k=x.layout.key_ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest_keys,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return narrowed(found[:3], x)


def _padded(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Make heads equally wide, but for the two sizes that the kernel computes as they are.

    Where several queries share a key, its gradient needs equal sizes, at least on Hopper.
    """
    as_they_are = (q.shape[-1], v.shape[-1]) == (192, 128)
    if as_they_are and (q.shape[1] == k.shape[1] or _is_blackwell(q.device)):
        return [q, k, v]
    return equally_wide(q, k, v)


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
