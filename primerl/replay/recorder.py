"""Recording of the experts that an unmodified model chooses, and of its expert layers."""

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

# Names of the number of experts per token in models' configurations.
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
    """Index among all decoder layers."""
    name: str
    """Name of the module that holds the experts."""
    experts: nn.Module
    """The module that is called with the chosen experts and their weights."""
    block: nn.Module
    """The module around ``experts``, in which the router chooses."""
    count: int
    """Number of experts."""


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the decoder layers of a model that have routed experts, in order.

    Modules are found by their place in the model, so layers that predict several tokens (MTP) are
    left out: they are in a separate list, or after the last decoder layer.

    Raises:
        ValueError: no layer has routed experts, or a layer has several sets of experts.
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
            f"{type(model).__name__} has no layers with routed experts whose module takes the "
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
                    "routes can be replayed only in layers with one set"
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
    """Return the modules whose ``forward`` takes ``top_k_index``, by name.

    These are experts modules, also of families that are not in ``transformers``' registry.
    """
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
    """Return the number of decoder layers, with or without experts."""
    config: Any = model.config
    count: int = config.get_text_config().num_hidden_layers
    return count


def shape(model: nn.Module) -> RouteShape:
    """Return the shape of a model's expert routes.

    Raises:
        ValueError: the model has no routed experts, the number of experts differs between layers,
            or the configuration doesn't say how many experts a token uses.
    """
    layers = expert_layers(model)
    config: Any = model.config
    text = config.get_text_config()
    counts = {layer.count for layer in layers}
    chosen = {_experts_chosen(text, layer.index) for layer in layers}
    if len(counts) > 1 or len(chosen) > 1:
        raise ValueError(
            f"layers have {sorted(counts)} experts and choose {sorted(chosen)} per token; expected "
            "the same numbers in all layers"
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
            f"the configuration of {config.model_type} has no number of experts per token "
            f"({', '.join(_CHOSEN)}); construct a RouteShape yourself"
        )
    return int(chosen[layer] if isinstance(chosen, list | tuple) else chosen)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def _block(model: nn.Module, name: str) -> nn.Module:
    """Return the module that contains the experts, skipping peft's wrappers around them."""
    parent = model.get_submodule(name.rpartition(".")[0])
    while hasattr(parent, "base_layer"):
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name.rpartition(".")[0])
    return parent


class CapturedRoutes:
    """The experts that a model chose in its latest forward pass."""

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._chosen: dict[int, Tensor] = {}

    @property
    def rows(self) -> Int16[Tensor, "t layers k"]:
        """The experts of each token in each layer with experts, ``[t, layers, k]``.

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
        """Store the experts that a layer chose."""
        self._chosen[layer.index] = chosen.to(torch.int16)


@contextmanager
def capture(model: nn.Module) -> Iterator[CapturedRoutes]:
    """Record the experts that each token is routed to.

        with replay.capture(model) as routes:
            model(token_ids[None])
        routes.rows  # [t, layers, k]

    Hooks on the experts modules record the indices that these are called with, so this works with
    any router of any family. The hooks are removed at the end. After several forward passes,
    ``rows`` are those of the latest pass; recomputation in a backward pass does not count.

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
    """Find the expert indices among a module's arguments: the only tensor of integers."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    integers = [value for value in tensors if not value.is_floating_point()]
    if len(integers) != 1:
        raise RuntimeError(
            f"an experts module was called with {len(integers)} integer tensors; expected one: the "
            "experts of each token"
        )
    return integers[0]


def _recording_hook(layer: ExpertLayer, routes: CapturedRoutes) -> Any:
    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recomputing():
            routes.record(layer, chosen_experts(args, kwargs))

    return record
