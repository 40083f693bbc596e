"""The quantizers, bit for bit against numpy with ml_dtypes, and against transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from primerl import fp8

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("ml_dtypes")
import fp8_oracle as oracle
from fp8_inputs import drawn, inputs
from hypothesis import given, settings
from hypothesis import strategies as st

INPUTS = inputs()


def same(found, x, *, rows, block, scale):
    q, scales = found
    codes, expected = oracle.quantized(x.float().numpy(), rows=rows, block=block, scale=scale)
    assert q.dtype == torch.float8_e4m3fn
    assert scales.dtype == {"float32": torch.float32, "ue8m0": torch.float8_e8m0fnu}[scale]
    np.testing.assert_array_equal(q.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(scales.float().numpy(), expected)
    back = fp8.dequantize(q, scales, block=block)
    np.testing.assert_array_equal(
        back.numpy(), oracle.values(codes, expected, rows=rows, block=block)
    )


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("name", INPUTS)
def test_they_are_bit_exact(name, scale):
    x = INPUTS[name]
    same(fp8.quantize(x, scale=scale), x, rows=1, block=128, scale=scale)
    same(fp8.quantize_weight(x, scale=scale), x, rows=128, block=128, scale=scale)
    mx = fp8.quantize_weight(x, block=32, scale=scale, rows=1)
    same(mx, x, rows=1, block=32, scale=scale)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    block=st.integers(1, 33),
    scale=st.sampled_from(["float32", "ue8m0"]),
    exponent=st.integers(-40, 100),
    seed=st.integers(0, 2**16),
)
def test_ragged_shapes_and_all_magnitudes(rows, width, block, scale, exponent, seed):
    x = drawn((rows, width), seed) * 2.0**exponent
    same(fp8.quantize(x, block=block, scale=scale), x, rows=1, block=block, scale=scale)
    weight = fp8.quantize_weight(x, block=block, scale=scale)
    same(weight, x, rows=block, block=block, scale=scale)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), scale=st.sampled_from(["float32", "ue8m0"]))
def test_the_error_is_bounded(seed, scale):
    """Half a step of the mantissa's 3 bits, relatively; and a half of the smallest denormal."""
    x = drawn((3, 260), seed) * torch.exp2(3 * drawn((3, 260), seed + 1))
    q, scales = fp8.quantize(x, scale=scale)
    wide = scales.float().repeat_interleave(128, 1)[:, :260]
    error = (fp8.dequantize(q, scales) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, wide * 2.0**-10) * (1 + 1e-6)).all()


def test_a_matrix_for_each_expert():
    w = drawn((3, 200, 140))
    q, scales = fp8.quantize_weight(w, scale="ue8m0")
    assert scales.shape == (3, 2, 2)
    for expert in range(3):
        one_q, one_scales = fp8.quantize_weight(w[expert], scale="ue8m0")
        assert torch.equal(q[expert].view(torch.uint8), one_q.view(torch.uint8))
        assert torch.equal(scales[expert].float(), one_scales.float())
    assert torch.equal(fp8.dequantize(q, scales)[1], fp8.dequantize(q[1], scales[1]))


def test_shapes_without_rows_and_with_more_dimensions():
    q, scales = fp8.quantize(torch.zeros(0, 130))
    assert (q.shape, scales.shape) == ((0, 130), (0, 2))
    x = drawn((2, 3, 200))
    q, scales = fp8.quantize(x)
    assert scales.shape == (2, 3, 2)
    flat_q, _ = fp8.quantize(x.view(6, 200))
    assert torch.equal(q.view(torch.uint8).view(6, 200), flat_q.view(torch.uint8))
    row_q, row_scales = fp8.quantize(x[0, 0])
    assert (row_q.shape, row_scales.shape) == ((200,), (2,))
    assert torch.equal(fp8.dequantize(row_q, row_scales), fp8.dequantize(q, scales)[0, 0])
    columns, _ = fp8.quantize(x[0].t())  # not contiguous
    assert torch.equal(
        columns.view(torch.uint8), fp8.quantize(x[0].t().contiguous())[0].view(torch.uint8)
    )


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_infinities_and_nans_are_refused(value):
    x = torch.ones(4, 200)
    x[2, 150] = value
    for quantizer in (fp8.quantize, fp8.quantize_weight, fp8.quantize_nvfp4):
        with pytest.raises(ValueError, match=r"1 of 800 values are infinite or NaN.*\[2, 150\]"):
            quantizer(x)
    with pytest.raises(ValueError, match="infinite or NaN in float32"):
        fp8.quantize(torch.full((1, 8), 1e300, dtype=torch.float64))


def test_no_rows_have_no_scales():
    q, scales = fp8.quantize(torch.ones(0, 200))
    assert (q.shape, scales.shape) == ((0, 200), (0, 2))
    assert fp8.dequantize(q, scales).shape == (0, 200)


def test_what_does_not_fit_is_refused():
    x = torch.ones(4, 200)
    q, scales = fp8.quantize(x)
    with pytest.raises(ValueError, match="cannot quantize torch.int64"):
        fp8.quantize(x.long())
    with pytest.raises(ValueError, match=r"x has shape \(3, 0\); expected .*h at least 1"):
        fp8.quantize(torch.ones(3, 0))
    with pytest.raises(ValueError, match=r"w has shape \(3, 0\); expected a nonempty matrix"):
        fp8.quantize_weight(torch.ones(3, 0))
    with pytest.raises(ValueError, match="cannot quantize torch.float8_e4m3fn"):
        fp8.quantize(q)
    with pytest.raises(ValueError, match="scale is 'e8m0'"):
        fp8.quantize(x, scale="e8m0")
    with pytest.raises(ValueError, match="block is 0"):
        fp8.quantize(x, block=0)
    with pytest.raises(ValueError, match="expected a nonempty matrix"):
        fp8.quantize_weight(x[0])
    with pytest.raises(ValueError, match="scales are torch.float16"):
        fp8.dequantize(q, scales.half())
    with pytest.raises(ValueError, match="were they transposed"):
        fp8.dequantize(q, scales.t())
    with pytest.raises(ValueError, match="values are torch.uint8"):
        fp8.Quantized(values=q.view(torch.uint8), scales=scales, rows=1, block=128)


def test_the_scale_type_travels_with_the_tensor():
    x = drawn((4, 200))
    float32, ue8m0 = fp8.quantize(x), fp8.quantize(x, scale="ue8m0")
    fp8.dequantize(*float32, scale="float32")
    fp8.dequantize(*ue8m0, scale="ue8m0")
    with pytest.raises(ValueError, match="scales are of type 'float32', expected 'ue8m0'"):
        fp8.dequantize(*float32, scale="ue8m0")
    with pytest.raises(ValueError, match="scales are of type 'ue8m0', expected 'float32'"):
        fp8.dequantize(*ue8m0, scale="float32")


def test_a_power_of_two_is_never_too_small():
    """Where ``exp2(ceil(log2(x)))`` in float32 rounds down, values would be cut off at 448."""
    for exponent in range(-20, 60):
        power = np.float32(2.0**exponent)
        for scale in (power, np.nextafter(power, np.float32(np.inf))):
            x = torch.full((1, 8), float(np.float32(scale * 448)))
            _, scales = fp8.quantize(x, scale="ue8m0")
            raw = (x / 448).amax()
            assert scales.float().item() >= raw.item() > scales.float().item() / 2


def transformers_weight(w, *, scale):
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(
        weight_block_size=(128, 128), scale_fmt="ue8m0" if scale == "ue8m0" else "float"
    )
    quantize = integration.Fp8Quantize(SimpleNamespace(quantization_config=config))
    found = quantize.convert({"layer.weight": w})
    return found["layer.weight"], found["layer.weight_scale_inv"]


def test_transformers_weights_with_powers_of_two_are_the_same():
    w = drawn((256, 384)) * torch.exp2(drawn((256, 384), 1))
    q, scales = transformers_weight(w, scale="ue8m0")
    own_q, own_scales = fp8.quantize_weight(w, scale="ue8m0")
    assert torch.equal(scales.float(), own_scales.float())
    assert torch.equal(q.view(torch.uint8), own_q.view(torch.uint8))


def test_transformers_weights_with_float32_scales_differ_in_rounding():
    """It multiplies by 448 / amax and stores the inverse of that: two roundings more."""
    w = drawn((1024, 1024)) * torch.exp2(drawn((1024, 1024), 1))
    q, scales = transformers_weight(w, scale="float32")
    own_q, own_scales = fp8.quantize_weight(w)
    torch.testing.assert_close(scales, own_scales, rtol=2.0**-23, atol=0)
    different = q.view(torch.uint8) != own_q.view(torch.uint8)
    steps = (q.view(torch.uint8).int() - own_q.view(torch.uint8).int()).abs()
    assert different.float().mean() < 1e-5
    assert steps.max() <= 1


def test_nvfp4_is_that_of_numpy():
    cases = [drawn((5, 64)), drawn((5, 64)) * torch.exp2(4 * drawn((5, 64), 1)), torch.zeros(2, 32)]
    cases.append(torch.arange(-64.0, 64.0).view(4, 32) / 8)  # ties
    for x in cases:
        found = fp8.quantize_nvfp4(x)
        values, scales, whole = oracle.nvfp4(x.numpy())
        assert found.packed.shape == (x.shape[0], x.shape[1] // 2)
        np.testing.assert_array_equal(found.scales.float().numpy(), scales)
        assert found.global_scale.item() == whole
        np.testing.assert_array_equal(fp8.dequantize_nvfp4(found).numpy(), values)


def test_fake_quantization_to_nvfp4_has_the_gradient_of_the_identity():
    x = drawn((3, 50)).requires_grad_()
    y = fp8.fake_quantize_nvfp4(x)
    assert torch.equal(y, fp8.dequantize_nvfp4(fp8.quantize_nvfp4(x)))
    assert 0.03 < ((y - x).norm() / x.norm()).item() < 0.15
    y.backward(torch.arange(150.0).view(3, 50))
    assert torch.equal(x.grad, torch.arange(150.0).view(3, 50))
