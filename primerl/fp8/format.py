"""The specification: how a tensor is divided into blocks, and how a block's scale is made.

For each block of a tensor, in float32 and in this order:

    amax   = max |x| over the block
    scale  = max(amax, EPSILON) / 448          rounded up to a power of two where it is "ue8m0"
    q      = cast(clamp(x / scale, -448, 448)) to float8_e4m3fn, to nearest, ties to even

That is what vLLM's ``per_token_group_quant_fp8`` computes for activations: a division twice, no
multiplication by a reciprocal, which rounds otherwise. Blocks at the end of a row or column that
is no multiple of the block's size are smaller.
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
"""The smallest ``amax``: a block of zeros has a scale, and no division is by zero. vLLM's."""
SCALE_DTYPES: dict[ScaleType, torch.dtype] = {
    "float32": torch.float32,
    "ue8m0": torch.float8_e8m0fnu,
}


def scale_type(scales: Tensor) -> ScaleType:
    """What kind of scales these are: their dtype says it, so it travels with them.

    Raises:
        ValueError: they have another dtype.
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
    """A block-scaled FP8 format: activations in blocks of 1 x ``block``, and weights.

    Raises:
        ValueError: a size is below 1, or the scale type is unknown.
    """

    scale: ScaleType = "float32"
    """``"float32"``, or ``"ue8m0"``: powers of two, in 8 bits."""
    block: int = 128
    """Elements of a row that share a scale."""
    weight_rows: int = 128
    """Rows of a weight's block, which has ``block`` columns: ``block`` or 1."""

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
        """Activations in blocks of 1 x ``block`` and weights of ``block`` x ``block``."""
        return cls(scale=scale, block=block, weight_rows=block)


BLOCK_FP8 = Format()
"""1 x 128 and 128 x 128 with float32 scales: DeepSeek-V3's (arXiv:2412.19437), on Hopper."""
BLOCK_FP8_UE8M0 = Format(scale="ue8m0")
"""The same blocks with powers of two as scales, on Blackwell."""
MXFP8 = Format(scale="ue8m0", block=32, weight_rows=1)
"""1 x 32 for both, with powers of two: the microscaling format (arXiv:2310.10537), rounded up."""


@attrs.frozen(kw_only=True, eq=False)
class Quantized:
    """A matrix, or one for each expert, in FP8, with its scales: an operand of a product.

    Raises:
        ValueError: the values are no FP8, or the scales are of another type or number than blocks.
    """

    values: Float[Tensor, "*e m k"]
    scales: Shaped[Tensor, "*e m_blocks k_blocks"]
    rows: int
    """Rows of a block."""
    block: int
    """Columns of a block."""

    def __attrs_post_init__(self) -> None:
        if self.values.dtype != FP8:
            raise ValueError(f"values are {self.values.dtype}; expected {FP8}, as quantize makes")
        scale_type(self.scales)
        *experts, m, k = self.values.shape
        expected = (*experts, -(-m // self.rows), -(-k // self.block))
        if tuple(self.scales.shape) != expected:
            raise ValueError(
                f"scales have shape {tuple(self.scales.shape)}; values of shape "
                f"{tuple(self.values.shape)} in blocks of {self.rows} x {self.block} have "
                f"{expected}: were they transposed, or made with another block?"
            )

    @property
    def scale(self) -> ScaleType:
        """The type of the scales."""
        return scale_type(self.scales)

    def transposed(self) -> "Quantized":
        """The transposed matrix, of the same bytes: square blocks stay blocks.

        Raises:
            ValueError: blocks are not square.
        """
        if self.rows != self.block:
            raise ValueError(
                f"blocks of {self.rows} x {self.block} are not square; quantize the transpose"
            )
        return Quantized(
            values=self.values.transpose(-1, -2),
            scales=self.scales.transpose(-1, -2),
            rows=self.rows,
            block=self.block,
        )
