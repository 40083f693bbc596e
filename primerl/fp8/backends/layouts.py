"""Memory layouts of operands and scales, as libraries require them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from primerl.fp8.backends.interface import Groups


def padded(x: Tensor, *, rows: int = 1, columns: int = 1) -> Tensor:
    """Pad a matrix, which may be FP8, with zeros to multiples of ``rows`` and ``columns``."""
    more = (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows)
    if not any(more):
        return x.contiguous()
    if x.dtype.itemsize == 1:  # torch can't pad FP8, so pad its bytes: a zero byte is zero
        return F.pad(x.contiguous().view(torch.uint8), more).view(x.dtype)
    return F.pad(x, more)


def outer_major(scales: Float[Tensor, "m k"], *, rows: int = 1) -> Float[Tensor, "padded k"]:
    """Lay out scales of 1 x 128 blocks column by column: strides ``(1, m)``.

    ``m`` is first padded to a multiple of ``rows``. Scales from ``quantization.operand`` lie so
    already, and are only copied to pad them. cuBLAS requires this, with m in fours; DeepGEMM takes
    it so without a copy.
    """
    return padded(scales.t(), columns=rows).t()


def k_major(scales: Float[Tensor, "n k"]) -> Float[Tensor, "k4 n"]:
    """Lay out scales of 128 x 128 blocks as cuBLAS requires: ``[k, n]`` with strides ``(1, k4)``.

    k4 is k rounded up to a multiple of 4, so that columns start at multiples of 16 bytes.
    """
    return F.pad(scales, (0, -scales.shape[1] % 4), value=1.0).contiguous().t()


def grouped_rows(groups: Groups, *, multiple: int) -> tuple[Tensor, Tensor]:
    """Compute row indices for padding each group to a multiple of ``multiple`` rows.

    Returns ``(places, group_of_row)``. ``places[i]`` is the new index of row i. ``group_of_row`` is
    the group of each new row, or -1 for padding, as DeepGEMM's contiguous layout requires.
    """
    ends = groups.ends
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    room = (counts + multiple - 1) // multiple * multiple
    firsts = room.cumsum(0) - room
    # Sizes come from the host's copy, so that the host doesn't wait for the device.
    rows = groups.bounds[-1][1]
    padded_rows = sum(-(-(end - begin) // multiple) * multiple for begin, end in groups.bounds)
    group = torch.repeat_interleave(
        torch.arange(len(counts), device=ends.device), counts, output_size=rows
    )
    before = counts.cumsum(0) - counts
    places = firsts[group] + torch.arange(rows, device=ends.device) - before[group]
    of_row = torch.full((padded_rows,), -1, dtype=torch.int32, device=ends.device)
    of_row[places] = group.int()
    return places, of_row
