"""What multiplies: which one is taken, what is refused, and how operands are laid out for it."""

import logging
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from primerl import fp8
from primerl.fp8.backends import choice, deep_gemm, scaled_mm
from primerl.fp8.backends.choice import BACKENDS, require_backend
from primerl.fp8.backends.deep_gemm import DeepGEMM
from primerl.fp8.backends.interface import check_operands, check_signature
from primerl.fp8.backends.layouts import grouped_rows, k_major, outer_major, padded
from primerl.fp8.quantization import activations, values_of, weight

CPU = torch.device("cpu")


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_on_a_cpu_the_reference_multiplies_and_the_log_says_why(caplog):
    choice._first_able.cache_clear()
    with caplog.at_level(logging.INFO):
        assert require_backend("auto", fp8.BLOCK_FP8, CPU).name == "reference"
        require_backend("auto", fp8.BLOCK_FP8, CPU)
    (record,) = caplog.records
    assert "FP8 on cpu: backend reference" in record.message
    assert "not torch: it needs a GPU of compute capability 9.0" in record.message


@pytest.mark.parametrize("name", ["torch", "deep_gemm", "flashinfer"])
def test_one_that_cannot_multiply_is_refused(name):
    with pytest.raises(ValueError, match=f"backend '{name}' can't multiply here: .*backend='auto'"):
        require_backend(name, fp8.BLOCK_FP8, CPU)


def test_other_formats_and_names_are_refused():
    with pytest.raises(ValueError, match="it takes float32 scales of 128 entries, not ue8m0 of 32"):
        require_backend("torch", fp8.MXFP8, CPU)
    with pytest.raises(ValueError, match="expected one of auto, deep_gemm, flashinfer, torch, ref"):
        require_backend("cublas", fp8.BLOCK_FP8, CPU)


def test_operands_with_other_scales_are_refused():
    a, b = activations(drawn((4, 256)), fp8.BLOCK_FP8), weight(drawn((8, 256)), fp8.BLOCK_FP8)
    other = weight(drawn((8, 256)), fp8.BLOCK_FP8_UE8M0)
    check_operands(a, b)
    with pytest.raises(
        ValueError, match="scales of type 'float32' and 'ue8m0' can't be multiplied"
    ):
        check_operands(a, other)
    with pytest.raises(
        ValueError, match="scales of type 'float32' and 'ue8m0' can't be multiplied"
    ):
        BACKENDS["reference"].multiply(a, other, dtype=torch.float32)
    with pytest.raises(ValueError, match="last dimensions or blocks differ"):
        check_operands(a, weight(drawn((8, 128)), fp8.BLOCK_FP8))
    with pytest.raises(ValueError, match="last dimensions or blocks differ"):
        check_operands(a, weight(drawn((8, 256)), fp8.Format.of_blocks(64)))


def test_padding_keeps_bits():
    q, _ = fp8.quantize(drawn((5, 130)))
    wide = padded(q, rows=4, columns=128)
    assert wide.shape == (8, 256)
    assert torch.equal(wide[:5, :130].view(torch.uint8), q.view(torch.uint8))
    assert not wide[5:].float().any()
    assert not wide[:, 130:].float().any()
    assert padded(q).data_ptr() == q.data_ptr()


def test_scales_lie_as_cublas_wants_them():
    scales = drawn((6, 5))
    outer = outer_major(scales)
    assert torch.equal(outer, scales)
    assert outer.stride() == (1, 6)
    major = k_major(scales)
    assert major.shape == (8, 6)
    assert major.stride() == (1, 8)
    assert torch.equal(major[:5], scales.t())
    assert (major[5:] == 1).all()


def test_what_scaled_mm_is_given_is_the_operand():
    """Its values, read by the layout that cuBLAS documents, are those of the operand."""
    a = activations(drawn((5, 300)), fp8.BLOCK_FP8)
    values, scales, recipe = scaled_mm.operand(a)
    assert recipe == F.ScalingType.BlockWise1x128
    assert values.shape == (16, 384)
    assert scales.stride() == (1, 16)
    wide = scales.repeat_interleave(128, 1)
    assert torch.equal((values.float() * wide)[:5, :300], values_of(a))
    b = weight(drawn((200, 300), 1), fp8.BLOCK_FP8)
    values, scales, recipe = scaled_mm.operand(b)
    assert recipe == F.ScalingType.BlockWise128x128
    assert values.shape == (208, 384)
    assert scales.shape == (4, 2)  # [k, n], k rounded up
    wide = scales[:3].t().repeat_interleave(128, 0)[:208].repeat_interleave(128, 1)
    assert torch.equal((values.float() * wide)[:200, :300], values_of(b))


def test_torch_has_the_function_that_is_called():
    check_signature(
        F.scaled_mm,
        [
            "mat_a",
            "mat_b",
            "scale_a",
            "scale_recipe_a",
            "scale_b",
            "scale_recipe_b",
            "output_dtype",
        ],
    )


def test_a_function_with_other_parameters_is_refused():
    def product(a, b, out): ...

    with pytest.raises(RuntimeError, match=r"product has no parameter recipe; it has a, b, out"):
        check_signature(product, ["a", "recipe"])
    check_signature(lambda *a, **rest: None, ["recipe"])


def test_groups_are_padded_to_whole_blocks():
    ends = torch.tensor([3, 3, 8])
    places, group = grouped_rows(ends, multiple=4)
    assert places.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert group.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1]


class PretendDeepGEMM(ModuleType):
    """Computes what DeepGEMM documents, on a CPU, from the layouts that it takes."""

    @staticmethod
    def fp8_gemm_nt(a, b, out, *, recipe=(1, 128, 128), disable_ue8m0_cast=False):
        left = a[0].float() * a[1].repeat_interleave(128, 1)
        wide = b[1].repeat_interleave(recipe[1], 0)[: len(b[0])]
        right = b[0].float() * wide.repeat_interleave(128, 1)
        out.copy_(left @ right.t())

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(a, b, out, grouped_layout, *, disable_ue8m0_cast=False):
        assert len(a[0]) % 128 == 0
        left = a[0].float() * a[1].repeat_interleave(128, 1)
        wide = b[1].repeat_interleave(128, 1)[:, : b[0].shape[1]]
        right = b[0].float() * wide.repeat_interleave(128, 2)
        for row, group in enumerate(grouped_layout.tolist()):
            out[row] = left[row] @ right[group].t() if group >= 0 else float("nan")


def test_deep_gemm_is_called_with_its_layouts(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", PretendDeepGEMM("deep_gemm"))
    a = activations(drawn((5, 300)), fp8.BLOCK_FP8)
    for form in (fp8.BLOCK_FP8, fp8.Format(weight_rows=1)):
        b = weight(drawn((200, 300), 1), form)
        ours = BACKENDS["deep_gemm"].multiply(a, b, dtype=torch.bfloat16)
        exact = BACKENDS["reference"].multiply(a, b, dtype=torch.bfloat16)
        torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)
    b = weight(drawn((3, 200, 300), 1), fp8.BLOCK_FP8)
    ends = torch.tensor([2, 2, 5])
    ours = BACKENDS["deep_gemm"].multiply_grouped(a, b, ends, dtype=torch.bfloat16)
    exact = BACKENDS["reference"].multiply_grouped(a, b, ends, dtype=torch.bfloat16)
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)


WORKING = """
import torch
def fp8_gemm_nt(a, b, out, *, recipe=(1, 128, 128), disable_ue8m0_cast=False):
    left = a[0].float() * a[1].repeat_interleave(128, 1)
    right = b[0].float() * b[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    out.copy_(left @ right.t())
"""
FAULTS = {
    "OSError: _C.so: undefined symbol": "raise OSError('_C.so: undefined symbol')",
    "ImportError: libcudart.so.12": "raise ImportError('libcudart.so.12')",
    "AssertionError: CUDA_HOME": "assert False, 'CUDA_HOME'",
    "RuntimeError: the installed deep_gemm has none of fp8_gemm_nt": "gemm = None",
    "fp8_gemm_nt has no parameter recipe": "def fp8_gemm_nt(a, b, out): ...",
    "relative error of nan": WORKING + "    out.fill_(float('nan'))",
    "relative error of 0.99": WORKING + "    out.mul_(0.01)",
}


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Return a function that installs a module ``deep_gemm``, as if there were a GPU for it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # to be removed after the test
    monkeypatch.setattr(DeepGEMM, "refusal", lambda self, form, device: None)
    caches = choice._first_able, choice._reason_against

    def written(text):
        (tmp_path / "deep_gemm.py").write_text(text)
        del sys.modules["deep_gemm"]
        for cache in caches:
            cache.cache_clear()

    yield written
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("reason", FAULTS)
def test_a_library_that_fails_is_named_and_the_next_backend_is_taken(install, caplog, reason):
    install(FAULTS[reason])
    with caplog.at_level(logging.INFO):
        assert require_backend("auto", fp8.BLOCK_FP8, CPU).name == "reference"
    warning, choice_made = (record.message for record in caplog.records)
    assert "FP8 backend deep_gemm is not used on cpu: a small product" in warning
    assert reason in warning
    assert "backend reference (not deep_gemm: a small product" in choice_made
    with pytest.raises(ValueError, match="backend 'deep_gemm' can't multiply here") as caught:
        require_backend("deep_gemm", fp8.BLOCK_FP8, CPU)
    assert reason in str(caught.value)


def test_a_library_that_multiplies_is_taken(install, caplog):
    install(WORKING)
    with caplog.at_level(logging.INFO):
        assert require_backend("auto", fp8.BLOCK_FP8, CPU).name == "deep_gemm"
        assert require_backend("deep_gemm", fp8.BLOCK_FP8, CPU).name == "deep_gemm"
    (record,) = caplog.records
    assert "FP8 on cpu: backend deep_gemm (the first)" in record.message


def test_a_library_is_tried_with_real_tensors_where_others_are_fake(install):
    """As in the engine, when it finds out whether a step can be captured."""
    install(WORKING)
    with FakeTensorMode():
        assert require_backend("auto", fp8.BLOCK_FP8, CPU).name == "deep_gemm"


def test_scales_are_given_to_deep_gemm_without_a_copy():
    a = activations(drawn((8, 300)), fp8.BLOCK_FP8)
    _, scales = deep_gemm._pair(a)
    assert scales.data_ptr() == a.scales.data_ptr()
    assert scales.stride() == (1, 8)
    _, scales = deep_gemm._pair(activations(drawn((5, 300)), fp8.BLOCK_FP8))
    assert scales.is_contiguous()  # 5 floats are no multiple of 16 bytes
    _, scales, _ = scaled_mm.operand(activations(drawn((32, 256)), fp8.BLOCK_FP8))
    assert scales.stride() == (1, 32)


def test_flashinfer_is_called_with_its_layouts(monkeypatch):
    gemm = ModuleType("flashinfer.gemm")

    def gemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, scale_major_mode, scale_granularity_mnk, out_dtype
    ):
        assert scale_major_mode == "K"
        left = a.float() * a_scale.repeat_interleave(128, 1)
        wide = b_scale.repeat_interleave(scale_granularity_mnk[1], 0)
        return (left @ (b.float() * wide.repeat_interleave(128, 1)).t()).to(out_dtype)

    gemm.gemm_fp8_nt_groupwise = gemm_fp8_nt_groupwise
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    a, b = activations(drawn((5, 300)), fp8.BLOCK_FP8), weight(drawn((200, 300), 1), fp8.BLOCK_FP8)
    ours = BACKENDS["flashinfer"].multiply(a, b, dtype=torch.bfloat16)
    exact = BACKENDS["reference"].multiply(a, b, dtype=torch.bfloat16)
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_quantizing_on_a_gpu_gives_the_same_bits(scale):
    x = drawn((300, 700)) * torch.exp2(3 * drawn((300, 700), 1))
    for quantizer in (fp8.quantize, fp8.quantize_weight):
        here, there = quantizer(x, scale=scale), quantizer(x.cuda(), scale=scale)
        assert torch.equal(here[0].view(torch.uint8), there[0].view(torch.uint8).cpu())
        assert torch.equal(here[1].float(), there[1].float().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("form", [fp8.BLOCK_FP8, fp8.BLOCK_FP8_UE8M0])
@pytest.mark.parametrize("name", ["torch", "deep_gemm", "flashinfer"])
def test_a_backend_on_a_gpu_is_the_reference(name, form, rows):
    device = torch.device("cuda", torch.cuda.current_device())
    reason = BACKENDS[name].refusal(form, device)
    if reason is not None:
        pytest.skip(reason)
    a = activations(drawn((rows, 700)).to(device), form)
    for b in (
        weight(drawn((320, 700), 1).to(device), form),
        activations(drawn((320, 700), 1).to(device), form),
    ):
        ours = BACKENDS[name].multiply(a, b, dtype=torch.bfloat16)
        exact = BACKENDS["reference"].multiply(a, b, dtype=torch.float32)
        # bfloat16's half step, and sums in another order within tensor cores
        assert ((ours.float() - exact).norm() / exact.norm()).item() < 5e-3
