"""Recording which experts an unmodified model chooses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int16
from torch import Tensor, nn

from primerl._common.forward_passes import recomputing
from primerl.replay.layers import ExpertLayer, expert_layers


class CapturedRoutes:
    """The experts that were chosen in the latest forward pass."""

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._chosen: dict[int, Tensor] = {}

    @property
    def rows(self) -> Int16[Tensor, "t layers k"]:
        """``[t, layers, k]``: for each token, the experts of each layer that has any.

        Raises:
            RuntimeError: there was no forward pass, or only a part of the model ran.
        """
        missing = [layer.name for layer in self._layers if layer.index not in self._chosen]
        if missing:
            raise RuntimeError(
                f"no routes were recorded in {missing[0]} ({len(missing)} of {len(self._layers)} "
                "layers): run the whole model within `with replay.capture(model)`"
            )
        stacked = torch.stack([self._chosen[layer.index] for layer in self._layers])
        return stacked.flatten(1, -2).transpose(0, 1)

    def record(self, layer: ExpertLayer, chosen: Tensor) -> None:
        """Keep the experts of one layer's tokens."""
        self._chosen[layer.index] = chosen.to(torch.int16)


@contextmanager
def capture(model: nn.Module) -> Iterator[CapturedRoutes]:
    """Record the experts that each token is sent to.

        with replay.capture(model) as routes:
            model(token_ids[None])
        routes.rows  # [t, layers, k]

    Hooks on the modules that hold the experts see the indices that reach them, so whatever chose
    them, in whatever family, is recorded. They are gone afterwards. After several forward passes,
    ``rows`` are those of the latest; recomputation in a backward pass is not one.

    Args:
        model: a ``transformers`` model with routed experts, whole, sharded, or with adapters.

    Raises:
        ValueError: the model has no layers with routed experts.
    """
    layers = expert_layers(model)
    routes = CapturedRoutes(layers)
    hooks = [
        layer.experts.register_forward_pre_hook(_recording_hook(layer, routes), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


def chosen_experts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The indices among the arguments of a module that holds experts: its only integers."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    integers = [value for value in tensors if not value.is_floating_point()]
    if len(integers) != 1:
        raise RuntimeError(
            f"an experts module was called with {len(integers)} tensors of integers; expected one, "
            "the experts of each token"
        )
    return integers[0]


def _recording_hook(layer: ExpertLayer, routes: CapturedRoutes) -> Any:
    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recomputing():
            routes.record(layer, chosen_experts(args, kwargs))

    return record
