"""Backend for DeepGEMM: block-wise and grouped products, on SM90 and SM100.

Install DeepGEMM from its repository, with vLLM, or as ``sgl-deep-gemm`` if its build fits the
installed torch (PyPI's ``deep-gemm`` is a placeholder).
"""

import importlib
import importlib.util
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from primerl.fp8.backends.interface import Groups, check_operands, check_signature
from primerl.fp8.backends.layouts import grouped_rows, outer_major, padded
from primerl.fp8.format import Format, Quantized

BLOCK = 128
_MODULE = "deep_gemm"
# Names of the same function in older builds, and in newer builds, which support FP4 too.
_PLAIN = ("fp8_gemm_nt", "fp8_fp4_gemm_nt")
_GROUPED = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous")


class DeepGEMM:
    """Backend with DeepGEMM: float32 scales on SM90, powers of two on SM100.

    Its results are in bfloat16. Weight gradients on SM90 are in float32, because the kernel for two
    operands in blocks of 1 x 128 only adds to a float32 matrix.
    """

    name = "deep_gemm"

    def refusal(self, form: Format, device: torch.device) -> str | None:
        """Return why this backend can't multiply in a format on a device; None if it can."""
        if importlib.util.find_spec(_MODULE) is None:
            return "deep_gemm is not installed (build it from its repository)"
        if form.block != BLOCK or form.weight_rows != BLOCK:
            return f"it takes weights in blocks of {BLOCK} x {BLOCK}"
        major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
        wanted = {9: "float32", 10: "ue8m0"}.get(major)
        if wanted is None:
            return f"it needs a GPU of compute capability 9.0 or 10.0, the device is {device}"
        if form.scale != wanted:
            return f"on compute capability {major}.0 it takes {wanted} scales, not {form.scale}"
        return None

    def multiply(self, a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Float[Tensor, "m n"]:
        """Compute ``a b^T``."""
        check_operands(a, b)
        product = _function(_PLAIN, ["c", "recipe", "compiled_dims", "disable_ue8m0_cast"])
        m, n = a.values.shape[0], b.values.shape[0]
        options: dict[str, Any] = {"disable_ue8m0_cast": a.scale == "float32"}
        if b.rows == 1:
            # A weight gradient sums over tokens, whose number varies: a kernel compiled for one
            # number of them would be compiled again for the next pack.
            options |= {"recipe": (1, 1, BLOCK), "compiled_dims": "mn"}
        if b.rows == 1 and a.scale == "float32":
            out = _result(a.values, m, n, torch.float32).zero_()
            options["c"] = out  # what is added to; the same tensor as the result is not copied
        else:
            out = _result(a.values, m, n, torch.bfloat16)
        product(_pair(a), _pair(b), out, **options)
        return out.to(dtype)

    def multiply_grouped(
        self, a: Quantized, b: Quantized, groups: Groups, *, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Multiply each group of rows, padded to a multiple of 128 rows, by its matrix."""
        places, group_of_row = grouped_rows(groups, multiple=BLOCK)
        rows = len(group_of_row)
        own, own_scales = _pair(a)
        values = own.new_zeros(rows, own.shape[1])
        values.view(torch.uint8)[places] = own.view(torch.uint8)
        scales = own_scales.new_ones(rows, own_scales.shape[1])
        scales[places] = own_scales
        out = _result(values, rows, b.values.shape[-2], torch.bfloat16)
        product = _function(_GROUPED, ["disable_ue8m0_cast"])
        product(
            (values, scales),
            _pair(b),
            out,
            group_of_row,
            disable_ue8m0_cast=a.scale == "float32",
        )
        return out[places].to(dtype)


def _pair(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Return values, with columns padded to a multiple of 128, and scales in float32.

    DeepGEMM reads scales of 1 x 128 blocks column by column, and copies others. It takes columns
    that begin at multiples of 16 bytes without a copy.
    """
    scales = quantized.scales.float()
    by_column = quantized.rows == 1 and scales.ndim == 2 and scales.shape[0] % 4 == 0
    scales = outer_major(scales) if by_column else scales.contiguous()
    return padded(quantized.values, columns=BLOCK), scales


def _result(like: Tensor, m: int, n: int, dtype: torch.dtype) -> Float[Tensor, "m n"]:
    """Allocate a result whose rows begin at multiples of 16 bytes, as the kernels write them."""
    columns = 16 // dtype.itemsize
    return like.new_empty(m, -(-n // columns) * columns, dtype=dtype)[:, :n]


def _function(names: tuple[str, ...], parameters: list[str]) -> Any:
    library = importlib.import_module(_MODULE)
    for name in names:
        function = getattr(library, name, None)
        if function is not None:
            check_signature(function, parameters)
            return function
    raise RuntimeError(
        f"the installed deep_gemm has none of {', '.join(names)}; use another backend"
    )
