"""Specification of the FP8 formats: blocks, scales and rounding.

For each block of a tensor, quantization computes, in float32 and in this order:

    amax   = max |x| over the block
    scale  = max(amax, EPSILON) / 448          rounded up to a power of two where it is "ue8m0"
    q      = cast(clamp(x / scale, -448, 448)) to float8_e4m3fn, to nearest, ties to even

vLLM's ``per_token_group_quant_fp8`` computes the same for activations. Both steps divide:
multiplying by a reciprocal would round differently. If the block size does not divide a row or
column, the last block is smaller.
"""

from typing import Literal, Self

import attrs
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

ScaleType = Literal["float32", "ue8m0"]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of float8_e4m3fn."""
EPSILON = 1e-10
"""The smallest ``amax``, as in vLLM, so that a block of zeros has a nonzero scale."""
SCALE_DTYPES: dict[ScaleType, torch.dtype] = {
    "float32": torch.float32,
    "ue8m0": torch.float8_e8m0fnu,
}


def scale_type(scales: Tensor) -> ScaleType:
    """Return the scale type, inferred from the dtype of the scales.

    Raises:
        ValueError: no scale type has this dtype.
    """
    for name, dtype in SCALE_DTYPES.items():
        if scales.dtype == dtype:
            return name
    raise ValueError(
        f'scales are {scales.dtype}; expected torch.float32 ("float32") or torch.float8_e8m0fnu '
        '("ue8m0"), as quantize returns them'
    )


@attrs.frozen(kw_only=True)
class Format:
    """A block-scaled FP8 format.

    Activations are in blocks of 1 x ``block``, and weights in blocks of ``weight_rows`` x
    ``block``.

    Raises:
        ValueError: ``block`` is below 1, ``weight_rows`` is neither 1 nor ``block``, or the scale
            type is unknown.
    """

    scale: ScaleType = "float32"
    """Scale type: ``"float32"``, or ``"ue8m0"`` for powers of two stored in 8 bits."""
    block: int = 128
    """Number of consecutive elements of a row in a block."""
    weight_rows: int = 128
    """Number of rows in a weight's block: ``block`` or 1."""

    def __attrs_post_init__(self) -> None:
        if self.scale not in SCALE_DTYPES:
            raise ValueError(f'scale is {self.scale!r}; expected "float32" or "ue8m0"')
        if self.block < 1 or self.weight_rows not in (1, self.block):
            raise ValueError(
                f"block is {self.block} and weight_rows {self.weight_rows}; expected a positive "
                "block, and weight_rows equal to it or 1"
            )

    @classmethod
    def of_blocks(cls, block: int, *, scale: ScaleType = "float32") -> Self:
        """Create a format with activations in 1 x ``block`` and weights in square blocks."""
        return cls(scale=scale, block=block, weight_rows=block)


BLOCK_FP8 = Format()
"""DeepSeek-V3's format (arXiv:2412.19437), for Hopper: activations in 1 x 128 blocks and weights in
128 x 128, with float32 scales."""
BLOCK_FP8_UE8M0 = Format(scale="ue8m0")
"""The blocks of ``BLOCK_FP8`` with power-of-two scales, for Blackwell."""
MXFP8 = Format(scale="ue8m0", block=32, weight_rows=1)
"""The microscaling format (arXiv:2310.10537): activations and weights in 1 x 32 blocks, with scales
rounded up to powers of two."""


@attrs.frozen(kw_only=True, eq=False)
class Quantized:
    """An FP8 matrix, or one per expert, with its scales: an operand of a matrix product.

    Raises:
        ValueError: the values are not FP8, the scales have an unknown dtype, or their shape is not
            that of the blocks.
    """

    values: Float[Tensor, "*e m k"]
    scales: Shaped[Tensor, "*e m_blocks k_blocks"]
    rows: int
    """Number of rows in a block."""
    block: int
    """Number of columns in a block."""

    def __attrs_post_init__(self) -> None:
        if self.values.dtype != FP8:
            raise ValueError(f"values are {self.values.dtype}; expected {FP8}, as from quantize")
        scale_type(self.scales)
        *experts, m, k = self.values.shape
        expected = (*experts, -(-m // self.rows), -(-k // self.block))
        if tuple(self.scales.shape) != expected:
            raise ValueError(
                f"scales have shape {tuple(self.scales.shape)}, but values of shape "
                f"{tuple(self.values.shape)} in blocks of {self.rows} x {self.block} need "
                f"{expected}: were they transposed, or quantized with another block size?"
            )

    @property
    def scale(self) -> ScaleType:
        """Scale type: ``"float32"`` or ``"ue8m0"``."""
        return scale_type(self.scales)

    def transposed(self) -> "Quantized":
        """Return the transposed matrix, with the same FP8 values and scales.

        Raises:
            ValueError: the blocks are not square.
        """
        if self.rows != self.block:
            raise ValueError(
                f"blocks of {self.rows} x {self.block} are not square, so the matrix can't be "
                "transposed; quantize the transpose instead"
            )
        return Quantized(
            values=self.values.transpose(-1, -2),
            scales=self.scales.transpose(-1, -2),
            rows=self.rows,
            block=self.block,
        )
