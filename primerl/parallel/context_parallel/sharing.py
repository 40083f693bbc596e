"""Context parallelism for unmodified Hugging Face models.

Each rank holds an equal, contiguous part of a pack's rows, and computes everything but attention
and recurrent mixers from those rows alone. Attention has two methods. With ``"ulysses"``, ranks
exchange rows for heads, and each computes some heads over all rows. With ``"gathered"``, keys and
values are all-gathered, and each rank computes some of the queries, chosen so that all ranks have
about equally many query-key pairs. Mixers run on whole documents (see ``mixing``).
"""

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from primerl import flops
from primerl.attention.admission import (
    CONTEXT_ATTENTION,
    chooses_keys,
    is_sparse,
    named_mixers,
    require_positions,
    unpackable_layers,
    unsupported_rope_lengths,
)
from primerl.attention.documents import (
    Document,
    Layout,
    Span,
    find_documents,
    lay_out,
    spans_within,
)
from primerl.attention.packed import limits_as_mask, switch_attention
from primerl.parallel.collectives import gather_rows_of_all
from primerl.parallel.context_parallel.attention import (
    ATTENTION,
    QueryExchange,
    SharedRows,
    share_sparse_context,
)
from primerl.parallel.context_parallel.balancing import divide_attention
from primerl.parallel.context_parallel.mixing import (
    DocumentExchange,
    exchange_documents,
    share_mixers,
)
from primerl.parallel.device_mesh import Mesh


def share_context(model: nn.Module, mesh: Mesh, *, method: str | None = None) -> None:
    """Make a model's attention context parallel over the ranks that share documents.

    Before each forward pass, the ranks all-gather ``position_ids`` to find the documents. Documents
    may begin and end on any rank, and share tokens (``packing.pack``). For ``method``, see the
    argument ``context`` of ``shard``. Sources: DeepSpeed-Ulysses, arXiv:2309.14509; Llama 3,
    arXiv:2407.21783, section 3.3.2 (gathered keys and values).
    """
    config: Any = model.config
    require_positions(model)
    if is_sparse(model):
        if method not in (None, "gathered"):
            raise ValueError(
                f"{config.model_type} has sparse attention, which needs gathered keys; expected "
                f'context="gathered" or None, not {method!r}'
            )
        assert mesh.context_group is not None
        share_sparse_context(model, mesh.context_group)
        _register_document_search(model, mesh, balanced=False)
        return
    _require_only_attention(model)
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    divisible = isinstance(heads, int) and heads % mesh.cp == 0
    method = method or ("ulysses" if divisible else "gathered")
    if method not in ATTENTION:
        raise ValueError(f"context is {method!r}; expected one of {list(ATTENTION)}, or None")
    if method == "ulysses" and not divisible:
        raise ValueError(
            f"{config.model_type} has {heads} query heads, which cannot be divided equally among "
            f'cp={mesh.cp} ranks; use context="gathered"'
        )
    share_mixers(model)
    name = f"{CONTEXT_ATTENTION}_{method}"
    switch_attention(model, name, ATTENTION[method], limits_as_mask)
    if config.get_text_config()._attn_implementation != name:
        raise ValueError(
            f"{config.model_type} has its own attention implementation, which would not see the "
            "rows of other ranks; use a mesh with cp=1"
        )
    _register_document_search(model, mesh, balanced=method == "gathered")


def _register_document_search(model: nn.Module, mesh: Mesh, *, balanced: bool) -> None:
    group = mesh.context_group
    assert group is not None
    search = functools.partial(_find_documents, group=group, balanced=balanced)
    model.register_forward_pre_hook(search, with_kwargs=True)


def _require_only_attention(model: nn.Module) -> None:
    """Refuse a model in which anything besides attention passes information between rows."""
    config: Any = model.config
    text = config.get_text_config()
    reason = None
    kinds = unpackable_layers(model)
    if chooses_keys(model):
        reason = "attention that chooses blocks of keys, which ranks count from their first row"
    elif getattr(text, "index_topk", None) is not None:
        reason = "sparse attention, whose indexer scores the keys of all rows"
    elif kinds:
        reason = f"{', '.join(kinds)} layers, which each rank would compute from its own rows only"
    elif _has_convolutions(model):
        reason = "convolutions over rows, which would not see the rows of other ranks"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "an encoder, whose attention looks ahead"
    elif unsupported_rope_lengths(config) < float("inf"):
        reason = "rotary embeddings that depend on the longest position, which differs by rank"
    if reason:
        raise ValueError(f"{config.model_type} has {reason}; use a mesh with cp=1")


def _has_convolutions(model: nn.Module) -> bool:
    """Return whether a model has convolutions outside its mixers, which run by document."""
    within = {id(part) for _, mixer in named_mixers(model) for part in mixer.modules()}
    parts = (part for part in model.modules() if id(part) not in within)
    return any(isinstance(part, nn.Conv1d) for part in parts)


def _find_documents(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    group: dist.ProcessGroup,
    balanced: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Find the documents of all ranks and pass them to the model (a forward pre-hook)."""
    positions = _gather_positions(model, kwargs, group)
    documents = find_documents(positions)
    longest = max(document.length for document in documents)
    device = kwargs["position_ids"].device
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = len(positions) // ranks

    @functools.cache  # few models need it, or what follows
    def own() -> Layout:
        return lay_out(tuple(spans_within(documents, rank * rows, rows)), device)

    @functools.cache
    def by_document() -> DocumentExchange:
        return exchange_documents(documents, rows=rows, rank=rank, ranks=ranks, device=device)

    if not balanced:
        layout = lay_out(documents, device)
        shared = SharedRows(documents, longest, group, layout, own, by_document)
        return args, {**kwargs, "documents": shared}
    workers = divide_attention(flops.seen_keys(model.config, positions.numpy()), ranks)
    spans = row_spans(np.flatnonzero(workers == rank), documents)
    exchanged = None
    if (workers != np.repeat(np.arange(ranks), rows)).any():
        mine = torch.from_numpy(workers[rank * rows : (rank + 1) * rows])
        order = torch.argsort(mine, stable=True)
        sent = torch.bincount(mine, minlength=ranks).tolist()
        received = (workers.reshape(ranks, rows) == rank).sum(1).tolist()
        exchanged = QueryExchange(order.to(device), order.argsort().to(device), sent, received)
    layout = lay_out(spans, device)
    shared = SharedRows(documents, longest, group, layout, own, by_document, exchanged)
    return args, {**kwargs, "documents": shared}


def _gather_positions(model: nn.Module, kwargs: dict[str, Any], group: dist.ProcessGroup) -> Tensor:
    """All-gather the positions of all ranks' rows to the CPU.

    If the positions of any rank are missing or don't fit its tokens, all ranks raise an error.
    """
    position_ids = kwargs.get("position_ids")
    tokens = [x for x in map(kwargs.get, ("input_ids", "inputs_embeds")) if x is not None]
    shapes = {None if x is None else tuple(x.shape[:2]) for x in (position_ids, *tokens)}
    count = 0
    if position_ids is not None and len(shapes) == 1 and len(position_ids) == 1:
        count = position_ids.shape[1]
    device = next(iter([*tokens, *model.parameters()])).device
    rows = torch.tensor([count], device=device)
    counts = gather_rows_of_all(rows, group).tolist()
    if min(counts) == 0:
        raise ValueError(
            f"ranks that share documents passed position_ids of {counts} rows; expected tokens and "
            f"position_ids of shape [1, t] on each, as the model was sharded with cp={len(counts)}"
        )
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks that share documents have {counts} rows; expected equal numbers: divide each "
            "batch with parallel.scatter(..., mesh) or PackedBatch.split"
        )
    assert isinstance(position_ids, Tensor)
    return gather_rows_of_all(position_ids[0].to(rows), group).cpu()


def row_spans(rows: np.ndarray, documents: tuple[Document, ...]) -> tuple[Span, ...]:
    """Split ascending ``rows`` into spans, one per contiguous range within a document."""
    begins = np.array([document.begin for document in documents])
    number = np.searchsorted(begins, rows, side="right") - 1
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(number) != 0)) + 1
    starts = [0, *breaks.tolist()] if len(rows) else []
    spans = []
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=len(rows) > 0):
        *shared, (begin, _) = documents[number[start]].keys
        spans.append(Span(start, end, (*shared, (begin, int(rows[end - 1]) + 1))))
    return tuple(spans)
