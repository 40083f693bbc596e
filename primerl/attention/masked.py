"""Attention that chooses or compresses keys, run on each document of a pack under a dense mask.

Such attention counts blocks of keys from the beginning of a row, so in a pack a document's blocks
would depend on the documents before it. Here, the model's own attention module gets documents as
the rows of a batch, as ``mixers`` do. A mask has one entry per pair of a document's tokens, so
memory grows with the square of the longest document.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primerl.attention.admission import MASKED_BY_DOCUMENT
from primerl.attention.mixers import DocumentMixer, mix_by_document
from primerl.attention.packed import (
    is_packed,
    limits_as_mask,
    not_passed_on,
    read_limits,
    switch_attention,
)


class DocumentAttention(DocumentMixer):
    """A base of a model's attention module that runs it on each document of a pack."""

    config: Any

    def is_whole(self, documents: Any) -> bool:
        """Return whether the model was switched back to another attention."""
        if self.config._attn_implementation != MASKED_BY_DOCUMENT:
            return True
        if documents is None and is_packed():
            raise ValueError(not_passed_on(self))
        return False

    def mix_documents(
        self,
        hidden: Float[Tensor, "b t h"],
        documents: Any,
        mix: Callable[[Tensor, Tensor | None], Tensor],
    ) -> Float[Tensor, "b t h"]:
        """Run ``mix`` on each document of a pack, or on each row if it is no pack."""
        if documents is None:
            return mix(hidden, None)
        return super().mix_documents(hidden, documents, mix)

    def options_of_rows(
        self, options: dict[str, Any], rows: Float[Tensor, "b t h"], places: Tensor | None
    ) -> dict[str, Any]:
        """Return the rotations of the rows, and a causal mask with the layer's window.

        Raises:
            ValueError: the mask is of padding, or of several documents that did not arrive.
        """
        limits = read_limits(self, options.get("attention_mask"))
        if limits.packed and places is None:
            raise ValueError(not_passed_on(self))
        rotations = options["position_embeddings"]
        if places is not None:
            rotations = _gathered(rotations, places)
        mask = causal_mask(rows, limits.window)
        return {"position_embeddings": rotations, "attention_mask": mask}


def _gathered(rotations: Any, places: Tensor) -> Any:
    """Return the sines and cosines of some rows; some models have several kinds, by name.

    All rows of a batch may have the same.
    """
    if isinstance(rotations, dict):
        return {kind: _gathered(one, places) for kind, one in rotations.items()}
    return tuple(x.flatten(0, 1)[places % x.shape[:2].numel()] for x in rotations)


def causal_mask(rows: Float[Tensor, "b t h"], window: int | None) -> Float[Tensor, "b 1 t t"]:
    """Return the mask that is added to scores: 0 for keys that a query sees."""
    batch, length, _ = rows.shape
    places = torch.arange(length, device=rows.device)
    apart = places.unsqueeze(1) - places
    seen = (apart >= 0) & (apart < (window or length))
    mask = torch.zeros(length, length, dtype=rows.dtype, device=rows.device)
    mask = mask.masked_fill(~seen, torch.finfo(rows.dtype).min)
    return mask.expand(batch, 1, length, length)


def masked_attention(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Float[Tensor, " heads"] | None = None,
    block_indices: Tensor | None = None,
    **_others: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Entry of transformers' ``AttentionInterface``: the definition, with sinks ``s_aux``.

    ``block_indices`` are the blocks of keys that the module's indexer chose for each query.
    """
    if attention_mask is None:
        raise ValueError(not_passed_on(module))
    if dropout:
        raise ValueError(
            f"{type(module).__name__} has dropout={dropout} in attention, which is unsupported; "
            "set attention_dropout to 0"
        )
    batch, heads, length, _ = query.shape
    if block_indices is not None:
        positions = torch.arange(length, device=query.device).expand(batch, -1)
        indexer: Any = module.indexer
        attention_mask = indexer.build_block_mask(
            block_indices, attention_mask, key.shape[2], query.dtype, query.device, positions
        )
    copies = heads // key.shape[1]
    key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(batch, -1, length, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2), None


def attend_under_masks(model: nn.Module) -> None:
    """Switch a model to attend within each document, under dense masks."""
    switch_attention(model, MASKED_BY_DOCUMENT, masked_attention, limits_as_mask)
    mix_by_document(model, DocumentAttention)
