"""Repeated forward passes, for code that observes a model from within its layers.

A layer runs again in the backward pass where activations are recomputed, and a whole model where
the result of a first attempt could not be used. Observers must count each pass once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import attrs
import torch


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
