"""Layouts of spans, or of their chunks, from the plan of a layout.

The operator gets only the plan. Tensors that some layouts have and others have not would give
compiled models a graph for each kind.
"""

import torch
from torch import Tensor

from primerl.attention.documents import Layout, Span, lay_out, once_per_tensor
from primerl.attention.span_kernels import groups_of, spans_of


def layout_of(plan: Tensor, chunk: int, device: torch.device) -> Layout:
    """Make the layout that a plan encodes, of whole spans or, if ``chunk`` is not 0, of chunks."""
    divided = 0 < chunk < max(keys for _, _, keys in groups_of(plan))
    found: Layout = _layout_of_chunks(plan, chunk, device) if divided else _whole(plan, device)
    return found


@once_per_tensor  # all layers have the same plan
def _whole(plan: Tensor, device: torch.device) -> Layout:
    return lay_out(spans_of(plan), device)


@once_per_tensor  # apart from the whole layout, because models have layers of both kinds
def _layout_of_chunks(plan: Tensor, chunk: int, device: torch.device) -> Layout:
    """Make the layout of the chunks of spans; documents are divided from their first token on."""
    parts = []
    for one in spans_of(plan):
        offset, begin = one.seen - one.end, one.begin  # from rows to positions
        while begin < one.end:
            first = (begin + offset) // chunk * chunk
            end = min(one.end, first + chunk - offset)
            parts.append(Span(begin, end, _slice(one.keys, first, end + offset)))
            begin = end
    return lay_out(tuple(parts), device)


def _slice(
    ranges: tuple[tuple[int, int], ...], first: int, last: int
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the rows ``first .. last - 1`` of ``ranges``."""
    kept = []
    for begin, end in ranges:
        low, high = max(first, 0), min(last, end - begin)
        if low < high:
            kept.append((begin + low, begin + high))
        first, last = first - (end - begin), last - (end - begin)
    return tuple(kept)
