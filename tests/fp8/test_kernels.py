"""Triton's quantization kernel, in a pytest without runtime type checks; its operator."""

import os
import subprocess
import sys

import pytest
import torch
from fp8_inputs import drawn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_programs import run_program

from primerl import fp8
from primerl.attention import latent
from primerl.fp8 import linear as fp8_linear
from primerl.fp8 import quantization
from primerl.fp8.quantization import (
    _layouts,
    layouts,
    operand,
    quantize_blocks,
    reason_against_triton,
)

PROGRAM = "fp8_kernels.py"


def test_the_interpreted_kernel_gives_the_bits_of_the_reference():
    assert "23 passed, 8 skipped" in run_program(PROGRAM, TRITON_INTERPRET="1")


@pytest.mark.thorough
def test_the_kernel_compiles_for_hopper_without_spills(tmp_path):
    assert "8 passed, 23 skipped" in run_program(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))


def test_tensors_for_the_kernel_and_for_the_reference():
    pytest.importorskip("triton")
    assert "Nvidia" in reason_against_triton(drawn((4, 128)), 128)
    with FakeTensorMode():
        x, none = torch.empty(4, 128, device="cuda"), torch.empty(0, 128, device="cuda")
    assert "not 48" in reason_against_triton(x, 48)
    assert "empty" in reason_against_triton(none, 128)


class OnAGPU(torch.Tensor):
    """A tensor that seems to be on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 7)


CHECKS = {
    "FP8 quantization": (
        quantization,
        lambda: reason_against_triton(torch.ones(4, 128).as_subclass(OnAGPU), 128),
    ),
    "Attention to chosen latents": (
        latent,
        lambda: latent.reason_against_triton(
            torch.ones(1, 16, 80, dtype=torch.bfloat16).as_subclass(OnAGPU), 64
        ),
    ),
}


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, "cc"),
        RuntimeError("no C compiler"),
        ModuleNotFoundError("No module named 'triton'"),
    ],
)
@pytest.mark.parametrize("what", CHECKS)
def test_triton_that_can_not_run_is_named_once_and_not_used(monkeypatch, caplog, what, error):
    """As on a machine that cannot compile what starts a kernel."""

    def fails(device):
        raise error

    module, reason_against = CHECKS[what]
    monkeypatch.setattr(module, "_run_once", fails)
    module._failure_of_triton.cache_clear()
    try:
        reasons = [reason_against() for _ in range(2)]
    finally:
        module._failure_of_triton.cache_clear()
    assert reasons == [f"Triton can't run on cuda:7: {error}"] * 2
    (record,) = caplog.records
    assert record.message.startswith(what)
    assert record.message.endswith(f"more slowly. {reasons[0]}")


@pytest.mark.parametrize("module", ["primerl.fp8.quantization", "primerl.attention.latent"])
def test_kernels_run_once(module):
    pytest.importorskip("triton")
    code = f"import torch\nfrom {module} import _run_once\n_run_once(torch.device('cpu'))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


@pytest.mark.parametrize("rows", [1, 16])
def test_operators_follow_the_rules_of_torch(rows):
    torch.library.opcheck(_layouts, (drawn((40, 24)), rows, 16, "float32", rows == 16, True))
    form = fp8.Format(block=16, weight_rows=rows)
    a, b = layouts(drawn((5, 24)), 1, form), layouts(drawn((40, 24)), rows, form)
    arguments = (*a[:2], *b[:2], rows, 16, rows, "reference", torch.float32)
    # "test_schema" compares arguments before and after, which torch can't in FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(fp8_linear._multiply, arguments, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_on_a_gpu_the_kernel_gives_the_bits_of_the_reference(scale, dtype):
    x = (drawn((2, 300, 712)) * torch.exp2(3 * drawn((2, 300, 712), 1))).to("cuda", dtype)
    for block in (32, 128):
        form = fp8.Format.of_blocks(block, scale=scale)
        for rows, matrix in ((1, x[0]), (block, x), (1, x[1].t()), (1, x[0, :1].expand(64, -1))):
            assert reason_against_triton(matrix, block) is None
            found = layouts(matrix, rows, form, transposed=True)
            for one, pair in ((matrix, found[:2]), (matrix.transpose(-1, -2), found[2:])):
                ours = operand(*pair, rows=rows, block=block)
                exact = quantize_blocks(one, rows=rows, block=block, scale=scale)
                assert torch.equal(ours.values.view(torch.uint8), exact.values.view(torch.uint8))
                assert torch.equal(ours.scales.float(), exact.scales.float())
