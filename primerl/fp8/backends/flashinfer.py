"""Backend for FlashInfer's group-wise product, on Blackwell."""

import importlib.util

import torch
from jaxtyping import Float
from torch import Tensor

from primerl._common.optional import require
from primerl.fp8.backends.interface import Groups, by_group, check_operands, check_signature
from primerl.fp8.backends.layouts import padded
from primerl.fp8.format import Format, Quantized

BLOCK = 128
_MODULE = "flashinfer"
_PARAMETERS = ["a", "b", "a_scale", "b_scale", "scale_major_mode", "scale_granularity_mnk"]


class FlashInfer:
    """Backend with ``flashinfer.gemm.gemm_fp8_nt_groupwise`` (CUTLASS); bfloat16 results."""

    name = "flashinfer"

    def refusal(self, form: Format, device: torch.device) -> str | None:
        """Return why this backend can't multiply in a format on a device; None if it can."""
        if importlib.util.find_spec(_MODULE) is None:
            return "flashinfer is not installed (pip install flashinfer-python)"
        if form.block != BLOCK or form.weight_rows != BLOCK:
            return f"it takes weights in blocks of {BLOCK} x {BLOCK}"
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
            return f"it needs a GPU of compute capability 10.x, the device is {device}"
        return None

    def multiply(self, a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Float[Tensor, "m n"]:
        """Compute ``a b^T``."""
        check_operands(a, b)
        product = require("flashinfer.gemm", extra=_MODULE).gemm_fp8_nt_groupwise
        check_signature(product, _PARAMETERS)
        m, n = a.values.shape[0], b.values.shape[0]
        out: Tensor = product(
            padded(a.values, rows=4, columns=BLOCK),
            padded(b.values, rows=BLOCK, columns=BLOCK),
            padded(a.scales.float(), rows=4),
            padded(b.scales.float(), rows=BLOCK if b.rows == 1 else 1),
            scale_major_mode="K",
            scale_granularity_mnk=(1, b.rows, BLOCK),
            out_dtype=torch.bfloat16,
        )
        return out[:m, :n].to(dtype)

    def multiply_grouped(
        self, a: Quantized, b: Quantized, groups: Groups, *, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Compute one product per group of rows."""
        return by_group(self, a, b, groups, dtype=dtype)
