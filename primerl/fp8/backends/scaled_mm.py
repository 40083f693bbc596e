"""Backend for torch's block-wise product (``torch.nn.functional.scaled_mm``, cuBLAS), on SM90."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from primerl.fp8.backends.interface import Groups, by_group, check_operands
from primerl.fp8.backends.layouts import k_major, outer_major, padded
from primerl.fp8.format import Format, Quantized

BLOCK = 128
_ROWS = 16  # row multiple of operands: cuBLAS needs 16-byte product rows, and scales in fours


class ScaledMM:
    """Backend with cuBLAS through torch; it needs an H100 or H200 (SM90) and CUDA 12.9."""

    name = "torch"

    def refusal(self, form: Format, device: torch.device) -> str | None:
        """Return why this backend can't multiply in a format on a device; None if it can."""
        if (form.scale, form.block) != ("float32", BLOCK):
            return f"it takes float32 scales of {BLOCK} entries, not {form.scale} of {form.block}"
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            return f"it needs a GPU of compute capability 9.0, the device is {device}"
        return None

    def multiply(self, a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Float[Tensor, "m n"]:
        """Compute ``a b^T``, with operands padded to multiples of 16 rows and 128 columns."""
        check_operands(a, b)
        m, n = a.values.shape[0], b.values.shape[0]
        left, left_scales, left_recipe = operand(a)
        right, right_scales, right_recipe = operand(b)
        product = F.scaled_mm(
            left,
            right.t(),
            left_scales,
            left_recipe,
            right_scales,
            right_recipe,
            output_dtype=dtype,
        )
        return product[:m, :n]

    def multiply_grouped(
        self, a: Quantized, b: Quantized, groups: Groups, *, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Compute one product per group: torch's grouped product has no block scales on SM90."""
        return by_group(self, a, b, groups, dtype=dtype)


def operand(quantized: Quantized) -> tuple[Tensor, Tensor, F.ScalingType]:
    """Return an operand's values, scales and scaling type, as ``scaled_mm`` takes them."""
    values = padded(quantized.values, rows=_ROWS, columns=BLOCK)
    scales = quantized.scales
    if quantized.rows == 1:
        return values, outer_major(scales, rows=_ROWS), F.ScalingType.BlockWise1x128
    return values, k_major(scales), F.ScalingType.BlockWise128x128
