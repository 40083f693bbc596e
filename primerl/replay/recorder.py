"""The layers of an unmodified model that have routed experts, and the experts that they choose."""

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from jaxtyping import Int16
from torch import Tensor, nn

from primerl._common.expert_modules import expert_modules
from primerl._common.forward_passes import recomputing
from primerl.replay.shapes import RouteShape

# How configurations call the number of experts that a layer chooses.
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


@attrs.frozen(kw_only=True, eq=False)
class ExpertLayer:
    """A decoder layer with routed experts."""

    index: int
    """Among all decoder layers."""
    name: str
    """Of the module that holds the experts."""
    experts: nn.Module
    """What is called with the experts that were chosen, and their weights."""
    block: nn.Module
    """The module around it, within which they are chosen."""
    count: int
    """Number of experts."""


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The decoder layers of a model that have routed experts, in order.

    Modules are found by their place in the model, so layers that predict several tokens (MTP) are
    left out, in a list of their own or after the last decoder layer.

    Raises:
        ValueError: there are none, or a layer has several sets of experts.
    """
    lists = {name: module for name, module in model.named_modules() if _is_list(module)}
    found: list[tuple[str, int, str]] = []
    modules = expert_modules(model) | _indexed_modules(model)
    for name in modules:
        parents = [one for one in lists if name.startswith(f"{one}.")]
        if parents:
            outermost = min(parents, key=len)
            found.append((outermost, int(name[len(outermost) + 1 :].split(".")[0]), name))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layers with routed experts that are called with the "
            "indices of each token's experts"
        )
    decoder, _ = Counter(parent for parent, _, _ in found).most_common(1)[0]
    count = decoder_layers(model)
    layers: list[ExpertLayer] = []
    for parent, index, name in sorted(found):
        if parent == decoder and index < count:
            if layers and layers[-1].index == index:
                raise ValueError(
                    f"layer {index} has several sets of experts, {layers[-1].name} and {name}; "
                    "routes are replayed in layers with one"
                )
            experts = modules[name]
            layers.append(
                ExpertLayer(
                    index=index,
                    name=name,
                    experts=experts,
                    block=_block(model, name),
                    count=next(experts.parameters()).shape[0],
                )
            )
    return layers


def _indexed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that take ``top_k_index``, also where ``transformers`` has no registry of them."""
    modules = dict(model.named_modules())
    kinds = {type(module) for module in modules.values()}
    indexed = {kind for kind in kinds if "top_k_index" in _argument_names(kind)}
    return {name: module for name, module in modules.items() if type(module) in indexed}


def _argument_names(kind: type[nn.Module]) -> Collection[str]:
    try:
        return inspect.signature(kind.forward).parameters
    except (TypeError, ValueError):  # not a Python function
        return ()


def decoder_layers(model: nn.Module) -> int:
    """The number of decoder layers, with experts or without."""
    config: Any = model.config
    count: int = config.get_text_config().num_hidden_layers
    return count


def shape(model: nn.Module) -> RouteShape:
    """The shape of a model's expert routes.

    Raises:
        ValueError: the model has no routed experts, its layers have different numbers of them, or
            its configuration doesn't say how many are chosen.
    """
    layers = expert_layers(model)
    config: Any = model.config
    text = config.get_text_config()
    counts = {layer.count for layer in layers}
    chosen = {_experts_chosen(text, layer.index) for layer in layers}
    if len(counts) > 1 or len(chosen) > 1:
        raise ValueError(
            f"layers have {sorted(counts)} experts and choose {sorted(chosen)} of them; expected "
            "the same numbers in all"
        )
    return RouteShape(
        layers=tuple(layer.index for layer in layers),
        decoder_layers=decoder_layers(model),
        experts=counts.pop(),
        k=chosen.pop(),
    )


def _experts_chosen(config: Any, layer: int) -> int:
    values = (getattr(config, name, None) for name in _CHOSEN)
    chosen: Any = next((value for value in values if value), None)
    if chosen is None:
        raise ValueError(
            f"the configuration of {config.model_type} does not say how many experts are chosen "
            f"({', '.join(_CHOSEN)}); make a RouteShape by hand"
        )
    return int(chosen[layer] if isinstance(chosen, list | tuple) else chosen)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def _block(model: nn.Module, name: str) -> nn.Module:
    """The module around the experts; peft wraps these in modules with a ``base_layer``."""
    parent = model.get_submodule(name.rpartition(".")[0])
    while hasattr(parent, "base_layer"):
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name.rpartition(".")[0])
    return parent


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
