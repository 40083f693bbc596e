"""vLLM's own quantizers, in a process of their own, against primerl's."""

import os
import subprocess
import sys

import interpreted_triton
import pytest
import torch

from primerl import fp8

SCALES = ["float32", "ue8m0"]
FLOOR = 1 / (448 * 512)
"""Below this, vLLM's plain-torch quantizer stops its scales; its kernels stop amax at 1e-10."""


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(2 * torch.randn(shape, generator=generator))


INPUTS = {
    "float32": drawn((24, 512)),
    "bfloat16": drawn((24, 512), 1).bfloat16(),
    "tiny": 1e-9 * drawn((4, 256), 2),
    "ragged": drawn((24, 300), 3),
}


@pytest.fixture(scope="module")
def vllms(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantizers")
    interpreted_triton.write_entry_point(folder)
    torch.save(INPUTS, folder / "inputs")
    program = root / "tests/helpers/vllm_quantizers.py"
    path = [str(folder), str(program.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1"}
    environment["TORCH_COMPILE_DISABLE"] = "1"  # which fails where torch's path has a space
    subprocess.run(
        [sys.executable, program, folder / "inputs", folder / "found"],
        env=environment,
        check=True,
        timeout=300,
    )
    return torch.load(folder / "found")


def bits(q):
    return q.view(torch.uint8)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "ragged"])
def test_activations_are_those_of_its_plain_quantizer(vllms, name, scale):
    q, scales = vllms["plain", scale, name]
    own_q, own_scales = fp8.quantize(INPUTS[name], scale=scale)
    assert scales.min() > FLOOR
    assert torch.equal(bits(q), bits(own_q))
    assert torch.equal(scales, own_scales.float())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["float32", "tiny"])
def test_scales_are_those_of_its_kernel_but_for_rounding(vllms, name, scale):
    """The Triton kernel multiplies amax by 1 / 448 in float32, which may be the neighbour.

    Of its values, Triton's interpreter gets some wrong: its cast to FP8 loses a carry from the
    mantissa, so that codes are a power of two apart.
    """
    q, scales = vllms["kernel", scale, name]
    own_q, own_scales = fp8.quantize(INPUTS[name], scale=scale)
    if scale == "ue8m0":
        assert torch.equal(scales, own_scales.float())
    else:
        torch.testing.assert_close(scales, own_scales, rtol=2.0**-23, atol=0)
    steps = (bits(q).int() - bits(own_q).int()).abs()
    assert set(steps.unique().tolist()) <= {0, 1, 2, 4, 8}
    assert (steps > 0).float().mean() < 0.05


@pytest.mark.parametrize("scale", SCALES)
def test_weights_are_those_of_its_quantizer_but_for_rounding(vllms, scale):
    """It multiplies by 1 / scale: with powers of two that is exact, else it rounds once more."""
    q, scales = vllms["weight", scale]
    own_q, own_scales = fp8.quantize_weight(INPUTS["float32"], scale=scale)
    assert torch.equal(scales, own_scales.float())
    steps = (bits(q).int() - bits(own_q).int()).abs()
    if scale == "ue8m0":
        assert steps.max() == 0
    else:
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 1e-3
