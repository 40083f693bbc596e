"""Choose keys with the indexer of sparse attention, separately for each document."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from primerl.attention.admission import CONTEXT_SPARSE_ATTENTION, SPARSE_ATTENTION
from primerl.attention.documents import (
    Layout,
    batch_layout,
    find_documents,
    lay_out,
    once_per_tensor,
    spans_within,
)

# The maximum number of scores, of all heads, held in memory at a time on a CPU: 16 MB. With 512 MB,
# it took twice as long.
MAX_SCORES = 2**22
# The same on a GPU: 512 MB. The Triton kernel holds only the sums over heads.
MAX_SCORES_ON_GPU = 2**27

GatherRows = Callable[[Tensor], tuple[Tensor, int]]
"""Function ``rows -> (rows of all ranks that share documents, this rank's index among them)``.

It passes no gradient.
"""

SWITCH_BACK = (
    "this model was switched to packed attention by primerl.loss.model_logprobs; to generate or "
    "to pad, call model.set_attn_implementation('sdpa') first"
)

# Names of the attention implementations with which indexers choose keys within each document.
SWITCHED = (SPARSE_ATTENTION, CONTEXT_SPARSE_ATTENTION)

# The documents of each indexer output, for attention that does not receive the documents.
OUTPUT_LAYOUTS = WeakTensorKeyDictionary()


class DocumentIndexer(nn.Module):
    """Wrapper of a model's indexer that chooses keys in one document at a time.

    It returns ``[b, t, index_topk]``, int32: for each row, the positions of the chosen keys within
    the row's document, then -1 if the row sees fewer keys. If no row of a document sees more than
    ``index_topk`` keys, all its entries are -1, because attention then uses all visible keys.

    If no document is longer than ``index_topk``, it returns ``[b, t, 0]``, and each row attends to
    all keys that it sees.

    Args:
        indexer: the model's indexer.
        gather: gathers the rows of all ranks that share documents.
        fp8: whether to round queries and keys to FP8.
    """

    def __init__(
        self, indexer: nn.Module, gather: GatherRows | None = None, *, fp8: bool = False
    ) -> None:
        super().__init__()
        if next(indexer.named_parameters(recurse=False), None) or indexer._buffers:
            raise ValueError(
                f"{type(indexer).__name__} has parameters outside its submodules, so it can't be "
                "wrapped for packed documents"
            )
        for name, child in indexer.named_children():
            self.add_module(name, child)
        # In a tuple, so that the indexer's parameters are not registered a second time.
        self.wrapped = (indexer,)
        self.gather = gather
        self.fp8 = fp8

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def forward(
        self,
        hidden: Float[Tensor, "b t h"],
        q_latent: Float[Tensor, "b t r"],
        rotation: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Int[Tensor, "_ t"],
        past_key_values: Any = None,
        *,
        cache: Any = None,  # the argument's name since transformers 5.24
    ) -> Int[Tensor, "b t k"]:
        """Choose the keys to which each row attends; the model's indexer has the same arguments."""
        indexer: Any = self.wrapped[0]
        cache = past_key_values if cache is None else cache
        if indexer.config._attn_implementation not in SWITCHED:
            whole: Tensor = indexer(hidden, q_latent, rotation, attention_mask, position_ids, cache)
            return whole
        if cache is not None:
            raise ValueError(f"a cache of keys is not supported; {SWITCH_BACK}")
        batch, length = hidden.shape[:2]
        layout = _find_layout(position_ids, batch, hidden.device, self.gather)
        if layout.max_keys <= indexer.index_topk:
            nothing = hidden.new_zeros(batch, length, 0, dtype=torch.int32)
            OUTPUT_LAYOUTS[nothing] = layout
            return nothing
        hidden_rows, latent_rows, cosines, sines = (
            x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in (hidden, q_latent, *rotation)
        )
        queries, weights, keys = index_inputs(
            indexer, hidden_rows, latent_rows, (cosines, sines), fp8=self.fp8
        )
        rank = 0
        if self.gather is not None:
            keys, rank = self.gather(keys)
        chosen = hidden.new_full((batch * length, indexer.index_topk), -1, dtype=torch.int32)
        for span in spans_within(layout.spans, rank * length, batch * length):
            if span.seen > indexer.index_topk:
                part = slice(span.begin, span.end)
                seen = torch.cat([keys[begin:end] for begin, end in span.keys])
                chosen[part] = choose_keys(indexer, queries[part], weights[part], seen)
        chosen = chosen.view(batch, length, -1)
        OUTPUT_LAYOUTS[chosen] = layout
        return chosen


class IndexInputs(NamedTuple):
    """The tensors from which an indexer computes its scores, with one row per token."""

    queries: Float[Tensor, "t heads d"]
    weights: Float[Tensor, "t heads"]
    keys: Float[Tensor, "t d"]


# The functions, in a family's own module, that rotate an indexer's queries and keys.
_ROTATIONS = {
    "deepseek_v32": "apply_rotary_pos_emb",
    "glm_moe_dsa": "apply_rotary_pos_emb_interleave",
}


def index_inputs(
    indexer: Any,
    hidden: Float[Tensor, "t h"],
    q_latent: Float[Tensor, "t r"],
    rotation: tuple[Float[Tensor, "t p"], Float[Tensor, "t p"]],
    *,
    fp8: bool = False,
) -> IndexInputs:
    """Compute an indexer's queries, weights of heads, and keys, as the model's own indexer does.

    Args:
        indexer: a model's indexer.
        hidden: the inputs of the layer's attention.
        q_latent: the latents of attention's queries.
        rotation: the cosines and sines of the tokens' positions.
        fp8: whether to round queries and keys to FP8.
    """
    module = sys.modules[type(indexer).__module__]
    rotate = getattr(module, _ROTATIONS[indexer.config.model_type])
    rotated = indexer.qk_rope_head_dim
    queries = indexer.wq_b(q_latent).unflatten(1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden)).unsqueeze(1)
    turned = rotate(queries[..., :rotated], keys[..., :rotated], *rotation)
    queries, keys = (
        torch.cat([first, whole[..., rotated:]], dim=-1)
        for first, whole in zip(turned, (queries, keys), strict=True)
    )
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    if fp8:
        queries, keys = _round_to_fp8(queries), _round_to_fp8(keys)
    return IndexInputs(queries, weights * indexer.n_heads**-0.5, keys.squeeze(1))


def _round_to_fp8(x: Tensor) -> Tensor:
    """Round vectors to e4m3, each with a power of 2 as its scale.

    bfloat16 represents the results exactly, so products of them need no kernels for FP8.
    """
    most = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-4)
    scale = (most / torch.finfo(torch.float8_e4m3fn).max).log2().ceil().exp2()
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def choose_keys(
    indexer: Any,
    queries: Float[Tensor, "t heads d"],
    weights: Float[Tensor, "t heads"],
    keys: Float[Tensor, "s d"],
) -> Int[Tensor, "t k"]:
    """Choose keys for the last tokens of a document, a limited number of tokens at a time.

        score_j = sum_h weight_h max(0, q_h . k_j) / sqrt(d)

    Returns ``[t, index_topk]``, int32: the positions of the keys with the highest scores, then -1
    if fewer are visible. Among keys with equal scores, the first are chosen, so that the choice
    does not depend on how many tokens or keys are scored at a time.
    """
    weights = weights * indexer.softmax_scale
    chosen: Tensor = _choose(queries, weights, keys, indexer.index_topk)
    return chosen


# An operator, so that selective recomputation keeps the choice, and not the products of all heads.
@torch.library.custom_op("primerl::choose_keys", mutates_args=())
def _choose(queries: Tensor, weights: Tensor, keys: Tensor, top_k: int) -> Tensor:
    count, before = len(queries), len(keys) - len(queries)
    most = MAX_SCORES if keys.device.type == "cpu" else MAX_SCORES_ON_GPU
    held = queries.shape[1] if reason_against_scoring_kernel(queries) else 1
    at_once = max(1, most // (held * len(keys)))
    position, finite = torch.arange(len(keys), device=keys.device), torch.finfo(torch.float32)
    chosen = torch.full((count, top_k), -1, dtype=torch.int32, device=keys.device)
    for begin in range(0, count, at_once):
        rows = slice(begin, begin + at_once)
        here = position[before + begin :][: len(queries[rows])].unsqueeze(1)
        seen = before + begin + len(here)
        scores = _scores(queries[rows], weights[rows], keys[:seen])
        scores.clamp_(finite.min, finite.max)  # only keys that are not visible score -inf
        scores.masked_fill_(position[:seen] > here, -torch.inf)
        found = _highest(scores, min(top_k, seen))
        chosen[rows, : found.shape[1]] = found.masked_fill(found > here, -1).int()
    return chosen


@_choose.register_fake
def _(queries: Tensor, _weights: Tensor, _keys: Tensor, top_k: int) -> Tensor:
    return queries.new_empty(len(queries), top_k, dtype=torch.int32)


def reason_against_scoring_kernel(queries: Float[Tensor, "t heads d"]) -> str | None:
    """Return why Triton's kernel can't compute the scores of queries, or None if it can."""
    if not queries.is_cuda:
        return f"it runs on CUDA devices, not on {queries.device.type}"
    if queries.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {queries.dtype}"
    heads, size = queries.shape[1:]
    if heads & (heads - 1) or not 1 <= heads <= 128:
        return f"its blocks have powers of 2 up to 128 as numbers of heads, not {heads}"
    if size & (size - 1) or not 16 <= size <= 128:
        return f"its blocks have powers of 2 from 16 to 128 as sizes of heads, not {size}"
    return None


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Compute scores in float32, also under autocast; 16-bit rounding would make many equal."""
    if reason_against_scoring_kernel(queries) is None:
        from primerl.attention.indexer_triton import index_scores

        return index_scores(queries, weights, keys)
    with torch.autocast(queries.device.type, enabled=False):
        products = queries.float() @ keys.float().T
        return (weights.unsqueeze(1) @ products.relu_()).squeeze(1)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the highest scores in each row, the first ones of equal scores.

    Scores of -inf, of keys that are not visible, come last, in any order.
    """
    values, places = scores.topk(count)
    least = values[:, -1:]
    tied = (((scores >= least).sum(1) > count) & least.isfinite().squeeze(1)).nonzero().squeeze(1)
    if len(tied):  # topk takes any of the equal scores
        some, least = scores[tied], least[tied]
        above, equal = some > least, some == least
        missing = count - above.sum(1, keepdim=True)
        first = above | (equal & (equal.cumsum(1) <= missing))
        places[tied] = first.nonzero()[:, 1].view(-1, count)
    return places


@once_per_tensor
def _find_layout(
    position_ids: Tensor, batch: int, device: torch.device, gather: GatherRows | None
) -> Layout:
    """Make the layout of all documents on the ranks that share documents with this rank."""
    if gather is None:
        return batch_layout(position_ids, batch, device)
    positions, _ = gather(position_ids.expand(batch, -1).flatten())
    return lay_out(find_documents(positions), device)
