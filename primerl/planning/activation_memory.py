"""Memory of a micro-batch's activations, measured by running the model on fake tensors."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from primerl import loss, parallel
from primerl._common.expert_modules import expert_modules
from primerl._common.forward_passes import recomputation_method, recomputes
from primerl._common.ranks import local_part
from primerl.parallel.expert_parallel.experts import IMPLEMENTATION


@attrs.frozen(kw_only=True)
class Activations:
    """Bytes of activations that a rank keeps for the backward pass of a micro-batch."""

    kept: int
    """Bytes that the forward pass keeps."""
    recomputed: int
    """Bytes that the largest layer keeps while it is recomputed; 0 without recomputation."""


@attrs.define(eq=False)
class _Counter:
    """A counter of the bytes that autograd saves; it counts each storage once."""

    ignored: set[int]
    """Addresses of the storages of parameters and buffers."""
    seen: dict[int, Tensor] = attrs.field(factory=dict)
    """Saved tensors by address of storage; held, so that no address is reused."""
    taken: int = 0

    def save(self, tensor: Tensor) -> Tensor:
        place = _storage(tensor)
        if place not in self.ignored:
            self.seen.setdefault(place, tensor)
        return tensor

    def take(self) -> int:
        """Return the bytes saved since the last call."""
        total = sum(local_part(one).untyped_storage().nbytes() for one in self.seen.values())
        since, self.taken = total - self.taken, total
        return since


def measure_activations(model: Any, *, tokens: int) -> Activations:
    """Run the forward pass of a micro-batch on fake tensors, and count what autograd saves.

    Only one of several layers with equal parameters is run, and counted for all. Tensors that are
    not saved, such as the workspace of a kernel, are not counted.

    Args:
        model: set up as for training, but not sharded by FSDP, on the ``meta`` device, in the dtype
            that it computes in. It can't be used afterwards, because layers are removed.
        tokens: the number of this rank's rows.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
    config = model.config.get_text_config()
    if expert_modules(model) and getattr(config, "_experts_implementation", "") != IMPLEMENTATION:
        # Used in place of transformers' kernel, which fake tensors do not support in float32.
        parallel.divide_experts(model)
    decoder = model.get_decoder()
    kinds: dict[Any, list[nn.Module]] = {}
    for layer in decoder.layers:
        kinds.setdefault(_kind(layer), []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    decoder.set_submodule("layers", nn.ModuleList(layers[0] for layers in kinds.values()))

    by_layer, around = _saved(model, tokens)
    kept = around + sum(count * size for count, size in zip(counts, by_layer, strict=True))
    stop_recomputing = recomputation_method(model, enable=False)
    if stop_recomputing is None or not recomputes(model):
        return Activations(kept=kept, recomputed=0)
    stop_recomputing()
    whole, _ = _saved(model, tokens)
    return Activations(kept=kept, recomputed=max(whole))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, one.shape) for name, one in layer.named_parameters())
    return (getattr(layer, "gradient_checkpointing", None), *shapes)


def _saved(model: Any, tokens: int) -> tuple[list[int], int]:
    """Return the bytes saved by each layer, and by the modules around the layers."""
    counter = _Counter({_storage(one) for one in (*model.parameters(), *model.buffers())})
    around: list[int] = []
    by_layer: list[int] = []
    token_ids = torch.zeros(tokens, dtype=torch.int64)
    position_ids = torch.arange(tokens) % _document_length(model, tokens)
    with ExitStack() as hooks:
        _after(hooks, [model.get_input_embeddings()], lambda: around.append(counter.take()))
        _after(hooks, model.get_decoder().layers, lambda: by_layer.append(counter.take()))
        hooks.enter_context(saved_tensors_hooks(counter.save, lambda tensor: tensor))
        logprobs = loss.model_logprobs(model, token_ids, position_ids, token_ids)
    around.append(counter.take())
    del logprobs
    return by_layer, sum(around)


def _document_length(model: Any, tokens: int) -> int:
    """Return the length of documents: all tokens, or at most ``index_topk`` in sparse attention.

    Documents of that length are attended in full. They keep the same tensors as long ones, but the
    selection of keys, which has no gradient, does not run.
    """
    longest: int = getattr(model.config.get_text_config(), "index_topk", None) or tokens
    return min(longest, tokens)


def _after(hooks: ExitStack, modules: Iterable[nn.Module], call: Callable[[], Any]) -> None:
    """Register ``call`` after the forward pass of each module."""
    for module in modules:
        hooks.callback(module.register_forward_hook(lambda *_: call()).remove)


def _storage(tensor: Tensor) -> int:
    storage: int = local_part(tensor).untyped_storage()._cdata
    return storage
