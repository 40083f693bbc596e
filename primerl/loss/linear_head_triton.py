"""Triton kernels that read a tile of logits once; ``linear_head_tiles`` says what they compute.

Both are bound by memory: a tile of float32 logits is read once in the forward pass, and in the
backward pass read once and replaced by its gradient in the dtype of the products that follow. A
program has 8 warps and 4,096 columns at a time, so that a thread has four loads of 16 bytes in
flight and 16 numbers in registers, and a multiprocessor runs several programs.

- Statistics: a program goes through a row of the tile, whose running sums stay in registers.
- Gradient: a program computes 4,096 columns of a row.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from primerl.loss import linear_head_tiles

COLUMNS, WARPS = 4096, 8
FLOOR = tl.constexpr(linear_head_tiles.FLOOR)


# ``no_type_check``: the wrappers of runtime type checks lack the names of this module.
@triton.jit
@no_type_check
def _at_least_floor(x: tl.tensor) -> tl.tensor:
    return tl.where(x < FLOOR, FLOOR, x)  # unlike tl.maximum, it keeps NaN


@triton.jit
@no_type_check
def _add_statistics(
    z: tl.tensor,
    divisor: tl.tensor,
    labels: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    chosen: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    count: tl.tensor,
    SCALED: tl.constexpr,
    LABELS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits = z + row * columns
    top, of_e, of_x = tl.load(highest + row), tl.load(total + row), tl.load(weighted + row)
    if SCALED:
        by = tl.load(divisor + row)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < columns, other=-float("inf"))
        if SCALED:
            x = x / by
        new_top = tl.maximum(top, tl.max(x, 0))
        fall = _at_least_floor(top - new_top)
        x = _at_least_floor(x - new_top)
        e = tl.exp(x)
        scale = tl.exp(fall)
        of_x = scale * (of_x + fall * of_e) + tl.sum(x * e, 0)
        of_e = scale * of_e + tl.sum(e, 0)
        top = new_top
    tl.store(highest + row, top)
    tl.store(total + row, of_e)
    tl.store(weighted + row, of_x)
    label = tl.arange(0, LABELS)
    place = tl.load(labels + row * count + label, mask=label < count, other=-1).to(tl.int64) - start
    inside = (place >= 0) & (place < columns)
    found = tl.load(logits + place, mask=inside, other=0.0)
    if SCALED:
        found = found / by
    tl.store(chosen + row * count + label, found, mask=inside)


@triton.jit
@no_type_check
def _gradient(
    z: tl.tensor,
    out: tl.tensor,
    divisor: tl.tensor,
    labels: tl.tensor,
    highest: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    count: tl.tensor,
    SCALED: tl.constexpr,
    OF_LABELS: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    valid = column < columns
    x = tl.load(z + row * columns + column, mask=valid, other=0.0)
    if SCALED:
        x = x / tl.load(divisor + row)
    x = _at_least_floor(x - tl.load(highest + row))
    factor = tl.load(b + row)
    if OF_ENTROPY:
        factor += tl.load(c + row) * x
    gradient = factor * tl.exp(x)
    if OF_LABELS:
        for label in range(count):
            place = tl.load(labels + row * count + label).to(tl.int64) - start
            if (place >= first) & (place < first + COLUMNS):
                gradient += tl.where(column == place, tl.load(a + row * count + label), 0.0)
    tl.store(out + row * columns + column, gradient.to(out.dtype.element_ty), mask=valid)


def add_statistics(
    z: Tensor,
    divisor: Tensor | None,
    labels: Tensor,
    start: int,
    highest: Tensor,
    total: Tensor,
    weighted: Tensor,
    chosen: Tensor,
) -> None:
    """Do what ``linear_head_tiles.add_statistics`` does, and leave ``z`` as it is."""
    count = labels.shape[1]
    with torch.cuda.device_of(z):  # type: ignore[no-untyped-call]
        _add_statistics[(len(z),)](
            *(z, z if divisor is None else divisor, labels, highest, total, weighted, chosen),
            *(start, z.shape[1], count),
            SCALED=divisor is not None,
            LABELS=triton.next_power_of_2(count),
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )


def gradient(
    z: Tensor,
    divisor: Tensor | None,
    labels: Tensor,
    start: int,
    highest: Tensor,
    a: Tensor | None,
    b: Tensor,
    c: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Do what ``linear_head_tiles.gradient`` does; ``z`` may be overwritten."""
    out = z if z.dtype == dtype else torch.empty_like(z, dtype=dtype)
    with torch.cuda.device_of(z):  # type: ignore[no-untyped-call]
        _gradient[(len(z), triton.cdiv(z.shape[1], COLUMNS))](
            *(z, out, z if divisor is None else divisor, labels, highest),
            *(z if a is None else a, b, z if c is None else c),
            *(start, z.shape[1], labels.shape[1]),
            SCALED=divisor is not None,
            OF_LABELS=a is not None,
            OF_ENTROPY=c is not None,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return out


def run_once(device: torch.device) -> None:
    """Run both kernels on one row, to find out whether this machine can compile and start them.

    Raises:
        RuntimeError: Triton does not compile them for this device.
    """
    z, one = torch.zeros(1, 16, device=device), torch.ones(1, device=device)
    labels = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        highest, total, weighted = (torch.ones_like(one) for _ in range(3))
        add_statistics(
            z, None, labels, 0, highest, total, weighted, torch.ones(1, 1, device=device)
        )
        gradient(z, None, labels, 0, one, one.view(1, 1), one, None, z.dtype)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
