"""Memory of a micro-batch's forward and backward passes, traced on tensors without values."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from primerl import loss, parallel
from primerl._common.expert_modules import expert_modules
from primerl._common.forward_passes import recomputing
from primerl.parallel.expert_parallel.experts import IMPLEMENTATION
from primerl.planning.live_bytes import LiveBytes


@attrs.frozen(kw_only=True)
class Activations:
    """Bytes that a rank needs for a micro-batch, beside parameters and their gradients."""

    kept: int
    """Bytes that the forward pass keeps for the backward pass."""
    working: int
    """Bytes beside ``kept`` when most are alive: in a layer, or in the head, in either pass."""
    host: int
    """Bytes of activations in host memory."""


_Bytes = dict[tuple[Any, ...], float]
"""Bytes of a trace by place; ``_TracedPasses.found`` describes the keys."""


def measure_activations(build: Callable[[], Any], *, tokens: int, cp: int) -> Activations:
    """Trace a micro-batch of one document, forward and backward, on tensors without values.

    Of several layers with equal parameters, one runs and counts for all.

    Args:
        build: builds the model, set up as for training, but not sharded by FSDP, on the ``meta``
            device, in the dtype that it computes in.
        tokens: the number of tokens, which ``cp`` ranks share.
        cp: the number of these ranks. This rank is the last of them, whose rows see most keys.
    """
    order, found = _trace(build(), tokens, cp)
    return _of_all(found, order)


def _trace(model: Any, tokens: int, cp: int) -> tuple[list[int], _Bytes]:
    """Trace a model with one layer of each kind, and the last one.

    Returns for each layer of the whole model which traced one it is like, and the bytes found.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
    config = model.config.get_text_config()
    if expert_modules(model) and getattr(config, "_experts_implementation", "") != IMPLEMENTATION:
        # Used in place of transformers' kernel, which fake tensors do not support in float32.
        parallel.divide_experts(model)
    decoder = model.get_decoder()
    all_kinds = [_kind(layer) for layer in decoder.layers]
    kinds: dict[Any, nn.Module] = {}
    for kind, layer in zip(all_kinds, decoder.layers, strict=True):
        kinds.setdefault(kind, layer)
    order = [list(kinds).index(kind) for kind in all_kinds]
    layers = [*kinds.values()]
    if layers[-1] is not decoder.layers[-1]:
        # After it comes the head and not a layer, so other tensors are freed when it ends.
        layers.append(decoder.layers[-1])
        order[-1] = len(kinds)
    decoder.set_submodule("layers", nn.ModuleList(layers))
    passes = _TracedPasses(parameters=[*model.parameters()])
    _run(model, tokens, cp, passes)
    return order, passes.found


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, one.shape) for name, one in layer.named_parameters())
    return (getattr(layer, "gradient_checkpointing", None), *shapes)


HEAD = -1
"""Number of the part after the last layer: the head and the loss."""
START = -2
"""Number of the part before the first layer."""


def _of_all(found: _Bytes, order: list[int]) -> Activations:
    """Add up the bytes of a model whose layers are of the given kinds, in this order."""
    alive, peaks = 0.0, [0.0]
    for part in (START, *order, HEAD):
        peaks.append(alive + found["forward", part])
        alive += found["kept", part]
        working = (
            size for (what, *key), size in found.items() if what == "backward" and key[0] == part
        )
        peaks += [alive + size for size in working]
    host = sum(found["host", part] for part in (START, *order, HEAD))
    return Activations(kept=round(alive), working=round(max(peaks) - alive), host=round(host))


@attrs.define(eq=False)
class _TracedPasses:
    """The forward and the backward pass, divided at the boundaries of layers."""

    parameters: list[Tensor]
    live: LiveBytes = attrs.field(factory=LiveBytes)
    found: _Bytes = attrs.field(factory=dict)
    """For each part of the model: bytes ``kept`` by the forward pass and those that it moved to the
    ``host``, and the peak of the ``forward`` and the ``backward`` pass above what was alive before.
    The backward pass of a layer is divided at its modules."""
    part: int = START
    module: str = ""
    alive: int = 0
    """Bytes at the beginning of this part."""
    moved: int = 0
    backward: bool = False

    def forward_done(self, *, following: int) -> None:
        """Note that the forward pass of a part is done."""
        now, host = self.live.now, self.live.host
        self.found["forward", self.part] = self.live.restart() - self.alive
        self.found["kept", self.part] = now - self.alive
        self.found["host", self.part] = host - self.moved
        self.part, self.alive, self.moved = following, now, host

    def reach(self, part: int, module: str = "", *_: Any) -> None:
        """Note that the backward pass reaches a part, or one of its modules."""
        peak = self.live.restart() - self.alive
        if self.backward:
            self.found["backward", self.part, self.module] = peak
        if part != self.part or not self.backward:
            for one in self.parameters:  # FSDP reduces and frees the gradients of a layer here
                one.grad = None
            self.alive = self.live.now
        self.part, self.module, self.backward = part, module, True


def _run(model: Any, tokens: int, cp: int, passes: _TracedPasses) -> None:
    """Run both passes of a micro-batch of one document, of which this rank has the last rows."""
    positions = torch.arange(tokens)
    position_ids = positions[-(tokens // cp) :].clone()
    token_ids = torch.zeros_like(position_ids)
    layers = model.get_decoder().layers
    live = passes.live
    with ExitStack() as hooks:
        _watch(hooks, layers, passes)
        hooks.enter_context(_Positions(position_ids, positions))
        hooks.enter_context(live)
        live.ignore(*model.parameters(), *model.buffers())
        passes.alive = live.now
        logprobs = loss.model_logprobs(model, token_ids, position_ids, token_ids)
        passes.forward_done(following=HEAD)
        passes.reach(HEAD)
        torch.autograd.backward(logprobs.sum())
        del logprobs
        passes.reach(START)


def _watch(hooks: ExitStack, layers: Any, passes: _TracedPasses) -> None:
    """Register hooks that note when a pass reaches a layer, and when its modules.

    In the backward pass, that is when the gradient of its output is known.
    """
    for number, layer in enumerate(layers):

        def before(*_: Any, number: int = number) -> None:
            if not recomputing():
                passes.forward_done(following=number)

        def after(_module: Any, _args: Any, output: Any, *, number: int = number) -> None:
            if not recomputing():
                _first(output).register_hook(partial(passes.reach, number, ""))  # type: ignore[no-untyped-call]
                if number == len(layers) - 1:
                    passes.forward_done(following=HEAD)

        hooks.callback(layer.register_forward_pre_hook(before).remove)
        hooks.callback(layer.register_forward_hook(after).remove)
        for name, module in layer.named_children():

            def inner(
                _module: Any, _args: Any, output: Any, *, key: tuple[int, str] = (number, name)
            ) -> None:
                if _first(output).requires_grad:
                    _first(output).register_hook(partial(passes.reach, *key))  # type: ignore[no-untyped-call]

            hooks.callback(module.register_forward_hook(inner).remove)


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


class _Positions(TorchDispatchMode):
    """Lets the ranks that share a document gather its positions.

    Imagined ranks return this rank's own rows in place of others'.
    """

    def __init__(self, own: Tensor, every: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own, self.every = own, every

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d._allgather_base_.default:
            gathered, rows = args[:2]
            if rows.dtype == self.own.dtype and rows.shape == self.own.shape:
                gathered.copy_(self.every)
        return result
