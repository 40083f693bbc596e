"""Attention function for Hugging Face models that attends within each packed document.

Documents lie end to end in one row of tokens, and no mask over the whole pack is ever built. A
document may share its first tokens with an earlier document, and then uses the keys and values of
that document.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl._common.optional import require
from primerl.attention.documents import Layout, batch_layout, token_positions
from primerl.attention.kernels import attend

# Arguments of attention that do not affect which tokens are seen.
_IGNORED = frozenset({"position_ids", "logits_to_keep", "dropout"})
_PACKED: ContextVar[bool] = ContextVar("_PACKED", default=False)
"""Whether the current forward pass has several documents."""
# Arguments of some models' attention that ``attend`` computes.
_COMPUTED = frozenset({"sliding_window", "softcap", "s_aux"})
# The dtype of a mask that only carries ``AttentionLimits`` in its shape.
_MARK = torch.int8
SWITCH_BACK = (
    "loss.model_logprobs switched this model to it: to generate or to pad, call "
    "model.set_attn_implementation('sdpa') first, or 'eager' if the model has no 'sdpa'"
)


def switch_attention(model: nn.Module, name: str, attention: Any, mask: Any) -> None:
    """Register an attention with transformers, and switch a model to it.

    If the model can't be switched, transformers only warns.
    """
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


@contextmanager
def require_documents(documents: Layout | None) -> Iterator[None]:
    """Make attention raise, in this context, if it can't find the documents of a pack.

    It finds them if it receives ``documents`` or positions. Otherwise it would treat each row as
    one document. A pack of one document needs neither.
    """
    before = _PACKED.set(documents is not None and len(documents.spans) > 1)
    try:
        yield
    finally:
        _PACKED.reset(before)


def is_packed() -> bool:
    """Whether the current forward pass has several documents."""
    return _PACKED.get()


class AttentionLimits(NamedTuple):
    """The limits of a layer's attention: a window, or the length of chunks."""

    window: int | None = None
    chunk: int | None = None
    packed: bool = False
    """Whether ``transformers`` found several documents in a row of the batch."""


def limits_as_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **_others: Any,
) -> Tensor | None:
    """Return a mask whose shape says a layer's window or chunks, or the caller's padding.

    This is an entry of ``AttentionMaskInterface``. The shape is ``[1, kind, packed, size]``, where
    the kind is 2 for chunks. Without a window and without several documents, the mask is None.
    Windows are read from here, because some models pass them to attention only in their mask.
    """
    if attention_mask is not None and not attention_mask.all():
        return attention_mask
    # In a trace, transformers treats every batch as packed.
    packed = not (allow_is_causal_skip or torch.compiler.is_compiling() or _PACKED.get())
    if local_size is None and not packed:
        return None
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return torch.zeros(1, 1 + chunked, int(packed), local_size or 0, dtype=_MARK)


def read_limits(module: nn.Module, mask: Tensor | None) -> AttentionLimits:
    """Return the limits that ``limits_as_mask`` wrote into the shape of a mask.

    Raises:
        ValueError: it is another mask, as of padding.
    """
    if mask is None:
        return AttentionLimits()
    if mask.dtype != _MARK:
        raise ValueError(
            f"{type(module).__name__} got a mask of shape {list(mask.shape)}, as for padding; "
            f"packed attention has no masks. {SWITCH_BACK}"
        )
    _, kind, packed, size = mask.shape
    return AttentionLimits(
        window=size if size and kind == 1 else None,
        chunk=size if size and kind == 2 else None,
        packed=bool(packed),
    )


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
    limits = read_limits(module, attention_mask)
    if length != key.shape[2]:
        raise ValueError(
            f"{type(module).__name__} got a cache of keys; packed attention has none. {SWITCH_BACK}"
        )
    if documents is None:
        documents = _layout_by_positions(
            module, asked.get("position_ids"), query, marked=limits.packed
        )
    options = attention_options(module, documents.max_keys, limits, asked)
    query = scaled_by_position(module, query, lambda: documents)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    attended = attend(q, k, v, documents, scaling=scaling, dropout=dropout, **options)
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


def not_passed_on(module: nn.Module | type) -> str:
    """Return the error message for a module, or its class, that did not receive the documents."""
    kind = module if isinstance(module, type) else type(module)
    return (
        f"{kind.__name__} does not receive the documents that its model was called with, "
        "because the model's layers don't pass on arguments that they don't know"
    )


def attention_options(
    module: nn.Module, longest: int, limits: AttentionLimits, asked: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``attend`` for what a layer's mask and arguments ask for.

    Args:
        module: the layer's attention module.
        longest: number of tokens of the longest document.
        limits: the limits that the layer's mask says.
        asked: the arguments that the module passes to its attention function.

    Raises:
        ValueError: the layer asks for something that packed attention does not compute, such as
            sparse indices, or its mask and its arguments name different windows.
    """
    window = asked.get("sliding_window")
    if window is not None and min(window, longest) != min(limits.window or longest, longest):
        raise ValueError(
            f"{type(module).__name__} has a window of {window} keys, but its mask has "
            f"{limits.window or 'none'}; packed attention cannot say which of them is right"
        )
    others = {name: value for name, value in asked.items() if name not in _COMPUTED}
    refuse_other_attention(module, longest, others)
    return {
        "window": limits.window,
        "chunk": limits.chunk,
        "softcap": asked.get("softcap"),
        "sinks": asked.get("s_aux"),
    }


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _scales(module: Any, layout: Layout, like: Tensor) -> Tensor:
    batch, _, length, _ = like.shape
    right = token_positions(layout.plan, layout.spans, like.device).view(batch, length)
    both = torch.stack([right, torch.arange(length, device=like.device).expand_as(right)])
    steps = torch.floor((both.float() + 1) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1
    ratios: Tensor = scales[0] / scales[1]
    return ratios[:, None, :, None]


def scaled_by_position(
    module: nn.Module, query: Float[Tensor, "b heads t d"], own: Callable[[], Layout]
) -> Float[Tensor, "b heads t d"]:
    """Correct the scales of Llama 4's queries, which count positions in the whole row of tokens.

    Its layers without rotary embeddings scale queries by a function of the position, and take the
    position from the place in the row. Other models' queries are returned as they are.

    Args:
        module: the layer's attention module.
        query: the queries of this rank.
        own: returns the layout of the spans in the rank's rows.
    """
    scales = getattr(module, "attn_temperature_tuning", False)
    if not scales or getattr(module, "use_rope", True):
        return query
    factors: Tensor = _scales(module, own(), query)
    scaled: Tensor = query * factors.to(query.dtype)
    return scaled


def refuse_other_attention(module: nn.Module, longest: int, asked: dict[str, Any]) -> None:
    """Refuse arguments that ask for anything but full causal attention within each document.

    Examples are a window shorter than a document, sinks, sparse indices and capped scores.
    """
    window = asked.get("sliding_window")
    if window is not None and longest > window:
        raise ValueError(
            f"a document of {longest} tokens exceeds the attention window of {window}; "
            f"{type(module).__name__} computes full causal attention"
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
