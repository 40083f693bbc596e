"""The reference: dequantize and multiply in float32. It is the specification, on any device."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primerl.fp8.backends.interface import by_group, check_operands
from primerl.fp8.format import Format, Quantized
from primerl.fp8.quantization import values_of


class Reference:
    """Products in float32 of the values that FP8 stands for."""

    name = "reference"

    def refusal(self, form: Format, device: torch.device) -> str | None:  # noqa: ARG002
        """None: it multiplies in every format, everywhere."""
        return None

    def multiply(self, a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Float[Tensor, "m n"]:
        """``a b^T``, summed in float32, then rounded to ``dtype``."""
        check_operands(a, b)
        with torch.autocast(a.values.device.type, enabled=False):
            return (values_of(a) @ values_of(b).T).to(dtype)

    def multiply_grouped(
        self, a: Quantized, b: Quantized, ends: Int[Tensor, " e"], *, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Each group of rows times its matrix."""
        return by_group(self, a, b, ends, dtype=dtype)
