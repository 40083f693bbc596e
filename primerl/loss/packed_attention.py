"""Attention of packed documents, each to itself, for unmodified Hugging Face models.

Documents lie end to end in one row of tokens. Those of one length attend together in one call, so
that no mask over the whole pack is ever built.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from primerl._optional import require
from primerl.loss.ratio import upcast

PACKED_ATTENTION = "primerl_packed"
# These build a square mask over the whole pack; the per-document attention replaces them.
MASKED_ATTENTION = ("eager", "sdpa")
# On a CPU, attention to fewer tokens than this is slower in bfloat16 than in float32.
WIDENED_LENGTH = 256


def document_bounds(position_ids: Tensor) -> tuple[int, ...]:
    """Where each document begins, and the end of the last one.

    Raises:
        ValueError: the first position is not 0.
    """
    starts = (position_ids == 0).nonzero().flatten().tolist()
    if not starts or starts[0] != 0:
        raise ValueError(
            "position_ids must begin with 0: documents are packed whole, one after the other"
        )
    return (*starts, position_ids.numel())


def attend_by_document(model: nn.Module, bounds: tuple[int, ...]) -> None:
    """Switch a model that attends by ``sdpa`` or ``eager`` to attend document by document.

    Raises:
        ValueError: the model can't switch, or its other layers carry state from one document into
            the next.
    """
    config: Any = model.config
    if config._attn_implementation in MASKED_ATTENTION:
        transformers = require("transformers", extra="transformers")
        transformers.AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
        transformers.AttentionMaskInterface.register(PACKED_ATTENTION, _padding)
        switch: Callable[[str], None] = model.set_attn_implementation  # type: ignore[assignment]
        switch(PACKED_ATTENTION)  # a model that can't only warns
        if config._attn_implementation != PACKED_ATTENTION and len(bounds) > 2:
            raise ValueError(
                f"{config.model_type} has an attention of its own, which would let packed "
                "documents see each other; pack one document per batch"
            )
    if len(bounds) > 2:
        _refuse_state_across_documents(model)


def _refuse_state_across_documents(model: nn.Module) -> None:
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    carrying = kinds - {"full_attention", "sliding_attention"}
    if carrying:
        raise ValueError(
            f"{config.model_type} has {', '.join(sorted(carrying))} layers, which would carry "
            "state from one packed document into the next; pack one document per batch"
        )


def _padding(*_: Any, attention_mask: Tensor | None = None, **_others: Any) -> Tensor | None:
    """A caller's padding, for ``_packed_attention`` to refuse: otherwise it would go unseen."""
    return None if attention_mask is None or attention_mask.all() else attention_mask


def _packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads t d"],
    key: Float[Tensor, "1 kv_heads s d"],
    value: Float[Tensor, "1 kv_heads s dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    document_bounds: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Float[Tensor, "1 t heads dv"], None]:
    """Causal attention within each document: an entry of transformers' ``AttentionInterface``."""
    if document_bounds is None:
        # Plain use of the same model, by a caller who knows nothing of packing.
        document_bounds = (0, query.shape[2])
        if attention_mask is not None or query.shape[2] != key.shape[2]:
            raise ValueError(
                "this model was switched to packed attention by primerl.loss.model_logprobs; to "
                "generate or to pad, call model.set_attn_implementation('sdpa') first"
            )
    _refuse_other_attention(module, document_bounds, {**other, "sliding_window": sliding_window})
    order, back, shapes = _by_length(document_bounds, query.device)
    q, k, v = (x.squeeze(0).index_select(1, order) for x in (query, key, value))
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "is_causal": True,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    outputs, start = [], 0
    for count, length in shapes:
        widened = length <= WIDENED_LENGTH and query.device.type == "cpu"
        documents = (_documents(x, start, count, length) for x in (q, k, v))
        qd, kd, vd = (upcast(x) if widened else x for x in documents)
        attended = F.scaled_dot_product_attention(qd, kd, vd, **options)
        outputs.append(attended.transpose(1, 2).flatten(0, 1).to(query.dtype))
        start += count * length
    return torch.cat(outputs).index_select(0, back).unsqueeze(0), None


def _refuse_other_attention(
    module: nn.Module, bounds: tuple[int, ...], asked: dict[str, Any]
) -> None:
    longest, window = max(b - a for a, b in pairwise(bounds)), asked["sliding_window"]
    if window is not None and longest > window:
        raise ValueError(
            f"a document of {longest} tokens exceeds the attention window of {window}; packed "
            "attention computes full causal attention"
        )
    for name in ("s_aux", "indices", "softcap"):
        if asked.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which packed attention does not "
                "compute; use flash attention for this model"
            )


def _documents(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """Rows ``[heads, t, d]`` from ``start`` on, as ``[documents, heads, length, d]``."""
    rows = x[:, start : start + count * length]
    return rows.reshape(x.shape[0], count, length, x.shape[-1]).transpose(0, 1)


@lru_cache(maxsize=8)  # once per batch, not once per layer
def _by_length(
    bounds: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Rows reordered so that documents of one length lie together and attend in one call.

    Returns the order, its inverse, and ``(documents, length)`` of each run.
    """
    starts: dict[int, list[int]] = {}
    for begin, end in pairwise(bounds):
        starts.setdefault(end - begin, []).append(begin)
    shapes = [(len(begins), length) for length, begins in starts.items()]
    with torch.inference_mode(False):  # or a later call, in training, could not save them
        rows = [
            (torch.tensor(begins).unsqueeze(1) + torch.arange(length)).flatten()
            for length, begins in starts.items()
        ]
        order = torch.cat(rows)
        return order.to(device), order.argsort().to(device), shapes
