"""Attention within each packed document: an attention function for Hugging Face models.

Documents lie end to end in one row of tokens, and no mask over the whole pack is ever built. A
document may share its first tokens with an earlier one, whose keys and values it then uses.
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

# Arguments of attention that say nothing about which tokens are seen.
_IGNORED = frozenset({"position_ids", "logits_to_keep", "dropout"})
_LONGEST: ContextVar[int] = ContextVar("_LONGEST", default=0)
"""Tokens of the longest document on this rank, in the forward pass that runs now."""
_PACKED: ContextVar[bool] = ContextVar("_PACKED", default=False)
"""Whether the forward pass that runs now has several documents."""
# The dtype of a mask that says only that rows are packed.
_PACKED_MARK = torch.int8


def switch_attention(model: nn.Module, name: str, attention: Any, mask: Any) -> None:
    """Register an attention with transformers and switch a model to it; only warns if it can't."""
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


@contextmanager
def require_documents(documents: Layout | None, position_ids: Tensor) -> Iterator[None]:
    """Within it, attention that is not given ``documents`` raises if there are several.

    It would otherwise take their rows for those of one document.
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
    """An entry of ``AttentionMaskInterface``: no mask, or one that attention will refuse.

    It will refuse a caller's padding, and a window shorter than a document, which some models have
    in their mask only. (Others ask for such a mask and don't use it.)
    """
    if local_size is not None and _is_exceeded(local_size):
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return None if attention_mask is None or attention_mask.all() else attention_mask


def batch_mask(*_: Any, allow_is_causal_skip: bool = True, **others: Any) -> Tensor | None:
    """As ``no_mask``, and a mark where ``transformers`` detects a packed batch.

    Attention that is given neither documents nor positions can't know otherwise.
    """
    mask = no_mask(**others)
    # In a trace, transformers takes every batch for packed.
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
    """Causal attention within each document: an entry of transformers' ``AttentionInterface``."""
    batch, _, length, _ = query.shape
    marked = attention_mask is not None and attention_mask.dtype == _PACKED_MARK
    computed = length == key.shape[2] and (attention_mask is None or marked)
    if documents is None and computed:
        documents = _layout_by_positions(module, asked.get("position_ids"), query, marked=marked)
    if documents is not None:
        refuse_other_attention(module, documents.max_keys, asked)
    if documents is None or not computed:
        raise ValueError(
            f"{type(module).__name__} attends by a mask, such as a window shorter than a document, "
            "or by a cache; packed attention computes full causal attention. "
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
    """The documents of a batch, for attention that was not given them.

    Some layers pass on positions only, also where they are recomputed in the backward pass. And a
    switched model may be called without any packing: each row is then a document, or several if its
    positions begin again.
    """
    batch, _, length, _ = query.shape
    usable = position_ids is not None and position_ids.shape in ((1, length), (batch, length))
    if not usable and (marked or _PACKED.get()):
        raise ValueError(not_passed_on(module))
    if position_ids is None or not usable:
        position_ids = torch.arange(length).unsqueeze(0)
    return batch_layout(position_ids, batch, query.device)


def not_passed_on(module: nn.Module) -> str:
    """The error message for a module that was not given the documents."""
    return (
        f"{type(module).__name__} is not given the documents that its model was called with, "
        "because the model's layers don't pass on arguments that they don't know"
    )


def refuse_other_attention(module: nn.Module, longest: int, asked: dict[str, Any]) -> None:
    """Refuse arguments that ask for more than full causal attention within each document.

    Such as a window shorter than a document, sinks, sparse indices or capped scores.
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
