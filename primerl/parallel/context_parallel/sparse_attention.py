"""Context-parallel sparse attention, for unmodified Hugging Face models.

Each rank chooses keys and computes attention for its own rows. The keys of the indexer, and the
keys and values of attention, are gathered from all ranks that share documents.
"""

import functools
from typing import Any

import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl._optional import require
from primerl.attention.admission import CONTEXT_SPARSE_ATTENTION
from primerl.attention.documents import spans_within
from primerl.attention.sparse import attend_sparsely, attend_to_chosen
from primerl.parallel.collectives import all_gather
from primerl.parallel.context_parallel.attention import SharedRows, checked_rows, gather_rows


def share_sparse_context(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a model's sparse attention context parallel, over the ranks of a group."""
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(CONTEXT_SPARSE_ATTENTION, _sparse)
    attend_sparsely(model, gather=functools.partial(_gather_from_all, group))


def _gather_from_all(group: dist.ProcessGroup, rows: Tensor) -> tuple[Tensor, int]:
    every = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    all_gather(every, rows.contiguous(), group=group)
    return every, dist.get_rank(group)


def _sparse(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads s d"],
    value: Float[Tensor, "b kv_heads s dv"],
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    indices: Int[Tensor, "b t k"],
    scaling: float | None = None,
    documents: SharedRows | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    rows = checked_rows(module, query, key, None, documents, asked)
    q = query[0].transpose(0, 1)
    k, v = gather_rows(key, value, rows.group)
    spans = spans_within(rows.documents, dist.get_rank(rows.group) * len(q), len(q))
    attended = attend_to_chosen(q, k, v, spans, indices[0], scaling=scaling)
    return attended.unsqueeze(0), None
