"""Metrics of router replay."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from primerl._common.forward_passes import PassTotal


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
        self._lost = 0

    def add_lost(self) -> None:
        """Add a sample whose routes were recorded, but are gone or damaged."""
        self._lost += 1

    def add(self, recorded: Tensor, differing: Tensor) -> None:
        """Add one layer: whether each token's experts were recorded, and differed from its own."""
        numbers = [recorded.new_tensor(recorded.numel(), dtype=torch.int64)]
        self._total.add(torch.stack([*numbers, recorded.sum(), differing.sum()]))

    def summary(
        self,
        all_sum: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    ) -> dict[str, float]:
        """Metrics since the last summary; empty if nothing was replayed.

        ``routes_differ``: the share of all (token, layer) pairs for which the router would have
        chosen other experts than those recorded. ``routes_missing``: the share for which none were
        recorded, so that it chose itself. ``routes_lost``: number of samples whose recorded routes
        were gone or damaged, on all ranks that needed them.
        """
        total = self._total.take()
        here = torch.zeros(3, dtype=torch.int64) if total is None else total.cpu()
        lost, self._lost = self._lost, 0
        numbers = all_sum({"routes": torch.cat([here, torch.tensor([lost])])})["routes"].tolist()
        pairs, recorded, differing, lost = (int(number) for number in numbers)
        if pairs == 0:
            return {"routes_lost": lost} if lost else {}
        return {
            "routes_differ": differing / pairs,
            "routes_missing": 1 - recorded / pairs,
            "routes_lost": lost,
        }
