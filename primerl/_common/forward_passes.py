"""Helpers for code that observes forward passes by hooks: repeated passes, fake tensors.

With activation checkpointing, a layer runs again in the backward pass. A whole model runs again if
the result of a first attempt could not be used. Observers must count each pass once. The planner
runs a model on tensors without values.
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

# The names of activation checkpointing in transformers: since 5.23, and before.
_RECOMPUTATION = ("activation_checkpointing", "gradient_checkpointing")


@attrs.define(eq=False)
class Attempt:
    """One forward pass, whose result may have to be discarded."""

    discarded: bool = False
    """Set by the caller if it runs the model again."""


_ATTEMPT: ContextVar[Attempt | None] = ContextVar("_ATTEMPT", default=None)


@contextmanager
def attempt() -> Iterator[Attempt]:
    """Mark the forward pass in the body, so that ``current_attempt`` returns it."""
    this = Attempt()
    before = _ATTEMPT.set(this)
    try:
        yield this
    finally:
        _ATTEMPT.reset(before)


def current_attempt() -> Attempt | None:
    """Return the attempt that is running; None outside ``attempt``, where none is discarded."""
    return _ATTEMPT.get()


def recomputing() -> bool:
    """Check whether the running forward code is a recomputation for the backward pass.

    Asks autograd, as ``torch.utils.checkpoint`` does, so it works with any implementation of
    activation checkpointing. It is also true in the backward of a custom function.
    """
    return torch._C._current_graph_task_id() != -1


def recomputes(model: nn.Module) -> bool:
    """Check whether layers of a model recompute their activations in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def recomputation_method(model: nn.Module, *, enable: bool = True) -> Callable[..., None] | None:
    """Return the model's method that enables or disables activation checkpointing.

    The method's first argument are the options of ``torch.utils.checkpoint``. None if the model is
    not a ``transformers`` model.
    """
    for name in _RECOMPUTATION:
        method: Any = getattr(model, f"{name}_{'enable' if enable else 'disable'}", None)
        if method is not None:
            found: Callable[..., None] = method
            return found
    return None


def is_compiled(module: nn.Module) -> bool:
    """Check whether ``torch.compile`` or ``nn.Module.compile`` has compiled a module."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


@attrs.define(eq=False)
class PassTotal:
    """A sum of tensors over forward passes, without recomputed and discarded passes."""

    _total: Tensor | None = attrs.field(default=None, init=False)
    _attempted: tuple[Attempt, Tensor] | None = attrs.field(default=None, init=False)
    """The last forward pass, which may still be discarded, and its sum."""

    def add(self, value: Tensor) -> None:
        """Add a value to the sum of the running forward pass; ignored in a recomputation."""
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
        """Return the total and reset it; None if there was no forward pass."""
        self._commit()
        taken, self._total = self._total, None
        return taken

    def _commit(self) -> None:
        last, self._attempted = self._attempted, None
        if last is not None and not last[0].discarded:
            self._add(last[1])

    def _add(self, value: Tensor) -> None:
        self._total = value if self._total is None else self._total + value


# ---- tensors without values, which the planner uses ----


def has_values(tensor: Tensor) -> bool:
    """Check that a tensor has values: it is neither on the meta device nor a fake tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


_PLACING: ContextVar[Callable[[Tensor], None] | None] = ContextVar("_PLACING", default=None)


@contextmanager
def placing_on_host(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``observer`` with each activation that the body places in host memory.

    For the planner, whose tensors are all on the device "cpu".
    """
    before = _PLACING.set(observer)
    try:
        yield
    finally:
        _PLACING.reset(before)


def place_on_host(tensor: Tensor) -> None:
    """Tell an observer that a tensor is in host memory."""
    observer = _PLACING.get()
    if observer is not None:
        observer(tensor)


def group_ends(ends: Int[Tensor, " e"], rows: int) -> list[int]:
    """Return where groups of rows end.

    If ``ends`` has no values, the ``rows`` rows are divided equally among the groups.
    """
    if has_values(ends):
        found: list[int] = ends.tolist()
        return found
    return [rows * (group + 1) // len(ends) for group in range(len(ends))]
