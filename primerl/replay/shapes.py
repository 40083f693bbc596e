"""The shape of a model's expert routes, and checks that expert sets fit that shape."""

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import attrs
import numpy as np


def _indices(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(operator.index(value) for value in values)


@attrs.frozen(kw_only=True)
class RouteShape:
    """The shape of a model's expert routes.

    Routes have one entry per layer with experts: ``[t, len(layers), k]``. Engines that report every
    decoder layer send ``[t, decoder_layers, k]``.

    Raises:
        ValueError: there are no layers or experts, or the numbers contradict each other.
    """

    layers: tuple[int, ...] = attrs.field(converter=_indices)
    """Indices of the decoder layers with experts, such as 3 to 77, without the layers that predict
    several tokens (MTP)."""
    decoder_layers: int
    experts: int
    """Number of routed experts per layer."""
    k: int
    """Number of experts that a layer chooses per token."""

    def __attrs_post_init__(self) -> None:
        in_order = list(self.layers) == sorted(set(self.layers))
        if not self.layers or not in_order or not 0 <= self.layers[0] <= self.layers[-1]:
            raise ValueError(f"layers is {self.layers}; expected indices in increasing order")
        if self.layers[-1] >= self.decoder_layers:
            raise ValueError(
                f"layer {self.layers[-1]} has experts, but there are {self.decoder_layers} decoder "
                "layers, numbered from 0"
            )
        if not 1 <= self.k <= self.experts or self.experts > 2**15:
            raise ValueError(
                f"k={self.k} of {self.experts} experts; expected 1 <= k <= experts <= 32768"
            )


def ordered_sets(
    ids: np.ndarray, *, experts: int, first_token: int, layers: Sequence[int]
) -> np.ndarray:
    """Return ``ids[t, layers, k]`` as int16, with each expert set in increasing order.

    Args:
        ids: integers; -1 in all k entries if nothing was recorded.
        experts: number of experts per layer.
        first_token: the token of row 0, for errors.
        layers: the indices of the layers, for errors.

    Raises:
        ValueError: a set has an expert twice, an id out of range, or -1 in only some entries.
    """
    if _are_ordered_sets(ids, experts):
        return ids.astype(np.int16)
    missing_sets(ids, experts=experts, first_token=first_token, layers=layers)
    ordered = np.sort(ids, axis=-1).astype(np.int16)
    repeated = ordered[..., 1:] == ordered[..., :-1]
    repeated &= ordered[..., 1:] >= 0
    if repeated.any():
        token, layer, _ = np.argwhere(repeated)[0]
        raise expert_twice(ids[token, layer], layers[layer], first_token + int(token))
    return ordered


def _are_ordered_sets(ids: np.ndarray, experts: int) -> bool:
    """Check that all sets are valid, complete and ordered: a fast path for small arrays."""
    if not ids.size:
        return True
    rising = ids[..., 1:] > ids[..., :-1]
    return bool(rising.all() and ids.min() >= 0 and ids.max() < experts)


def missing_sets(
    ids: np.ndarray, *, experts: int, first_token: int, layers: Sequence[int]
) -> np.ndarray | None:
    """Return a mask ``bool[t, layers]`` of the sets not recorded; None if all were recorded.

    Raises:
        ValueError: an id is out of range, or a set has -1 in only some entries.
    """
    lowest = ids.min(initial=0)
    if lowest < -1 or ids.max(initial=0) >= experts:
        token, layer, place = np.argwhere((ids < -1) | (ids >= experts))[0]
        raise ValueError(
            f"layer {layers[layer]} of token {first_token + token} has expert "
            f"{ids[token, layer, place]}; expected ids from 0 to {experts - 1}, or -1 in all "
            "places for a token that was not recorded"
        )
    if lowest == 0:
        return None
    absent = ids < 0
    partly = absent.any(-1) & ~absent.all(-1)
    if partly.any():
        token, layer = np.argwhere(partly)[0]
        raise ValueError(
            f"layer {layers[layer]} of token {first_token + token} has -1 in only some places: "
            f"{ids[token, layer].tolist()}; expected -1 in all k places or in none"
        )
    missing: np.ndarray = absent[..., 0]
    return missing


def expert_twice(ids: np.ndarray, layer: int, token: int) -> ValueError:
    """Make the error for a set ``ids[k]`` that has an expert twice."""
    return ValueError(
        f"layer {layer} of token {token} has an expert twice: {ids.tolist()}; expected {len(ids)} "
        "different experts"
    )
