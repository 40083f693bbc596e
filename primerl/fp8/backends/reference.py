"""Reference backend for any device: dequantize, then multiply in float32."""

import torch
from jaxtyping import Float
from torch import Tensor

from primerl.fp8.backends.interface import Groups, check_operands
from primerl.fp8.format import Format, Quantized
from primerl.fp8.quantization import values_of


class Reference:
    """Reference backend, which specifies results: dequantize and multiply in float32."""

    name = "reference"

    def refusal(self, form: Format, device: torch.device) -> str | None:  # noqa: ARG002
        """Return None: the reference supports every format on every device."""
        return None

    def multiply(self, a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Float[Tensor, "m n"]:
        """Compute ``a b^T`` in float32, and round it to ``dtype``."""
        check_operands(a, b)
        with torch.autocast(a.values.device.type, enabled=False):
            return (values_of(a) @ values_of(b).T).to(dtype)

    def multiply_grouped(
        self, a: Quantized, b: Quantized, groups: Groups, *, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Multiply each group of rows by its matrix in float32, and round to ``dtype``."""
        check_operands(a, b)
        rows, matrices = values_of(a), values_of(b)
        product = rows.new_empty(rows.shape[0], matrices.shape[-2])
        with torch.autocast(rows.device.type, enabled=False):
            for index, (begin, end) in enumerate(groups.bounds):
                torch.mm(rows[begin:end], matrices[index].T, out=product[begin:end])
        return product.to(dtype)
