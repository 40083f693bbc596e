"""Run by tests/fp8/test_kernels.py: Triton's kernel of quantization, interpreted or compiled."""

import os

import pytest
import torch
from fp8_inputs import drawn, inputs
from hopper import compile_for_hopper

from primerl.fp8 import quantization_triton as kernels
from primerl.fp8.format import FP8
from primerl.fp8.quantization import _empty_results, operand, quantize_blocks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
INPUTS = inputs()


def check(x, *, rows, block, scale, straight=True, transposed=True):
    """Each layout, from one call of the kernel, has the bits of the reference."""
    results = _empty_results(x, rows, block, scale, straight, transposed)
    pairs = results[:2] if straight else None, results[2:] if transposed else None
    kernels.quantize_into(x, *pairs, rows=rows, block=block)
    for matrix, pair in zip((x, x.transpose(-1, -2)), pairs, strict=True):
        if pair is None:
            continue
        found = operand(*pair, rows=rows, block=block)
        exact = quantize_blocks(matrix, rows=rows, block=block, scale=scale)
        assert torch.equal(found.values.view(torch.uint8), exact.values.view(torch.uint8))
        assert found.scales.dtype == exact.scales.dtype
        assert torch.equal(
            found.scales.float().nan_to_num(nan=-1), exact.scales.float().nan_to_num(nan=-1)
        )


@interpreted
@pytest.mark.parametrize("name", INPUTS)
def test_bits_are_those_of_the_reference(name):
    check(INPUTS[name], rows=1, block=128, scale="float32")
    check(INPUTS[name], rows=128, block=128, scale="ue8m0")
    check(INPUTS[name][:, 100:150], rows=1, block=32, scale="ue8m0")
    check(INPUTS[name][:, 100:150], rows=64, block=64, scale="float32")


@interpreted
def test_every_value_and_every_boundary_between_two_is_cast_as_torch_casts():
    """With a 448 in each row, the scale is 1, so that quantization is the cast."""
    values = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    nearby = [points, points.nextafter(torch.tensor(-1.0)), points.nextafter(torch.tensor(999.0))]
    flat = torch.cat([*nearby, *(-one for one in nearby)]).clamp(-448, 448)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % 127)).view(-1, 127)
    x = torch.cat([torch.full((len(rows), 1), 448.0), rows], 1)
    results = _empty_results(x, 1, 128, "float32", True, False)
    kernels.quantize_into(x, results[:2], None, rows=1, block=128)
    assert (results[1] == 1).all()
    assert torch.equal(results[0].view(torch.uint8), x.to(FP8).view(torch.uint8))


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_infinities_and_nans_spread_as_in_the_reference(value):
    x = drawn((7, 40))
    x[3, 20], x[2, 2] = value, -0.0
    for scale in ("float32", "ue8m0"):
        check(x, rows=1, block=32, scale=scale)
        check(x, rows=32, block=32, scale=scale)


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_ragged_shapes_strides_experts_and_single_layouts(seed):
    generator = torch.Generator().manual_seed(seed)
    height, width, exponent = (
        int(torch.randint(*ends, (1,), generator=generator))
        for ends in ((1, 50), (1, 50), (-40, 99))
    )
    block = (16, 32, 64, 128)[seed % 4]
    scale = ("float32", "ue8m0")[seed // 2]
    x = drawn((2, height, width), seed) * 2.0**exponent
    check(x, rows=block, block=block, scale=scale)
    check(x.transpose(1, 2), rows=block, block=block, scale=scale, straight=False)
    check(x[0], rows=1, block=block, scale=scale, transposed=False)
    check(x[1].t(), rows=1, block=block, scale=scale, straight=False)
    check(x[0, :1].expand(5, -1), rows=1, block=block, scale=scale)


TYPES = dict.fromkeys(("m", "k", "expert_stride", "row_stride"), "i32")
TYPES |= dict.fromkeys(("values", "transposed_values"), "*u8")
LAYOUTS = {
    "activations": (False, True, False),
    "activations in both layouts": (False, True, True),
    "weights in both layouts": (True, True, True),
    "transposed weights": (True, False, True),
}


@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("kind", ["*bf16 to float32 scales", "*fp32 to powers of two"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_compiles_for_hopper_without_spills(name, kind):
    square, straight, transposed = LAYOUTS[name]
    dtype, powers = kind.split()[0], "powers" in kind
    rows, warps = kernels.tile(128 if square else 1, 128, transposed=transposed)
    scales = dict.fromkeys(("scales", "transposed_scales"), "*u8" if powers else "*fp32")
    constants = {
        "column_stride": 1,
        "ROWS": rows,
        "BLOCK": 128,
        "SQUARE": square,
        "STRAIGHT": straight,
        "TRANSPOSED": transposed,
        "POWERS": powers,
    }
    found = compile_for_hopper(
        kernels._quantize, TYPES | scales | {"x": dtype}, constants, warps=warps
    )
    print(name, kind, found.shared, found.registers)
    assert found.stack == 0
    assert found.shared <= 32 * 2**10  # with Triton 3.6; 16 KiB with 3.9
    assert 32 * warps * found.registers <= 65536
    # All values are read and written 16 bytes at a time.
    assert found.ptx.count("ld.global") == found.ptx.count("ld.global.v4")
    assert found.ptx.count("st.global.v4") == (straight + transposed) * rows * 128 // (
        16 * 32 * warps
    )
