"""What a model's expert routes look like: its layers with experts, and how many they choose."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex

import attrs


def _indices(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(operator.index(value) for value in values)


@attrs.frozen(kw_only=True)
class RouteShape:
    """The shape of a model's expert routes.

    Rows of routes have an entry for each layer with experts, ``[t, len(layers), k]``. Engines that
    report one for every decoder layer send ``[t, decoder_layers, k]``.

    Raises:
        ValueError: there are no layers or experts, or their numbers contradict each other.
    """

    layers: tuple[int, ...] = attrs.field(converter=_indices)
    """Which decoder layers have experts, such as 3 to 77; layers that predict several tokens (MTP)
    are not among them."""
    decoder_layers: int
    experts: int
    """Routed experts of a layer."""
    k: int
    """Experts that a layer chooses for a token."""

    def __attrs_post_init__(self) -> None:
        in_order = list(self.layers) == sorted(set(self.layers))
        if not self.layers or not in_order or not 0 <= self.layers[0] <= self.layers[-1]:
            raise ValueError(f"layers is {self.layers}; expected indices in increasing order")
        if self.layers[-1] >= self.decoder_layers:
            raise ValueError(
                f"layer {self.layers[-1]} has experts, but there are {self.decoder_layers} layers"
            )
        if not 1 <= self.k <= self.experts or self.experts > 2**15:
            raise ValueError(
                f"k={self.k} of {self.experts} experts; expected 1 <= k <= experts <= 32768"
            )
