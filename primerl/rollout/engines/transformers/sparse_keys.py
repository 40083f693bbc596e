"""The keys that DeepSeek sparse attention chooses (arXiv:2512.02556), for a batch of requests.

The indexer has its own keys, which are kept in pages like those of attention. It chooses keys for
one request at a time, as the trainer does for one document, and only for requests with more tokens
than it chooses.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl.attention.indexer import choose_keys, index_inputs


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
        position_ids: Int[Tensor, "1 t"],  # noqa: ARG002
        past_key_values: Any = None,  # noqa: ARG002
        *,
        cache: Any = None,  # noqa: ARG002  the argument's name since transformers 5.24
    ) -> Int[Tensor, "1 t k"]:
        """Store the new keys, and choose among those of each request."""
        indexer: Any = self.wrapped[0]
        cosines, sines = rotation
        queries, weights, keys = index_inputs(
            indexer, hidden[0], q_latent[0], (cosines[0], sines[0])
        )
        requests = self.find_step().store_index_keys(keys.unsqueeze(0).unsqueeze(0))
        most = indexer.index_topk
        chosen = torch.full((1, len(keys), most), -1, dtype=torch.int32, device=keys.device)
        sparse = [one for one in requests if one[1] + one[2] > most]
        for start, first, count, gather in sparse:
            part = slice(start, start + count)
            found = choose_keys(indexer, queries[part], weights[part], gather()[: first + count])
            positions = torch.arange(first, first + count, device=keys.device).unsqueeze(1)
            chosen[0, part] = found.masked_fill(positions < most, -1)
        return chosen if sparse else chosen[:, :, :0]
