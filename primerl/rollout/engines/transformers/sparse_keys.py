"""The keys that DeepSeek sparse attention chooses (arXiv:2512.02556), for a batch of requests.

The indexer has its own keys, which are kept in pages like those of attention. The indexer is called
for one request at a time, and only for requests with more tokens than it chooses.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class PagedIndexer(nn.Module):
    """Wrapper of a model's indexer, which keeps the names of its parameters.

    It returns ``[1, t, index_topk]``, int32: for each token, the positions of the chosen keys in
    its request, or -1 if the token sees all of them. It returns ``[1, t, 0]`` if that is so for all
    tokens.

    Args:
        indexer: the model's indexer.
        find_step: returns the ``AttentionStep`` of the current forward pass.
    """

    def __init__(self, indexer: nn.Module, find_step: Any) -> None:
        super().__init__()
        for name, child in indexer.named_children():
            self.add_module(name, child)
        # In a tuple, so that the indexer's parameters are not registered a second time.
        self.wrapped = (indexer,)
        self.find_step = find_step

    def forward(
        self,
        hidden: Float[Tensor, "1 t h"],
        q_latent: Float[Tensor, "1 t r"],
        rotation: tuple[Tensor, Tensor],
        attention_mask: Tensor,  # noqa: ARG002
        position_ids: Int[Tensor, "1 t"],
        past_key_values: Any = None,  # noqa: ARG002
        *,
        cache: Any = None,  # noqa: ARG002  the argument's name since transformers 5.24
    ) -> Int[Tensor, "1 t k"]:
        """Store the new keys, and choose among those of each request."""
        indexer: Any = self.wrapped[0]
        rows = [hidden, q_latent, *rotation, position_ids]
        rows = [one.expand(1, *one.shape[1:])[0] for one in rows]
        keys = _keys(indexer, rows)
        requests = self.find_step().store_index_keys(keys.unsqueeze(0).unsqueeze(0))
        most = indexer.index_topk
        chosen = torch.full((1, len(keys), most), -1, dtype=torch.int32, device=keys.device)
        sparse = [one for one in requests if one[1] + one[2] > most]
        for start, first, count, gather in sparse:
            part = slice(start, start + count)
            found = _choose(indexer, [one[part] for one in rows], gather()[: first + count], first)
            chosen[0, part, : found.shape[1]] = found
        return chosen if sparse else chosen[:, :, :0]


class _NewKeys:
    """In place of the model's cache: keeps the indexer's new keys."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:  # noqa: ARG002
        self.keys = keys[0]
        return keys[:, :1]


class _GivenKeys:
    """In place of the model's cache: makes the indexer score given keys."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:  # noqa: ARG002
        return self.keys.unsqueeze(0)


def _call(indexer: Any, rows: Sequence[Tensor], visible: Bool[Tensor, "t s"], cache: Any) -> Tensor:
    hidden, q_latent, cos, sin, positions = (one.unsqueeze(0) for one in rows)
    chosen: Tensor = indexer(hidden, q_latent, (cos, sin), visible.unsqueeze(0), positions, cache)
    return chosen[0]


def _keys(indexer: Any, rows: Sequence[Tensor]) -> Float[Tensor, "t d"]:
    recorder = _NewKeys()
    visible = torch.ones(len(rows[0]), 1, dtype=torch.bool, device=rows[0].device)
    _call(indexer, rows, visible, recorder)
    return recorder.keys


def _choose(
    indexer: Any, rows: Sequence[Tensor], keys: Float[Tensor, "s d"], first: int
) -> Int[Tensor, "t k"]:
    """Choose keys for the tokens ``first`` and later of one request; -1 is "all that it sees"."""
    positions = torch.arange(first, len(keys), device=keys.device).unsqueeze(1)
    visible = torch.arange(len(keys), device=keys.device) <= positions
    chosen = _call(indexer, rows, visible, _GivenKeys(keys))
    return chosen.masked_fill(positions < indexer.index_topk, -1)
