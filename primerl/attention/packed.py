"""Attention of packed documents, each to itself, for unmodified Hugging Face models.

Documents lie end to end in one row of tokens, and no mask over the whole pack is ever built. A
document may leave out tokens that it begins with and that an earlier one holds: their keys and
values are taken from there.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from primerl._optional import require
from primerl.attention.admission import (
    HARMLESS_LAYERS,
    layer_kinds,
    leaks,
    looks_ahead,
    not_computed,
)
from primerl.attention.documents import Document, Layout, attend, lay_out

PACKED_ATTENTION = "primerl_packed"
# An attention of this name knows where documents lie, on this rank and on others.
CONTEXT_ATTENTION = "primerl_context"
# These build a square mask over the whole pack; the per-document attention replaces them.
MASKED_ATTENTION = ("eager", "sdpa")
# An indexer chooses the keys that queries attend to (primerl.attention.sparse).
SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
# What a model may hand to its attention that says nothing about which tokens are seen.
_IGNORED = frozenset({"position_ids", "logits_to_keep", "dropout"})
_LONGEST: ContextVar[int] = ContextVar("_LONGEST", default=0)
"""Tokens of the longest document of the model that runs now, as far as this rank sees."""
_PACKED: ContextVar[bool] = ContextVar("_PACKED", default=False)
"""Whether a model runs on several documents."""
# The dtype of a mask that only says that rows are packed.
_NOTE_OF_PACKED_ROWS = torch.int8
# Found once for all layers. A key is a tensor, not its values, so no write may have followed.
_LAYOUTS = WeakTensorKeyDictionary()


def find_documents(position_ids: Int[Tensor, "*b t"]) -> tuple[Document, ...]:
    """The documents of a pack: one begins wherever a position does not follow the one before.

    One that begins at position n > 0 continues the first n tokens of the document before it, which
    may itself continue an earlier one. So documents that begin alike are the branches of a tree,
    laid out depth first. Of a batch, each row is a pack; their rows lie end to end.

    Raises:
        ValueError: the first position is not 0, or a document continues more tokens than there are.
    """
    if position_ids.numel() == 0 or position_ids[..., 0].any():
        raise ValueError(
            "position_ids must begin with 0: documents are packed whole, one after the other"
        )
    position_ids = position_ids.flatten()  # no row continues the one before, as each begins with 0
    jumps = position_ids[1:] != position_ids[:-1] + 1
    begins = [0, *((jumps.nonzero().flatten() + 1).tolist())]
    ends = [*begins[1:], position_ids.numel()]
    documents: list[Document] = []
    for begin, end, shared in zip(begins, ends, position_ids[begins].tolist(), strict=True):
        room = documents[-1].length if documents else 0
        if not 0 <= shared <= room:
            raise ValueError(
                f"position_ids[{begin}] is {shared}: a document that begins there continues the "
                f"one before it, which has {room} tokens"
            )
        prefix = _first_rows(documents[-1].keys, shared) if shared else ()
        documents.append(Document(begin, end, prefix))
    return tuple(documents)


def _first_rows(ranges: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, int], ...]:
    """The ranges that hold the first ``count`` rows of ``ranges``."""
    first = []
    for begin, end in ranges:
        if count > 0:
            first.append((begin, min(end, begin + count)))
            count -= end - begin
    return tuple(first)


def documents_of_batch(position_ids: Int[Tensor, "b t"]) -> tuple[Document, ...]:
    """As ``find_documents``, but rows that count on from any position may be whole documents."""
    batch, length = position_ids.shape
    if length and bool((position_ids.diff() == 1).all()):
        return tuple(Document(begin, begin + length) for begin in range(0, batch * length, length))
    return find_documents(position_ids)


def attend_by_document(model: nn.Module, position_ids: Int[Tensor, " t"]) -> Layout | None:
    """Switch a model that attends by ``sdpa`` or ``eager`` to attend document by document.

    One whose keys an indexer chooses also has them chosen document by document. Returns what its
    attention needs, as the model's argument ``documents``: nothing where the rows of a
    context-parallel model begin and end within documents, which it finds itself.

    Raises:
        ValueError: the model can't switch, its other layers carry state from one document into
            the next, or documents share tokens and it keeps an attention that can't.
    """
    config: Any = model.config
    if config._attn_implementation.startswith(CONTEXT_ATTENTION):
        return None
    documents = find_documents(position_ids)
    layout = lay_out(documents, position_ids.device)
    if is_sparse(model):
        from primerl.attention.sparse import attend_sparsely  # which builds on this module

        attend_sparsely(model)
        return layout
    if config._attn_implementation in MASKED_ATTENTION:
        transformers = require("transformers", extra="transformers")
        transformers.AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        transformers.AttentionMaskInterface.register(PACKED_ATTENTION, _mask_of_batch)
        switch: Callable[[str], None] = model.set_attn_implementation  # type: ignore[assignment]
        switch(PACKED_ATTENTION)  # a model that can't only warns
        if config._attn_implementation != PACKED_ATTENTION and len(documents) > 1:
            raise ValueError(
                f"{config.model_type} has an attention of its own, which would let packed "
                "documents see each other; pack one document per batch"
            )
    if len(documents) > 1:
        refuse_leaking_layers(model)
        _require_fixed_rotation(model, layout.longest)
    if config._attn_implementation != PACKED_ATTENTION and any(d.shared for d in documents):
        raise ValueError(
            f"documents share tokens, which {config._attn_implementation} does not compute; load "
            "the model with attn_implementation='sdpa', or pack without share_prefixes"
        )
    return layout


@contextmanager
def passing_on(documents: Layout | None, position_ids: Tensor) -> Iterator[None]:
    """Within it, a model that does not tell its attention of ``documents`` raises.

    Several would otherwise see each other: to attention, their rows are those of one.
    """
    packed = documents is not None and len(documents.spans) > 1
    before = _PACKED.set(packed), _LONGEST.set(int(position_ids.max()) + 1)
    try:
        yield
    finally:
        _PACKED.reset(before[0])
        _LONGEST.reset(before[1])


def require_positions(model: nn.Module) -> None:
    """Refuse a model that counts positions itself, over all documents.

    Raises:
        ValueError: its ``forward`` takes no ``position_ids``.
    """
    unwrap: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)  # of PEFT
    base: Any = unwrap() if unwrap else model
    known = inspect.signature(base.forward).parameters
    if "input_ids" in known and "position_ids" not in known:
        raise ValueError(
            f"{base.config.model_type} takes no position_ids, so it would count positions from the "
            "first packed document on; pack one document per batch"
        )


def lengths_that_rotate_otherwise(config: Any) -> float:
    """From how many tokens on a document's rotary embeddings depend on the longest in its batch."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]
    known = [
        one.get("original_max_position_embeddings") or text.max_position_embeddings
        for one in each
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(known, default=float("inf"))


def _require_fixed_rotation(model: nn.Module, longest: int) -> None:
    config: Any = model.config
    limit = lengths_that_rotate_otherwise(config)
    if longest > limit:
        raise ValueError(
            f"{config.model_type} rotates all documents of a batch as its longest, which has "
            f"{longest} tokens, above {limit:.0f}; pack one document per batch"
        )


def refuse_leaking_layers(model: nn.Module) -> None:
    """Refuse a model some of whose layers let packed documents see each other.

    Raises:
        ValueError: it has layers of linear attention, or of another recurrence, or the like.
    """
    config: Any = model.config
    carrying = other_layers(model)
    reason = next(leaks(model), None)
    if carrying:
        reason = (
            f"has {', '.join(carrying)} layers, which would carry state from one packed document "
            "into the next, or attend as packed attention does not"
        )
    if reason:
        raise ValueError(f"{config.model_type} {reason}; pack one document per batch")
    require_positions(model)
    if looks_ahead(model):
        raise ValueError(
            f"{config.model_type} attends to later tokens too; packed attention is causal"
        )


def refuse_unpackable(model: nn.Module) -> None:
    """Refuse a model that cannot be trained on packed documents, before it is trained.

    Raises:
        ValueError: its layers leak, or its attention is of a kind that packed attention does not
            compute, and it is not set to use flash attention.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return
    refuse_leaking_layers(model)
    attention, missing = str(config._attn_implementation), next(not_computed(model), None)
    ours = attention.startswith(("primerl_", CONTEXT_ATTENTION))
    if missing and (ours or attention in MASKED_ATTENTION):
        raise ValueError(
            f"{config.model_type} has {missing}, which packed attention does not compute; use "
            "flash attention for this model"
        )


def other_layers(model: nn.Module) -> list[str]:
    """The kinds of a model's layers that are no softmax attention, such as ``linear_attention``."""
    kinds = layer_kinds(model) - HARMLESS_LAYERS
    return sorted(kinds - {"indexed_attention"} if is_sparse(model) else kinds)


def is_sparse(model: nn.Module) -> bool:
    """Whether an indexer chooses the model's keys, in a way that ``sparse_attention`` computes."""
    config: Any = model.config
    return getattr(config.get_text_config(), "model_type", None) in SPARSE_FAMILIES


def no_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_others: Any,
) -> Tensor | None:
    """An entry of ``AttentionMaskInterface``: only what attention has to refuse.

    That is a caller's padding, and a window shorter than a document, which some models have in
    their mask only. (Others have such a mask made and do not use it.)
    """
    if local_size is not None and _is_exceeded(local_size):
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return None if attention_mask is None or attention_mask.all() else attention_mask


def _mask_of_batch(*_: Any, allow_is_causal_skip: bool = True, **others: Any) -> Tensor | None:
    """As ``no_mask``, and a note where ``transformers`` takes a batch for packed.

    A layer whose attention is told neither documents nor positions can't know otherwise.
    """
    mask = no_mask(**others)
    # Traced, it takes every batch for packed.
    packed = not (allow_is_causal_skip or torch.compiler.is_compiling() or _PACKED.get())
    if mask is None and packed:
        return torch.zeros(1, 1, 1, 1, dtype=_NOTE_OF_PACKED_ROWS)
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
    noted = attention_mask is not None and attention_mask.dtype == _NOTE_OF_PACKED_ROWS
    computed = length == key.shape[2] and (attention_mask is None or noted)
    if documents is None and computed:
        documents = layout_by_positions(module, asked.get("position_ids"), query, noted=noted)
    if documents is not None:
        refuse_other_attention(module, documents.longest, asked)
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
def layout_by_positions(
    module: nn.Module,
    position_ids: Int[Tensor, "_ t"] | None,
    query: Float[Tensor, "b heads t d"],
    *,
    noted: bool = False,
) -> Layout:
    """Where documents lie in a batch, for attention that was not told.

    Some layers pass on positions only, also when they compute again in the backward pass. And a
    caller who knows nothing of packing may use a switched model: each row is a document then, or
    several, where its positions begin again.

    Raises:
        ValueError: there are several documents, but ``position_ids`` don't tell where.
    """
    batch, _, length, _ = query.shape
    told = position_ids is not None and position_ids.shape in ((1, length), (batch, length))
    if not told and (noted or _PACKED.get()):
        raise ValueError(not_passed_on(module))
    if position_ids is None or not told:
        position_ids = torch.arange(length)
    known = None
    if not position_ids.is_inference():  # which has no version to tell a write by
        known = _LAYOUTS.get(position_ids)  # type: ignore[no-untyped-call]
    if known is None or known[0] != (position_ids._version, batch):
        layout = lay_out(documents_of_batch(position_ids.expand(batch, -1)), query.device)
        if position_ids.is_inference():
            return layout
        known = (position_ids._version, batch), layout
        _LAYOUTS[position_ids] = known
    found: Layout = known[1]
    return found


def not_passed_on(module: nn.Module) -> str:
    """What to say of a module that was not given the documents."""
    return (
        f"{type(module).__name__} is not given the documents that its model was called with, "
        "because the model's layers don't pass on arguments that they don't know"
    )


def refuse_other_attention(module: nn.Module, longest: int, asked: dict[str, Any]) -> None:
    """Refuse what a model asks of its attention beyond causal attention within each document.

    Raises:
        ValueError: a window shorter than a document, sinks, sparse indices, capped scores, or
            attention to later tokens.
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
