"""Triton kernel that quantizes a matrix in one read, in one layout or in two.

A program reads one tile. It writes FP8 values with blocks along rows, and, transposed, values with
blocks along columns, which a product of gradients takes. Each result is bitwise that of
``quantization.quantize_blocks``:

- Absolute maxima are maxima of integers, since float32 is ordered like its bits without the sign.
  Here NaN is the largest; Triton's maximum of floats drops NaNs.
- Divisions are ``div_rn``: Triton's ``/`` is an approximation, with an error of up to 2 units in
  the last place, so that a value near the middle of two FP8 values would be rounded to the other.
- The cast to FP8 is integer arithmetic. It is the same on all GPUs and in Triton's interpreter,
  whose own cast to float8_e4m3fn differs for subnormal values.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

ROWS = 32
"""Rows of a tile if blocks have one row and only values along rows are written."""
VALUES = 1024
"""Values of a tile for each warp: 32 in each thread, which fit in registers."""

_SIZE = tl.constexpr(0x7FFFFFFF)  # the bits of |x|
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_EPSILON = tl.constexpr(0x2EDBE6FF)  # the bits of format.EPSILON, 1e-10
_LARGEST = tl.constexpr(0x43E00000)  # those of 448
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)  # those of 2^-6
_REBIAS = tl.constexpr(0x7FFFF - (120 << 23))  # exponents from 127 to 7, and just under a half
_UNIT = tl.constexpr(16384.0)  # the last place of 2^14 is 2^-9, float8_e4m3fn's smallest number
_UNIT_BITS = tl.constexpr(0x46800000)


# ``no_type_check``: the wrappers of runtime type checks lack the names of this module.
@triton.jit
@no_type_check
def _scale(amax: tl.tensor, POWERS: tl.constexpr) -> Any:
    """Return the scale by which to divide, and the one to store."""
    amax = tl.maximum(amax, _EPSILON).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 448.0)
    stored = scale
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(exponent, 255)
        scale = tl.where(exponent == 255, _NAN, exponent << 23).to(tl.float32, bitcast=True)
        stored = exponent.to(tl.uint8)
    return scale, stored


@triton.jit
@no_type_check
def _codes(x: tl.tensor, scale: tl.tensor) -> Any:
    """Return the codes of ``x / scale`` in float8_e4m3fn: to nearest, ties to even."""
    bits = tl.div_rn(x, scale).to(tl.int32, bitcast=True)
    size = bits & _SIZE
    clamped = tl.minimum(size, _LARGEST)
    normal = (clamped + ((clamped >> 20) & 1) + _REBIAS) >> 20
    shifted = clamped.to(tl.float32, bitcast=True) + _UNIT
    subnormal = shifted.to(tl.int32, bitcast=True) - _UNIT_BITS
    code = tl.where(clamped >= _SMALLEST_NORMAL, normal, subnormal)
    code = tl.where(size > _INFINITY, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
@no_type_check
def _quantize(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    transposed_values: tl.tensor,
    transposed_scales: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    POWERS: tl.constexpr,
) -> None:
    down, across = tl.cdiv(m, ROWS), tl.cdiv(k, BLOCK)
    expert = tl.program_id(1).to(tl.int64)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = i * ROWS + tl.arange(0, ROWS), j * BLOCK + tl.arange(0, BLOCK)
    valid = (row < m)[:, None] & (column < k)[None, :]
    wide_row, wide_column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    place = expert * expert_stride + wide_row * row_stride + wide_column * column_stride
    tile = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
    size = tile.to(tl.int32, bitcast=True) & _SIZE
    first = expert * m * k

    if SQUARE:
        scale, stored = _scale(tl.max(tl.max(size, 1), 0), POWERS)
        codes = _codes(tile, scale)
        first_scale = expert * down * across
        if STRAIGHT:
            tl.store(values + first + wide_row * k + wide_column, codes, mask=valid)
            tl.store(scales + first_scale + i.to(tl.int64) * across + j, stored)
        if TRANSPOSED:
            tl.store(transposed_values + first + wide_column * m + wide_row, codes, mask=valid)
            tl.store(transposed_scales + first_scale + j.to(tl.int64) * down + i, stored)
    else:
        if STRAIGHT:
            scale, stored = _scale(tl.max(size, 1), POWERS)
            codes = _codes(tile, scale[:, None])
            tl.store(values + first + wide_row * k + wide_column, codes, mask=valid)
            place_of_scale = (expert * across + j) * m + row
            tl.store(scales + place_of_scale, stored, mask=row < m)
        if TRANSPOSED:
            scale, stored = _scale(tl.max(size, 0), POWERS)
            codes = _codes(tile, scale[None, :])
            tl.store(transposed_values + first + wide_column * m + wide_row, codes, mask=valid)
            place_of_scale = (expert * down + i) * k + column
            tl.store(transposed_scales + place_of_scale, stored, mask=column < k)


def quantize_into(
    x: Float[Tensor, "*e m k"],
    straight: tuple[Shaped[Tensor, "..."], Shaped[Tensor, "..."]] | None,
    transposed: tuple[Shaped[Tensor, "..."], Shaped[Tensor, "..."]] | None,
    *,
    rows: int,
    block: int,
) -> None:
    """Quantize ``x`` into values and scales, laid out as in ``quantization.operand``.

    Args:
        x: a matrix, or one per expert, with any strides.
        straight: where to write values and scales of blocks of ``rows`` x ``block``; None to leave
            them out.
        transposed: where to write those of the transposed matrix, in blocks of the same shape.
        rows: 1 or ``block``.
        block: a power of 2 from 16 to 128.
    """
    experts = x if x.ndim == 3 else x.unsqueeze(0)
    count, m, k = experts.shape
    results = [_pointers(one, experts) for one in (straight, transposed)]
    powers = any(
        one is not None and one[1].dtype != torch.float32 for one in (straight, transposed)
    )
    height, warps = tile(rows, block, transposed=transposed is not None)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _quantize[(triton.cdiv(m, height) * triton.cdiv(k, block), count)](
            *(experts, *results[0], *results[1], m, k, *experts.stride()),
            ROWS=height,
            BLOCK=block,
            SQUARE=rows == block,
            STRAIGHT=straight is not None,
            TRANSPOSED=transposed is not None,
            POWERS=powers,
            num_warps=warps,
        )


def run_once(device: torch.device) -> None:
    """Quantize a small matrix with each shape of blocks, to find out whether the kernel can run."""
    x = torch.ones(16, 16, device=device)
    for rows in (1, 16):
        values = torch.empty(16, 16, dtype=torch.uint8, device=device)
        scales = torch.empty(16 // rows, device=device)
        quantize_into(x, (values, scales), None, rows=rows, block=16)


def tile(rows: int, block: int, *, transposed: bool) -> tuple[int, int]:
    """Return the height of a tile, which is ``block`` wide, and the number of its warps."""
    height = block if rows == block or transposed else ROWS
    return height, max(1, height * block // VALUES)


def _pointers(result: tuple[Tensor, Tensor] | None, unused: Any) -> tuple[Any, Any]:
    """Return values and scales as tensors of bytes or float32, or a stand-in if there are none."""
    if result is None:
        return unused, unused
    values, scales = result
    return values.view(torch.uint8), scales if scales.dtype == torch.float32 else scales.view(
        torch.uint8
    )
