"""Quantize the tensors in a file with vLLM's own quantizers; run by tests/vllm/test_fp8.py."""

import sys
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.utils.deep_gemm import per_block_cast_to_fp8

inputs = torch.load(sys.argv[1])
found = {}
for scale in ("float32", "ue8m0"):
    powers = scale == "ue8m0"
    plain = SimpleNamespace(group_size=128, use_ue8m0=powers, column_major_scales=False)
    for name, x in inputs.items():
        found["plain", scale, name] = QuantFP8._quantize_group_native(plain, x)
    for name in ("float32", "tiny"):
        # The kernel runs in Triton's interpreter.
        found["kernel", scale, name] = per_token_group_quant_fp8(
            inputs[name], 128, use_ue8m0=powers
        )
    found["weight", scale] = per_block_cast_to_fp8(inputs["float32"], use_ue8m0=powers)
torch.save(found, sys.argv[2])
