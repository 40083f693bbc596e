"""Attention of packed documents, each to itself, for unmodified Hugging Face models.

Documents lie end to end in one row of tokens. Those of one length attend together in one call, so
that no mask over the whole pack is ever built. A document may leave out tokens that it begins with
and that an earlier one holds: their keys and values are taken from there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from primerl._optional import require
from primerl.admission import HARMLESS_LAYERS, layer_kinds, leaks, not_computed

PACKED_ATTENTION = "primerl_packed"
# An attention of this name knows where documents lie, on this rank and on others.
CONTEXT_ATTENTION = "primerl_context"
# These build a square mask over the whole pack; the per-document attention replaces them.
MASKED_ATTENTION = ("eager", "sdpa")
# On a CPU, attention to fewer tokens than this is slower in bfloat16 than in float32.
WIDENED_LENGTH = 256
# What a model may hand to its attention besides what packed attention computes: it says nothing
# about which tokens are seen.
_IGNORED = frozenset({"position_ids", "is_causal", "logits_to_keep"})


class Document(NamedTuple):
    """Rows ``begin .. end - 1``, after the ``shared`` rows that begin at ``root``."""

    begin: int
    end: int
    root: int
    shared: int

    @property
    def length(self) -> int:
        """Its tokens, shared ones included."""
        return self.shared + self.end - self.begin


def find_documents(position_ids: Tensor) -> tuple[Document, ...]:
    """The documents of a pack: one begins wherever a position does not follow the one before.

    One that begins at position n > 0 continues the first n tokens of the last that began at 0.

    Raises:
        ValueError: the first position is not 0, or a document continues more tokens than there are.
    """
    jumps = position_ids[1:] != position_ids[:-1] + 1
    begins = [0, *((jumps.nonzero().flatten() + 1).tolist())]
    ends = [*begins[1:], position_ids.numel()]
    if position_ids.numel() == 0 or position_ids[0] != 0:
        raise ValueError(
            "position_ids must begin with 0: documents are packed whole, one after the other"
        )
    documents: list[Document] = []
    root, room = 0, 0
    for begin, end, shared in zip(begins, ends, position_ids[begins].tolist(), strict=True):
        if shared == 0:
            root, room = begin, end - begin
        elif not 0 < shared <= room:
            raise ValueError(
                f"position_ids[{begin}] is {shared}: a document that begins there continues the "
                f"last one that began at 0, which has {room} tokens"
            )
        documents.append(Document(begin, end, root, shared))
    return tuple(documents)


def attend_by_document(
    model: nn.Module, position_ids: Int[Tensor, " t"]
) -> tuple[Document, ...] | None:
    """Switch a model that attends by ``sdpa`` or ``eager`` to attend document by document.

    Returns what its attention needs, as the model's argument ``documents``: nothing where the rows
    of a context-parallel model begin and end within documents, which it finds itself.

    Raises:
        ValueError: the model can't switch, its other layers carry state from one document into
            the next, or documents share tokens and it keeps an attention that can't.
    """
    config: Any = model.config
    if config._attn_implementation.startswith(CONTEXT_ATTENTION):
        return None
    documents = find_documents(position_ids)
    if config._attn_implementation in MASKED_ATTENTION:
        transformers = require("transformers", extra="transformers")
        transformers.AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
        transformers.AttentionMaskInterface.register(PACKED_ATTENTION, _padding)
        switch: Callable[[str], None] = model.set_attn_implementation  # type: ignore[assignment]
        switch(PACKED_ATTENTION)  # a model that can't only warns
        if config._attn_implementation != PACKED_ATTENTION and len(documents) > 1:
            raise ValueError(
                f"{config.model_type} has an attention of its own, which would let packed "
                "documents see each other; pack one document per batch"
            )
    if len(documents) > 1:
        refuse_leaking_layers(model)
    if config._attn_implementation != PACKED_ATTENTION and any(d.shared for d in documents):
        raise ValueError(
            f"documents share tokens, which {config._attn_implementation} does not compute; load "
            "the model with attn_implementation='sdpa', or pack without share_prefixes"
        )
    return documents


# The documents of the model that runs now, to tell a part of it that is not told of them.
_RUNNING: ContextVar[tuple[Document, ...] | None] = ContextVar("_RUNNING", default=None)


@contextmanager
def attending(documents: tuple[Document, ...] | None) -> Iterator[None]:
    """While a model runs on packed documents: parts that it does not tell of them are refused."""
    token = _RUNNING.set(documents)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def refuse_leaking_layers(model: nn.Module) -> None:
    """Refuse a model some of whose layers let packed documents see each other.

    Raises:
        ValueError: it has layers of linear attention, or of another recurrence, or the like.
    """
    config: Any = model.config
    odd = layer_kinds(model) - HARMLESS_LAYERS
    reason = next(leaks(model), None)
    if odd:
        reason = (
            f"has {', '.join(sorted(odd))} layers, which would carry state from one packed "
            "document into the next, or attend as packed attention does not"
        )
    if reason:
        raise ValueError(f"{config.model_type} {reason}; pack one document per batch")


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
    ours = (*MASKED_ATTENTION, PACKED_ATTENTION)
    attention = str(config._attn_implementation)
    missing = next(not_computed(model), None)
    if missing and (attention in ours or attention.startswith(CONTEXT_ATTENTION)):
        raise ValueError(
            f"{config.model_type} has {missing}, which packed attention does not compute; use "
            "flash attention for this model"
        )


def _padding(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_others: Any,
) -> Tensor | None:
    """A caller's padding, for ``_packed_attention`` to refuse: otherwise it would go unseen.

    So would a window shorter than a document, which some models have in their mask only.
    """
    longest = max((d.length for d in _RUNNING.get() or ()), default=0)
    if local_size is not None and longest > local_size:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)  # refused by the layer that has it
    return None if attention_mask is None or attention_mask.all() else attention_mask


def _packed_attention(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: tuple[Document, ...] | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Causal attention within each document: an entry of transformers' ``AttentionInterface``."""
    if documents is None and _RUNNING.get() is not None:
        documents = _by_position(module, other.get("position_ids"))
    if attention_mask is not None or (documents is None and query.shape[2] != key.shape[2]):
        raise ValueError(
            f"{type(module).__name__} attends by a mask, such as a window shorter than a document, "
            "or by a cache; packed attention computes full causal attention. "
            "loss.model_logprobs switched this model to it: to generate or to pad, call "
            "model.set_attn_implementation('sdpa') first"
        )
    if documents is None:
        # Plain use of the same model, by a caller who knows nothing of packing.
        length = query.shape[2]
        begins = range(0, query.shape[0] * length, length)
        documents = tuple(Document(begin, begin + length, begin, 0) for begin in begins)
    _refuse_window(documents, sliding_window)
    _refuse_other_attention(module, other)
    plan = _by_length(documents, query.device)
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    q = q.index_select(1, plan.queries)
    k, v = (x.index_select(1, plan.keys) for x in (k, v))
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    outputs, start, start_k = [], 0, 0
    for count, length, shared in plan.runs:
        widened = shared + length <= WIDENED_LENGTH and query.device.type == "cpu"
        qd = _documents(q, start, count, length)
        kd, vd = (_documents(x, start_k, count, shared + length) for x in (k, v))
        if widened:
            qd, kd, vd = _widen(qd), _widen(kd), _widen(vd)
        mask = causal_lower_right(length, shared + length) if shared else None
        of_run = F.scaled_dot_product_attention(
            qd, kd, vd, attn_mask=mask, is_causal=mask is None, **options
        )
        outputs.append(of_run.transpose(1, 2).flatten(0, 1).to(query.dtype))
        start, start_k = start + count * length, start_k + count * (shared + length)
    attended = torch.cat(outputs).index_select(0, plan.back)
    return attended.reshape(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _by_position(module: nn.Module, position_ids: Tensor | None) -> tuple[Document, ...]:
    """The documents, for an attention that its layer tells only of positions."""
    if position_ids is None:
        raise ValueError(
            f"{type(module).__name__} is told neither of documents nor of positions, so that packed "
            "documents would see each other; pack one document per batch"
        )
    return find_documents(position_ids.reshape(-1))


def _refuse_window(documents: tuple[Document, ...], window: int | None) -> None:
    longest = max((d.length for d in documents), default=0)
    if window is not None and longest > window:
        raise ValueError(
            f"a document of {longest} tokens exceeds the attention window of {window}; packed "
            "attention computes full causal attention"
        )


def _refuse_other_attention(module: nn.Module, asked: dict[str, Any]) -> None:
    """Whatever else the model asks of its attention, flags apart, might be a kind of attention."""
    if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{type(module).__name__} attends in both directions; expected causal")
    for name, value in asked.items():
        if not (value is None or isinstance(value, bool) or name in _IGNORED):
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which packed attention does not "
                "compute; use flash attention for this model"
            )


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _documents(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """Rows ``[heads, t, d]`` from ``start`` on, as ``[documents, heads, length, d]``."""
    rows = x[:, start : start + count * length]
    return rows.reshape(x.shape[0], count, length, x.shape[-1]).transpose(0, 1)


class _Plan(NamedTuple):
    """Rows reordered so that documents of one length lie together and attend in one call."""

    queries: Tensor
    keys: Tensor
    back: Tensor
    """The inverse of ``queries``."""
    runs: list[tuple[int, int, int]]
    """``(documents, rows of each, rows that each shares)``."""


@lru_cache(maxsize=8)  # once per batch, not once per layer
def _by_length(documents: tuple[Document, ...], device: torch.device) -> _Plan:
    alike: dict[tuple[int, int], list[Document]] = {}
    for one in documents:
        alike.setdefault((one.end - one.begin, one.shared), []).append(one)
    with torch.inference_mode(False):  # or a later call, in training, could not save them
        own, seen = [], []
        for (length, shared), run in alike.items():
            rows = torch.tensor([d.begin for d in run]).unsqueeze(1) + torch.arange(length)
            before = torch.tensor([d.root for d in run]).unsqueeze(1) + torch.arange(shared)
            own.append(rows.flatten())
            seen.append(torch.cat([before, rows], dim=1).flatten())
        queries, keys = torch.cat(own), torch.cat(seen)
        runs = [(len(run), length, shared) for (length, shared), run in alike.items()]
        return _Plan(queries.to(device), keys.to(device), queries.argsort().to(device), runs)
