"""NVFP4, experimental: 4-bit values in blocks of 1 x 16, on two levels of scales.

    global = amax of the tensor / (448 * 6)
    scale  = cast(amax of the block / 6 / global)    to float8_e4m3fn, at least its smallest normal
    q      = round(x / (global * scale)) to e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even

Source: the format of NVIDIA's Blackwell, as arXiv:2509.25149 describes it. Nothing here multiplies
in it: it is a quantizer and a fake quantization, to see what a model loses.
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
# Halfway between neighbours. A value on a boundary goes to the neighbour with an even code.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SMALLEST_SCALE = float(torch.finfo(FP8).smallest_normal)


@attrs.frozen(kw_only=True, eq=False)
class NVFP4:
    """A tensor in NVFP4. Experimental."""

    packed: UInt8[Tensor, "t half"]
    """Two codes in a byte, the first in the low bits; bit 3 of a code is the sign."""
    scales: Float[Tensor, "t blocks"]
    """float8_e4m3fn."""
    global_scale: Float[Tensor, ""]
    width: int
    """Entries of a row."""


def quantize_nvfp4(x: Float[Tensor, "t h"]) -> NVFP4:
    """A matrix in NVFP4. Experimental.

    Raises:
        ValueError: it has an infinity or a NaN, or is no floating-point tensor.
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
    """The float32 values that NVFP4 stands for. Experimental."""
    packed = quantized.packed
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor(_VALUES, device=packed.device)[codes & 7]
    values = torch.where(codes > 7, -values, values)
    scales = (quantized.global_scale * quantized.scales.float()).repeat_interleave(BLOCK, -1)
    return (values * scales)[:, : quantized.width]


def fake_quantize_nvfp4(x: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
    """``x`` rounded to NVFP4 and back, with the gradient of the identity. Experimental.

    Raises:
        ValueError: as ``quantize_nvfp4``.
    """
    rounded = dequantize_nvfp4(quantize_nvfp4(x)).to(x.dtype)
    return rounded + (x - x.detach())  # a zero, with the gradient


def _codes(scaled: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    boundaries = torch.tensor(_BOUNDARIES, device=scaled.device)
    size = scaled.abs().clamp(max=LARGEST_FP4)
    below = torch.bucketize(size, boundaries, right=False)  # boundaries below the value
    up_to = torch.bucketize(size, boundaries, right=True)  # and equal to it
    code = torch.where(below % 2 == 0, below, up_to)  # on a boundary: the even one
    return (code + 8 * scaled.signbit()).to(torch.uint8)
