"""DeepSeek sparse attention within packed documents, for unmodified Hugging Face models.

An indexer chooses the keys that each query attends to (arXiv:2512.02556). In ``transformers``, it
scores the whole pack against itself, and attention computes all pairs of the pack under a square
mask. Here, it scores each document separately, and attention computes only the chosen pairs.

Keys and values are expanded from latents, one per token (arXiv:2405.04434). With L entries of a
latent, R rotated entries, and N and V of a head's key and value, there are two ways to compute a
pair of tokens:

- *Expanded*: H (N + R + V) multiply-adds, H heads, 32,768 in GLM-5. Each head has its own keys.
- *Latent*: the expansion is applied to the query and to the output instead, which takes as many
  FLOPs per token as it does for keys and values. Then all heads share a key, and a pair takes
  H (2 L + R) multiply-adds, 69,632 in GLM-5.

A document of at most ``index_topk`` tokens is expanded, because each of its keys serves all later
queries. In a longer document, each query has other keys, and must read them: 32,768 numbers per
pair if they are expanded, and 576 if they are not. So such a document stays in the latent space,
with twice the FLOPs and a 57th of the memory traffic.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl.attention.admission import (
    CONTEXT_SPARSE_ATTENTION,
    MASKED_ATTENTION,
    SPARSE_ATTENTION,
    SPARSE_FAMILIES,
)
from primerl.attention.division import divide_spans
from primerl.attention.documents import Layout, Span, spans_within
from primerl.attention.indexer import (
    OUTPUT_LAYOUTS,
    SWITCH_BACK,
    SWITCHED,
    DocumentIndexer,
    GatherRows,
)
from primerl.attention.kernels import attend
from primerl.attention.latent import attend_to_latents
from primerl.attention.packed import (
    not_passed_on,
    packed_attention,
    refuse_other_attention,
    switch_attention,
)


class LatentAttention(nn.Module):
    """A model's attention, without the expansion of latents to the keys and values of all heads.

    It has the attributes, parameters and hooks of the model's own module, and runs its forward
    method. If the model was switched to sparse attention, the attention function gets latents with
    the rotated part of keys as its keys ``[b, 1, s, latent + rotated]``, and latents as its values.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        vars(self).update(vars(attention))
        self.family: Any = type(attention)
        module: Any = attention
        kinds = getattr(module.config, "indexer_types", None) or ()
        self.hands_on = "shared" in kinds[module.layer_idx + 1 : module.layer_idx + 2]
        """Whether the next layer reuses this layer's choice of keys."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call the model's own method, and drop a choice of keys that no other layer reuses."""
        outputs: tuple[Any, ...] = self.family.forward(self, *args, **kwargs)
        if len(outputs) < 3 or self.hands_on or not self.switched:
            return outputs
        attended, weights, chosen = outputs
        return attended, weights, chosen.new_empty(*chosen.shape[:2], 0)

    @property
    def switched(self) -> bool:
        """Whether the model was switched to sparse attention."""
        config: Any = self.config
        return config._attn_implementation in SWITCHED

    def expand_kv(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values; the model's own method of this name expands them."""
        if self.switched:
            return torch.cat([latent, rotated], dim=-1), latent
        return self.expand(latent, rotated)

    def expand(
        self, latent: Float[Tensor, "b 1 s l"], rotated: Float[Tensor, "b 1 s r"]
    ) -> tuple[Float[Tensor, "b heads s d"], Float[Tensor, "b heads s dv"]]:
        """Expand latents to the keys and values of all heads."""
        keys, values = self.family.expand_kv(self, latent, rotated)
        return keys, values

    def expansions(
        self, latent: Float[Tensor, "s l"]
    ) -> tuple[Float[Tensor, "l heads n"], Float[Tensor, "l heads dv"]]:
        """Return the matrices that expand latents to keys, without the rotated part, and to values.

        They are what the layer computes for unit vectors, so that layers in FP8 and with adapters
        need no code of their own.
        """
        module: Any = self
        _refuse_adapter_dropout(module.kv_b_proj)
        units = torch.eye(latent.shape[1], dtype=latent.dtype, device=latent.device)
        both = module.kv_b_proj(units).view(len(units), module.num_heads, -1)
        keys, values = both.tensor_split([module.qk_nope_head_dim], dim=-1)
        return keys, values


def _refuse_adapter_dropout(projection: nn.Module) -> None:
    """Refuse an adapter with dropout on the layer that expands latents."""
    for name, module in projection.named_modules(prefix="kv_b_proj"):
        if isinstance(module, nn.Dropout) and module.training and module.p:
            raise ValueError(
                f"{name} has dropout (p={module.p}), which would drop the same entries of all "
                "latents in documents of more than index_topk tokens; use lora_dropout=0, or leave "
                "kv_b_proj out of target_modules"
            )


def attend_sparsely(
    model: nn.Module, *, gather: GatherRows | None = None, attention: Any = None
) -> None:
    """Switch a model with DeepSeek sparse attention to choose keys and attend within each document.

    Each indexer is wrapped in a ``DocumentIndexer``, and each attention module replaced by a
    ``LatentAttention``. Both keep the names of parameters.

    Args:
        model: a model of one of the ``SPARSE_FAMILIES``.
        gather: gathers the rows of all ranks that share documents, in order.
        attention: with ``gather``, an entry of ``AttentionInterface`` that works over these ranks.
    """
    config: Any = model.config
    if config._attn_implementation not in (*MASKED_ATTENTION, SPARSE_ATTENTION):
        raise ValueError(
            f"{config.model_type} uses {config._attn_implementation} attention, where an indexer "
            "chooses keys for the whole pack; load it with attn_implementation='sdpa'"
        )
    for name, module in list(model.named_modules()):
        if hasattr(module, "expand_kv") and not isinstance(module, LatentAttention):
            model.set_submodule(name, LatentAttention(module))
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, DocumentIndexer):
            indexer.gather = gather
        elif isinstance(indexer, nn.Module):
            module.set_submodule("indexer", DocumentIndexer(indexer, gather))
    name = SPARSE_ATTENTION if gather is None else CONTEXT_SPARSE_ATTENTION
    switch_attention(model, name, attention or _sparse_attention, _placeholder)


def score_in_fp8(model: nn.Module) -> None:
    """Let a model's indexers score keys in FP8 (e4m3), as vLLM does for GLM-5 and DeepSeek-V3.2.

    Queries and keys are rounded, each vector with a power of 2 as its scale. Call it at any time;
    it applies where documents are packed.

    Raises:
        ValueError: the model has no indexer.
    """
    found = False
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, DocumentIndexer):
            indexer.fp8 = found = True
        elif isinstance(indexer, nn.Module):
            module.set_submodule("indexer", DocumentIndexer(indexer, fp8=True))
            found = True
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no indexer, so it scores no keys; expected a model of one "
            f"of the families {', '.join(SPARSE_FAMILIES)}"
        )


def _placeholder(
    *_: Any, attention_mask: Tensor | None = None, device: Any = "cpu", **_others: Any
) -> Tensor:
    """Make a one-element mask without information, for layers that require a mask."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(f"padding is not supported; {SWITCH_BACK}")
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _sparse_attention(
    module: Any,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b _ s dk"],
    value: Float[Tensor, "b _ s l"],
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    indices: Int[Tensor, "b t k"] | None = None,
    scaling: float,
    documents: Layout | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "b t heads dv"], None]:
    """Entry of ``AttentionInterface``: attention to the chosen keys of each document."""
    indexer = getattr(module, "indexer", None)
    switched = isinstance(module, LatentAttention) and isinstance(indexer, DocumentIndexer | None)
    if indices is None or not switched:
        raise ValueError(
            f"{type(module).__name__} chooses keys for the whole pack; call "
            "primerl.loss.model_logprobs once, which switches the model to packed documents"
        )
    if documents is None:
        documents = OUTPUT_LAYOUTS.get(indices)  # type: ignore[no-untyped-call]
        if documents is None:
            raise ValueError(not_passed_on(module))
    if indices.shape[-1] == 0:
        keys, values = module.expand(value, key[..., value.shape[-1] :])
        return packed_attention(
            module, query, keys, values, None, scaling=scaling, documents=documents, **asked
        )
    refuse_other_attention(module, documents.max_keys, asked)
    _refuse_dropout(module, asked)
    batch, _, length, _ = query.shape
    q, latent = (x.transpose(1, 2).flatten(0, 1) for x in (query, key))
    spans = spans_within(documents.spans, 0, batch * length)
    attended = attend_to_chosen(
        *(module, q, latent.squeeze(1), documents, spans, indices.flatten(0, 1)), scaling=scaling
    )
    return attended.view(batch, length, *attended.shape[1:]), None


def _refuse_dropout(module: nn.Module, asked: dict[str, Any]) -> None:
    """Refuse attention dropout, which sparse attention does not compute."""
    if asked.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} uses attention dropout (dropout={asked['dropout']}), which "
            "sparse attention does not support; set the model's attention_dropout to 0"
        )


def attend_to_chosen(
    attention: Any,
    query: Float[Tensor, "t heads d"],
    latent: Float[Tensor, "s dk"],
    layout: Layout,
    spans: list[Span],
    chosen: Int[Tensor, "t k"],
    *,
    scaling: float,
) -> Float[Tensor, "t heads dv"]:
    """Compute the attention of each span's queries to the keys that were chosen for them.

    If a span sees no more than ``k`` keys, each of its queries attends to all keys that it sees. If
    ``k`` is 0, all queries do.

    Args:
        attention: the model's ``LatentAttention``, which expands latents.
        query: a rank's queries.
        latent: the latents of all rows that the queries may see, with the rotated part of keys.
        layout: the layout of all documents.
        spans: parts of documents, in the order of the queries.
        chosen: positions of keys within the query's document.
        scaling: the factor that multiplies the scores.
    """
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, latent = query.to(dtype), latent.to(dtype)
    parts = divide_spans(layout.plan, tuple(spans), chosen.shape[1], query.device)
    rank, outputs = attention.kv_lora_rank, []
    if parts.short is not None:
        q, shown = _select(query, parts.short_rows), _select(latent, parts.short_keys)
        keys, values = attention.expand(*shown[None, None].tensor_split([rank], dim=-1))
        k, v = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        outputs.append(attend(q, k, v, parts.short, scaling=scaling))
    if parts.starts is not None:
        q, picked = (_select(x, parts.long_rows) for x in (query, chosen))
        to_keys, to_values = attention.expansions(latent[:, :rank])
        plain, rotated = q.tensor_split([to_keys.shape[2]], dim=-1)
        absorbed = torch.einsum("thn,lhn->thl", plain, to_keys)
        attended = attend_to_latents(
            *(torch.cat([absorbed, rotated], dim=-1), latent, picked, parts.starts, parts.table),
            width=rank,
            scaling=scaling,
        )
        outputs.append(torch.einsum("thl,lhv->thv", attended, to_values))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs).index_select(0, parts.inverse)


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
