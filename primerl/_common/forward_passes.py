"""How a model runs forward: passes that are repeated, for code that observes it from within.

A layer runs again in the backward pass where activations are recomputed, and a whole model where
the result of a first attempt could not be used. Observers must count each pass once. A planned
run passes tensors without values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# transformers' names of activation checkpointing: since 5.23, and before.
_RECOMPUTATION = ("activation_checkpointing", "gradient_checkpointing")


@attrs.define(eq=False)
class Attempt:
    """One forward pass, whose result may turn out to be useless."""

    discarded: bool = False
    """Set by the caller that runs the model again."""


_ATTEMPT: ContextVar[Attempt | None] = ContextVar("_ATTEMPT", default=None)


@contextmanager
def attempt() -> Iterator[Attempt]:
    """Mark the forward pass in the body, for ``current_attempt``."""
    this = Attempt()
    before = _ATTEMPT.set(this)
    try:
        yield this
    finally:
        _ATTEMPT.reset(before)


def current_attempt() -> Attempt | None:
    """The running forward pass; None where it will not be discarded."""
    return _ATTEMPT.get()


def recomputing() -> bool:
    """Whether a layer's forward code is recomputed for the backward pass.

    Asked of autograd, as ``torch.utils.checkpoint`` does, so it holds for any implementation of
    recomputation. It is also true in the backward of a custom function.
    """
    return torch._C._current_graph_task_id() != -1


def recomputes(model: nn.Module) -> bool:
    """Whether layers of a model recompute their activations in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def recomputation_method(model: nn.Module, *, enable: bool = True) -> Callable[..., None] | None:
    """The model's method that starts or stops it; its first argument is ``checkpoint``'s options.

    None if the model is not one of transformers.
    """
    for name in _RECOMPUTATION:
        method: Any = getattr(model, f"{name}_{'enable' if enable else 'disable'}", None)
        if method is not None:
            found: Callable[..., None] = method
            return found
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or the module's own ``compile`` has compiled it."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


@attrs.define(eq=False)
class PassTotal:
    """A tensor added up over forward passes: each that is used once, none that is discarded."""

    _total: Tensor | None = attrs.field(default=None, init=False)
    _attempted: tuple[Attempt, Tensor] | None = attrs.field(default=None, init=False)
    """The sum of the last forward pass, which may still be discarded."""

    def add(self, value: Tensor) -> None:
        """Add to the forward pass that runs now; nothing where one is recomputed."""
        if recomputing():
            return
        now, before = current_attempt(), self._attempted
        if now is not None and before is not None and before[0] is now:
            self._attempted = now, before[1] + value
            return
        self._commit()
        if now is None:
            self._add(value)
        else:
            self._attempted = now, value

    def take(self) -> Tensor | None:
        """The total so far, which restarts at 0; None without a forward pass."""
        self._commit()
        taken, self._total = self._total, None
        return taken

    def _commit(self) -> None:
        last, self._attempted = self._attempted, None
        if last is not None and not last[0].discarded:
            self._add(last[1])

    def _add(self, value: Tensor) -> None:
        self._total = value if self._total is None else self._total + value


# ---- tensors without values, by which a run is planned before it starts ----


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: not one of the meta device, nor an imagined (fake) one."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def group_ends(ends: Int[Tensor, " e"], rows: int) -> list[int]:
    """Where groups of ``rows`` rows end; without values, all groups are equally large."""
    if has_values(ends):
        found: list[int] = ends.tolist()
        return found
    return [rows * (group + 1) // len(ends) for group in range(len(ends))]
