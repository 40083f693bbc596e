"""vLLM's own quantizers, where they run on a CPU, against primerl's."""

from types import SimpleNamespace

import pytest
import torch

from primerl import fp8

pytestmark = pytest.mark.vllm

FLOOR = 1 / (448 * 512)
"""Below this, vLLM's plain-torch quantizer stops its scales; its kernels stop amax at 1e-10."""


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(2 * torch.randn(shape, generator=generator))


def bits(q):
    return q.view(torch.uint8)


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [512, 300])
def test_activations_are_bit_exact(scale, dtype, width):
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    x = drawn((64, width)).to(dtype)
    settings = SimpleNamespace(
        group_size=128, use_ue8m0=scale == "ue8m0", column_major_scales=False
    )
    q, scales = QuantFP8._quantize_group_native(settings, x)
    own_q, own_scales = fp8.quantize(x, scale=scale)
    assert scales.min() > FLOOR
    assert torch.equal(bits(q), bits(own_q))
    assert torch.equal(scales, own_scales.float())


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_weights_are_those_of_its_own_quantizer_but_for_rounding(scale):
    """It multiplies by 1 / scale: with powers of two that is exact, else it rounds once more."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    w = drawn((300, 520), 1)
    q, scales = per_block_cast_to_fp8(w, use_ue8m0=scale == "ue8m0")
    own_q, own_scales = fp8.quantize_weight(w, scale=scale)
    assert torch.equal(scales, own_scales.float())
    steps = (bits(q).int() - bits(own_q).int()).abs()
    if scale == "ue8m0":
        assert steps.max() == 0
    else:
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 1e-4
