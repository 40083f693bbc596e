"""Switch an unmodified Hugging Face model to attention within each packed document."""

from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from primerl.attention.admission import (
    CONTEXT_ATTENTION,
    MASKED_ATTENTION,
    MASKED_BY_DOCUMENT,
    PACKED_ATTENTION,
    chooses_keys,
    is_sparse,
    refuse_leaking_layers,
    unsupported_rope_lengths,
)
from primerl.attention.documents import Layout, find_documents, lay_out
from primerl.attention.masked import attend_under_masks
from primerl.attention.mixers import mix_by_document
from primerl.attention.packed import limits_as_mask, packed_attention, switch_attention
from primerl.attention.sparse import attend_sparsely


def attend_by_document(model: nn.Module, position_ids: Int[Tensor, " t"]) -> Layout | None:
    """Switch a model with ``sdpa`` or ``eager`` attention to attend within each document.

        documents = attention.attend_by_document(model, position_ids)
        with attention.require_documents(documents):
            model(
                token_ids[None],
                position_ids=position_ids[None],
                documents=documents,
                use_cache=False,
            )

    Sparse attention also chooses keys within each document. Flash attention reads positions itself
    and is not replaced. ``set_attn_implementation`` with the implementation that the model was
    loaded with, such as ``"sdpa"``, switches back.

    A pack has no cache. Layers that carry state refuse a cache that is given; in a model with such
    layers, ``use_cache`` counts as False for a pack.

    Args:
        model: a ``transformers`` causal language model.
        position_ids: the positions of a pack, as ``find_documents`` expects them.

    Returns:
        The layout to pass to the model as ``documents``; None for a context-parallel model, which
        finds the documents of all ranks itself.

    Raises:
        ValueError: the model can't be switched, it has other layers that carry state from one
            document into the next, or documents share tokens and its attention doesn't support it.
    """
    config: Any = model.config
    if config._attn_implementation.startswith(CONTEXT_ATTENTION):
        return None
    documents = find_documents(position_ids)
    layout = lay_out(documents, position_ids.device)
    if is_sparse(model):
        attend_sparsely(model)
        return layout
    if chooses_keys(model) and config._attn_implementation in MASKED_ATTENTION:
        attend_under_masks(model)
    if config._attn_implementation in MASKED_ATTENTION:
        switch_attention(model, PACKED_ATTENTION, packed_attention, limits_as_mask)
        if config._attn_implementation != PACKED_ATTENTION and len(documents) > 1:
            raise ValueError(
                f"{config.model_type} has its own attention implementation, which would let "
                "packed documents see each other; pack one document per batch"
            )
    if not chooses_keys(model):
        mix_by_document(model)  # for later calls, too: attention finds documents by positions then
    if len(documents) > 1:
        refuse_leaking_layers(model)
        limit = unsupported_rope_lengths(config)
        if layout.max_keys > limit:
            raise ValueError(
                f"{config.model_type} rotates all documents of a batch like its longest, which has "
                f"{layout.max_keys} tokens, above {limit:.0f}; pack one document per batch"
            )
    own = config._attn_implementation not in (PACKED_ATTENTION, MASKED_BY_DOCUMENT)
    if own and any(d.shared for d in documents):
        raise ValueError(
            f"documents share tokens, which {config._attn_implementation} does not support; load "
            "the model with attn_implementation='sdpa', or pack without share_prefixes"
        )
    return layout
