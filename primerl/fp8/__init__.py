"""Block-scaled FP8 training, with the same quantization as an FP8 sampler.

See ``docs/fp8.md``. Modules: ``format`` (the specification), ``quantization`` (its arithmetic),
``linear`` and ``grouped`` (FP8 matrix products), ``backends`` (the kernels that compute them),
``conversion`` (replaces a model's linear layers) and ``checkpoints`` (writes quantized weights to
files and engines).
"""

from primerl.fp8.checkpoints import CheckpointQuantizer
from primerl.fp8.conversion import convert_linears
from primerl.fp8.format import BLOCK_FP8, BLOCK_FP8_UE8M0, MXFP8, Format, Quantized
from primerl.fp8.grouped import GroupedMatmul
from primerl.fp8.linear import Fp8Linear
from primerl.fp8.nvfp4 import NVFP4, dequantize_nvfp4, fake_quantize_nvfp4, quantize_nvfp4
from primerl.fp8.quantization import dequantize, quantize, quantize_weight

__all__ = [
    "BLOCK_FP8",
    "BLOCK_FP8_UE8M0",
    "CheckpointQuantizer",
    "Format",
    "Fp8Linear",
    "GroupedMatmul",
    "MXFP8",
    "NVFP4",
    "Quantized",
    "convert_linears",
    "dequantize",
    "dequantize_nvfp4",
    "fake_quantize_nvfp4",
    "quantize",
    "quantize_nvfp4",
    "quantize_weight",
]
