"""NVFP4 quantization, experimental: 4-bit values in blocks of 1 x 16, with two levels of scales.

    global = amax of the tensor / (448 * 6)
    scale  = cast(amax of the block / 6 / global)    to float8_e4m3fn, at least its smallest normal
    q      = round(x / (global * scale)) to e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even

This is the format of NVIDIA's Blackwell, as described in arXiv:2509.25149. The module provides a
quantizer and fake quantization, to measure what a model loses, but no matrix products in NVFP4.
"""

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from primerl.fp8.format import EPSILON, FP8, LARGEST
from primerl.fp8.quantization import _require_finite

BLOCK = 16
LARGEST_FP4 = 6.0
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between adjacent values. A midpoint rounds to the neighbor with an even code.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SMALLEST_SCALE = float(torch.finfo(FP8).smallest_normal)


@attrs.frozen(kw_only=True, eq=False)
class NVFP4:
    """A matrix quantized to NVFP4. Experimental."""

    packed: UInt8[Tensor, "t half"]
    """4-bit codes, two per byte, the first in the low bits; bit 3 of a code is the sign."""
    scales: Float[Tensor, "t blocks"]
    """Scale of each block, as float8_e4m3fn."""
    global_scale: Float[Tensor, ""]
    """Scale of the whole tensor."""
    width: int
    """Number of entries in a row, without padding."""


def quantize_nvfp4(x: Float[Tensor, "t h"]) -> NVFP4:
    """Quantize a matrix to NVFP4. Experimental.

    Raises:
        ValueError: ``x`` has an infinity or a NaN, or is not a floating-point tensor of at least 16
            bits.
    """
    _require_finite(x)
    t, h = x.shape
    blocks = F.pad(x.detach().float(), (0, -h % BLOCK)).view(t, -(-h // BLOCK), BLOCK)
    amax = blocks.abs().amax(-1)
    global_scale = (amax.amax() if amax.numel() else amax.new_tensor(0.0)).clamp(min=EPSILON) / (
        amax.new_tensor(LARGEST * LARGEST_FP4)
    )
    wanted = amax / amax.new_tensor(LARGEST_FP4) / global_scale
    scales = wanted.clamp(_SMALLEST_SCALE, LARGEST).to(FP8)
    scaled = blocks / (global_scale * scales.float())[..., None]
    codes = _codes(scaled).view(t, -1)
    return NVFP4(
        packed=codes[:, 0::2] | (codes[:, 1::2] << 4),
        scales=scales,
        global_scale=global_scale,
        width=h,
    )


def dequantize_nvfp4(quantized: NVFP4) -> Float[Tensor, "t h"]:
    """Return the float32 values of an NVFP4 tensor. Experimental."""
    packed = quantized.packed
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor(_VALUES, device=packed.device)[codes & 7]
    values = torch.where(codes > 7, -values, values)
    scales = (quantized.global_scale * quantized.scales.float()).repeat_interleave(BLOCK, -1)
    return (values * scales)[:, : quantized.width]


def fake_quantize_nvfp4(x: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
    """Round ``x`` to NVFP4 and back, with a straight-through gradient. Experimental.

    Raises:
        ValueError: as for ``quantize_nvfp4``.
    """
    rounded = dequantize_nvfp4(quantize_nvfp4(x)).to(x.dtype)
    return rounded + (x - x.detach())  # adds zero, whose gradient is that of x


def _codes(scaled: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    boundaries = torch.tensor(_BOUNDARIES, device=scaled.device)
    size = scaled.abs().clamp(max=LARGEST_FP4)
    below = torch.bucketize(size, boundaries, right=False)  # boundaries below the value
    up_to = torch.bucketize(size, boundaries, right=True)  # boundaries below or equal to it
    code = torch.where(below % 2 == 0, below, up_to)  # on a boundary, the even code
    return (code + 8 * scaled.signbit()).to(torch.uint8)
