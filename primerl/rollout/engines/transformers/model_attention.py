"""Switches unmodified Hugging Face models to the attention of the embedded engine.

All tokens of a step lie end to end in one row, which the model sees as its batch. The attention
function is an entry of transformers' ``AttentionInterface``; it hands queries, keys and values to
the forward pass that ``attending`` has set. The model is called without a cache.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from jaxtyping import Float
from torch import Tensor, nn

from primerl._common.optional import require
from primerl.rollout.engines.transformers.attention_scores import Scoring
from primerl.rollout.engines.transformers.attention_step import AttentionStep, IndexedRequest
from primerl.rollout.engines.transformers.kv_cache import LayerShape
from primerl.rollout.engines.transformers.recurrent_states import (
    MixRows,
    States,
    switch_to_states,
)
from primerl.rollout.engines.transformers.sparse_keys import PagedIndexer

PAGED_ATTENTION = "primerl_paged"
SPARSE_ATTENTION = "primerl_paged_sparse"

# The dtype of a mask of which only the width means something: it is the size of the window.
_WINDOW_DTYPE = torch.int32
# The arguments of attention that don't change what it computes here.
_IGNORED = frozenset({"position_ids", "dropout", "logits_to_keep", "output_attentions"})

_STEP: "ContextVar[AttentionStep | ShapeProbe]" = ContextVar("_STEP")


@contextlib.contextmanager
def attending(step: "AttentionStep | ShapeProbe") -> Iterator[None]:
    """Use ``step`` in the forward passes of this context."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def switch_to_pages(model: nn.Module) -> None:
    """Register the attention function with transformers, and switch a model to it.

    Raises:
        ValueError: the model's attention can't be switched.
    """
    transformers = require("transformers", extra="transformers")
    sparse = False
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            # The trainer's forward pass may have wrapped it before.
            (indexer,) = getattr(indexer, "wrapped", (indexer,))
            module.set_submodule("indexer", PagedIndexer(indexer, _STEP.get))
            sparse = True
    switch_to_states(model, _STEP.get)
    name = SPARSE_ATTENTION if sparse else PAGED_ATTENTION
    transformers.AttentionInterface.register(name, _paged_attention)
    transformers.AttentionMaskInterface.register(name, _no_mask if sparse else _window_as_mask)
    model.set_attn_implementation(name)  # type: ignore[operator]
    config: Any = model.config
    if config._attn_implementation != name:
        raise ValueError(f"{config.model_type} has its own attention implementation")


def _window_as_mask(*_: Any, local_size: int | None = None, **_others: Any) -> Tensor | None:
    """Entry of ``AttentionMaskInterface``: tell attention the window, if there is one."""
    if local_size is None:
        return None
    return torch.zeros(1, 1, 1, 1, dtype=_WINDOW_DTYPE).expand(1, 1, 1, local_size)


def _no_mask(*_: Any, **_others: Any) -> Tensor:
    """Entry of ``AttentionMaskInterface`` for layers that require a mask; nothing reads it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _paged_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads t d"],
    key: Float[Tensor, "1 kv_heads t d"],
    value: Float[Tensor, "1 kv_heads t dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "1 t heads dv"], None]:
    """Entry of ``AttentionInterface``."""
    step = _STEP.get(None)
    if step is None:
        raise RuntimeError(
            "this model is served by TransformersEngine, and can't be called by others; "
            "model.set_attn_implementation('sdpa') switches it back"
        )
    _refuse_other_attention(module, attention_mask, asked)
    window = sliding_window
    if attention_mask is not None and attention_mask.dtype == _WINDOW_DTYPE:
        window = attention_mask.shape[3]
    scoring = Scoring(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    return step.attend(query, key, value, scoring, indices), None


def _refuse_other_attention(module: nn.Module, mask: Tensor | None, asked: dict[str, Any]) -> None:
    if mask is not None and mask.dtype not in (_WINDOW_DTYPE, torch.bool):
        raise ValueError(
            f"{type(module).__name__} makes its own mask, which this engine does not support; "
            "serve the model with vLLM"
        )
    causal = asked.get("is_causal", getattr(module, "is_causal", True))
    if causal is False:
        raise ValueError(f"{type(module).__name__} attends to later tokens too")
    for name, value in asked.items():
        if not (name in _IGNORED or value is None or isinstance(value, bool)):
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which this engine does not compute; "
                "serve the model with vLLM"
            )


@attrs.define(eq=False)
class ShapeProbe:
    """In place of an ``AttentionStep``: finds the shapes of keys, values and recurrent states.

    Args:
        positions: how many tokens a request can have; None if there is no limit.
    """

    positions: int | None = None
    shapes: list[LayerShape] = attrs.Factory(list)
    states: list[States] = attrs.Factory(list)
    """The states of each mixer for one request."""

    def mix(self, mixer: int, hidden: Tensor, run: MixRows) -> Tensor:
        """Run a mixer on all tokens, and note its states."""
        assert mixer == len(self.states), "mixers run in the order of their names"
        mixed, states = run(hidden, torch.arange(hidden.shape[1]).unsqueeze(0), [])
        self.states.append(states)
        return mixed

    def store_index_keys(self, keys: Tensor) -> list[IndexedRequest]:
        """Note the shape of an indexer's keys."""
        self.shapes.append(LayerShape.of(keys, keys[..., :0]))
        return []

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        chosen: Tensor | None,
    ) -> Tensor:
        """Note the shapes and windows, and return zeros."""
        window = scoring.window if chosen is None else None  # those are chosen among all keys
        if window is not None and self.positions is not None and window >= self.positions:
            window = None
        self.shapes.append(LayerShape.of(key, value, window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
