"""Attention function for Hugging Face models that attends within each packed document.

Documents lie end to end in one row of tokens, and no mask over the whole pack is ever built. A
document may share its first tokens with an earlier document, and then uses the keys and values of
that document.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl._common.optional import require
from primerl.attention.documents import Layout, batch_layout
from primerl.attention.kernels import attend

# Arguments of attention that do not affect which tokens are seen.
_IGNORED = frozenset({"position_ids", "logits_to_keep", "dropout"})
_LONGEST: ContextVar[int] = ContextVar("_LONGEST", default=0)
"""Number of tokens of the longest document on this rank, in the current forward pass."""
_PACKED: ContextVar[bool] = ContextVar("_PACKED", default=False)
"""Whether the current forward pass has several documents."""
# The dtype of a mask that only marks a batch as packed.
_PACKED_MARK = torch.int8


def switch_attention(model: nn.Module, name: str, attention: Any, mask: Any) -> None:
    """Register an attention with transformers, and switch a model to it.

    If the model can't be switched, transformers only warns.
    """
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


@contextmanager
def require_documents(documents: Layout | None, position_ids: Tensor) -> Iterator[None]:
    """Make attention raise, in this context, if it can't find the documents of a pack.

    It finds them if it receives ``documents`` or positions. Otherwise it would treat each row as
    one document. A pack of one document needs neither.
    """
    packed = documents is not None and len(documents.spans) > 1
    before = _PACKED.set(packed), _LONGEST.set(int(position_ids.max()) + 1)
    try:
        yield
    finally:
        _PACKED.reset(before[0])
        _LONGEST.reset(before[1])


def no_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_others: Any,
) -> Tensor | None:
    """Return no mask (None), or a mask whose presence makes packed attention raise an error.

    This is an entry of ``AttentionMaskInterface``. Attention must refuse a caller's padding and a
    window shorter than a document. Some models pass the window only in their mask, so this function
    returns a mask for such a window. (Other models request this mask but don't use it.)
    """
    if local_size is not None and _is_exceeded(local_size):
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return None if attention_mask is None or attention_mask.all() else attention_mask


def batch_mask(*_: Any, allow_is_causal_skip: bool = True, **others: Any) -> Tensor | None:
    """Return the mask of ``no_mask``; if that is None and the batch is packed, return a marker.

    This is an entry of ``AttentionMaskInterface``. ``transformers`` detects packed batches, and
    the marker tells attention functions that receive neither documents nor positions.
    """
    mask = no_mask(**others)
    # In a trace, transformers treats every batch as packed.
    packed = not (allow_is_causal_skip or torch.compiler.is_compiling() or _PACKED.get())
    if mask is None and packed:
        return torch.zeros(1, 1, 1, 1, dtype=_PACKED_MARK)
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_exceeded(window: int) -> bool:
    return _LONGEST.get() > window


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: Layout | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Entry of transformers' ``AttentionInterface``: causal attention within each document."""
    batch, _, length, _ = query.shape
    marked = attention_mask is not None and attention_mask.dtype == _PACKED_MARK
    computed = length == key.shape[2] and (attention_mask is None or marked)
    if documents is None and computed:
        documents = _layout_by_positions(module, asked.get("position_ids"), query, marked=marked)
    if documents is not None:
        refuse_other_attention(module, documents.max_keys, asked)
    if documents is None or not computed:
        raise ValueError(
            f"{type(module).__name__} got a mask, as for padding or for a window shorter than a "
            "document, or a cache; packed attention computes full causal attention. "
            "loss.model_logprobs switched this model to it: to generate or to pad, call "
            "model.set_attn_implementation('sdpa') first"
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    attended = attend(q, k, v, documents, scaling=scaling, dropout=dropout)
    return attended.reshape(batch, length, *attended.shape[1:]), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _layout_by_positions(
    module: nn.Module,
    position_ids: Int[Tensor, "_ t"] | None,
    query: Float[Tensor, "b heads t d"],
    *,
    marked: bool = False,
) -> Layout:
    """Find the documents of a batch, for attention that did not receive them.

    Some layers pass on only the positions, and do so again when the backward pass recomputes them.
    A switched model may also be called without packing. Then each row is one document, or several
    documents if its positions restart.
    """
    batch, _, length, _ = query.shape
    usable = position_ids is not None and position_ids.shape in ((1, length), (batch, length))
    if not usable and (marked or _PACKED.get()):
        raise ValueError(not_passed_on(module))
    if position_ids is None or not usable:
        position_ids = torch.arange(length).unsqueeze(0)
    return batch_layout(position_ids, batch, query.device)


def not_passed_on(module: nn.Module) -> str:
    """Return the error message for an attention module that did not receive the documents."""
    return (
        f"{type(module).__name__} does not receive the documents that its model was called with, "
        "because the model's layers don't pass on arguments that they don't know"
    )


def refuse_other_attention(module: nn.Module, longest: int, asked: dict[str, Any]) -> None:
    """Refuse arguments that ask for anything but full causal attention within each document.

    Examples are a window shorter than a document, sinks, sparse indices and capped scores.
    """
    window = asked.get("sliding_window")
    if window is not None and longest > window:
        raise ValueError(
            f"a document of {longest} tokens exceeds the attention window of {window}; packed "
            "attention computes full causal attention"
        )
    if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(
            f"{type(module).__name__} attends to later tokens too; packed attention is causal"
        )
    for name, value in asked.items():
        known = name in _IGNORED or name == "sliding_window" or value is None
        if not (known or isinstance(value, bool)):  # flags, such as use_cache
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which packed attention does not "
                "compute; use flash attention for this model"
            )
