"""Calls of cuDNN's dense kernel, each for documents of one padded length."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from primerl._common.host_memory import to_device
from primerl.attention.documents import Span, concatenated, once_per_tensor
from primerl.attention.end_to_end.interface import SpanInputs, empty_outputs
from primerl.attention.kernel_table import dense_calls, padded_length
from primerl.attention.span_kernels import spans_of

OLDEST = 91501  # older ones are wrong for some lengths, by torch's own check
_KERNEL = torch.ops.aten._scaled_dot_product_cudnn_attention
_KERNEL_GRADIENT = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

# The number of dimensions of cuDNN's statistics, which differs between versions of torch. The
# forward pass notes it for the backward pass.
_statistics_dimensions = [4]


def refusal() -> str | None:
    """Return why cuDNN can't be used; None if it can."""
    if torch.are_deterministic_algorithms_enabled():
        return "cuDNN's gradient is not deterministic"
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return "torch.backends.cuda.enable_cudnn_sdp(False) was called"
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is None or version < OLDEST:
        return f"cuDNN is {version}, expected at least {OLDEST}"
    return None


class DenseRun(NamedTuple):
    """Documents of one padded length, for a single dense call."""

    size: int
    """Number of documents."""
    length: int
    """Their length, with padding at the end, which causal attention never sees."""
    rows: Tensor | slice
    """Rows of the documents' tokens in the pack: a slice if they lie side by side, not padded."""
    places: Tensor | None
    """The places of these tokens in the stacked documents; None with a slice."""

    def stack(self, x: Tensor) -> Tensor:
        """Return ``[documents, heads, length, d]`` of ``[t, heads, d]``, with zeros as padding."""
        if isinstance(self.rows, slice):
            x = x[self.rows]
        else:
            assert self.places is not None
            stacked = x.new_zeros(self.size * self.length, *x.shape[1:])
            x = stacked.index_copy_(0, self.places, x.index_select(0, self.rows))
        return x.view(self.size, self.length, *x.shape[1:]).transpose(1, 2)

    def unstack(self, found: Tensor) -> Tensor:
        """Return ``[t, heads, ...]`` of ``[documents, heads, length, ...]``, without padding."""
        flat = found.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def store(self, found: list[Tensor], rows: list[Tensor]) -> None:
        """Write each ``[documents, heads, length, ...]`` into the rows of a pack."""
        for one, into in zip(found, rows, strict=True):
            mine = self.unstack(one).to(into.dtype)
            if isinstance(self.rows, slice):
                into[self.rows] = mine
            else:
                into.index_copy_(0, self.rows, mine)


@once_per_tensor  # all layers have the same plan
def dense_runs(plan: Tensor, device: torch.device) -> list[DenseRun]:
    """Divide the documents of a plan among dense calls, by padded length."""
    by_length: dict[int, list[Span]] = {}
    for one in spans_of(plan):
        by_length.setdefault(padded_length(one.end - one.begin), []).append(one)
    found = []
    for length, alike in by_length.items():
        begins = np.array([one.begin for one in alike])
        lengths = np.array([one.end for one in alike]) - begins
        first = 0
        for size in dense_calls(len(alike), length):
            some = slice(first, first + size)
            found.append(_dense_run(begins[some], lengths[some], length, device))
            first += size
    return found


def _dense_run(
    begins: np.ndarray, lengths: np.ndarray, length: int, device: torch.device
) -> DenseRun:
    size, first = len(begins), int(begins[0])
    starts = np.arange(size) * length  # of the stacked documents
    if (lengths == length).all() and (begins == first + starts).all():
        return DenseRun(size, length, slice(first, first + size * length), None)
    rows, places = (concatenated(one, lengths) for one in (begins, starts))
    return DenseRun(
        size,
        length,
        to_device(torch.from_numpy(rows), device),
        to_device(torch.from_numpy(places), device),
    )


def forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs and logsumexp."""
    runs = dense_runs(x.layout.plan, x.q.device)
    if len(runs) == 1 and runs[0].places is None:  # the whole pack
        attended, sums = (runs[0].unstack(one) for one in _dense_forward(runs[0], x))
        return attended, sums.T
    out, logsumexp = empty_outputs(x.q, x.v)
    for run in runs:
        run.store(_dense_forward(run, x), [out, logsumexp.T])
    return out, logsumexp


def backward(x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values."""
    runs = dense_runs(x.layout.plan, x.q.device)
    arriving = [gradient, out, logsumexp.T.unsqueeze(-1)]
    if len(runs) == 1 and runs[0].places is None:
        return tuple(runs[0].unstack(one) for one in _dense_backward(runs[0], x, arriving))
    gradients = [torch.empty_like(one) for one in (x.q, x.k, x.v)]
    for run in runs:
        run.store(_dense_backward(run, x, arriving), gradients)
    return tuple(gradients)


def _dense_forward(run: DenseRun, x: SpanInputs) -> list[Tensor]:
    """Return outputs and statistics, ``[documents, heads, length, ...]``."""
    inputs = [run.stack(one) for one in (x.q, x.k, x.v)]
    found = _KERNEL(*inputs, None, True, 0.0, True, False, scale=x.scaling)
    _statistics_dimensions[0] = found[1].dim()
    return [found[0], found[1].view(inputs[0].shape[:3])]


def _dense_backward(run: DenseRun, x: SpanInputs, arriving: list[Tensor]) -> list[Tensor]:
    """Return the gradients of queries, keys and values, ``[documents, heads, length, d]``."""
    inputs = [run.stack(one) for one in (x.q, x.k, x.v)]
    gradient, out, sums = (run.stack(one) for one in arriving)
    statistics = sums.contiguous()
    if _statistics_dimensions[0] == 3:
        statistics = statistics.squeeze(-1)
    unused = torch.zeros((), dtype=torch.int64, device=x.q.device)  # there is no dropout
    found = _KERNEL_GRADIENT(
        *(gradient, *inputs, out, statistics, unused, unused, None, None, None),
        *(run.length, run.length, 0.0, True),
        scale=x.scaling,
    )
    return list(found)
