"""Inputs and results of the modules that each call a kernel of one library.

Each of these modules has the functions

    forward(x) -> outputs[t, heads, dv], logsumexp[heads, t]
    backward(x, gradient, outputs, logsumexp) -> gradients of x.q, x.k and x.v
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primerl.attention.documents import Layout


class SpanInputs(NamedTuple):
    """Queries, keys and values of spans, ``[rows, heads, size]``.

    Queries lie end to end. Kernels for GPUs get the keys of the spans end to end, too; ``calls``
    lays them so.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    scaling: float
    window: int
    """The number of keys that a query sees at most; 0 for all."""
    cap: float
    """The bound of scores; 0 for none."""

    @property
    def sizes(self) -> tuple[int, int]:
        """The maximum numbers of queries and of keys of a span."""
        return self.layout.max_queries, self.layout.max_keys


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate outputs and logsumexp."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads = q.shape[:2]
    return q.new_empty(rows, heads, v.shape[-1]), q.new_empty(heads, rows, dtype=wide)


def equally_wide(*tensors: Tensor) -> list[Tensor]:
    """Pad queries, keys and values with zeros to the same width, which kernels require."""
    width = max(x.shape[-1] for x in tensors)
    return [widened(x, width) for x in tensors]


def widened(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension with zeros to a width."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def narrowed(found: Sequence[Tensor], x: SpanInputs) -> tuple[Tensor, ...]:
    """Cut off the gradients of padding."""
    inputs = zip(found, (x.q, x.k, x.v), strict=True)
    return tuple(gradient[..., : one.shape[-1]] for gradient, one in inputs)
