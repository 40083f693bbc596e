"""Metrics of router replay."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from primerl._forward_passes import PassTotal


class RouteCounts:
    """Counts (token, layer) pairs whose routes were replayed, over forward passes.

        counts = replay.RouteCounts()
        for batch, rows in replay.fetch(batches):
            with replay.forced(model, rows, counts=counts):
                ...
        metrics |= counts.summary(parallel.all_sum)

    Each forward pass counts once, also where activations are recomputed.
    """

    def __init__(self) -> None:
        self._total = PassTotal()

    def add(self, recorded: Tensor, differing: Tensor) -> None:
        """Add one layer: whether each token's experts were recorded, and differed from its own."""
        numbers = [recorded.new_tensor(recorded.numel(), dtype=torch.int64)]
        self._total.add(torch.stack([*numbers, recorded.sum(), differing.sum()]))

    def summary(
        self,
        all_sum: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    ) -> dict[str, float]:
        """Shares of all (token, layer) pairs since the last summary; empty if there were none.

        ``routes_differ``: the router would have chosen other experts than those recorded.
        ``routes_missing``: none were recorded, and it chose itself.
        """
        total = self._total.take()
        here = torch.zeros(3, dtype=torch.int64) if total is None else total.cpu()
        pairs, recorded, differing = all_sum({"routes": here})["routes"].tolist()
        if pairs == 0:
            return {}
        return {
            "routes_differ": differing / pairs,
            "routes_missing": 1 - recorded / pairs,
        }
