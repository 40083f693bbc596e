"""Forward passes that run twice, for code that observes a model from within its layers.

A layer runs again in the backward pass where activations are recomputed, and a whole model where
the result of a first attempt could not be used. What is counted in a layer is counted once.
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
    """Set by whoever runs the model again in its place."""


_ATTEMPT: ContextVar[Attempt | None] = ContextVar("_ATTEMPT", default=None)


@contextmanager
def attempt() -> Iterator[Attempt]:
    """The forward pass that runs within it, for ``current_attempt``."""
    this = Attempt()
    before = _ATTEMPT.set(this)
    try:
        yield this
    finally:
        _ATTEMPT.reset(before)


def current_attempt() -> Attempt | None:
    """The forward pass that runs now; None where nobody will discard it."""
    return _ATTEMPT.get()


def recomputing() -> bool:
    """Whether a layer's forward code runs a second time, for the backward pass.

    That is asked of autograd, as ``torch.utils.checkpoint`` does, so it holds whoever arranged it:
    a backward pass computes forward only what was not kept. It is also true in the backward of a
    custom function, which is no forward code.
    """
    return torch._C._current_graph_task_id() != -1
