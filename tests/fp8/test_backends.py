"""What multiplies: which one is taken, what is refused, and how operands are laid out for it."""

import ast
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from primerl import fp8
from primerl.fp8.backends import choice, deep_gemm, scaled_mm
from primerl.fp8.backends.choice import BACKENDS, require_backend
from primerl.fp8.backends.deep_gemm import DeepGEMM
from primerl.fp8.backends.interface import Groups, check_operands, check_signature
from primerl.fp8.backends.layouts import grouped_rows, k_major, outer_major, padded
from primerl.fp8.linear import linear
from primerl.fp8.quantization import activations, values_of, weight

CPU = torch.device("cpu")
PRODUCTS = ("weight", "weight_gradient", "grouped")


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_on_a_cpu_the_reference_multiplies_and_the_log_says_why(caplog):
    choice._first_able.cache_clear()
    with caplog.at_level(logging.INFO):
        assert require_backend("auto", fp8.BLOCK_FP8, CPU).name == "reference"
        require_backend("auto", fp8.BLOCK_FP8, CPU)
    (record,) = caplog.records
    assert "FP8 on cpu, product with a weight: backend reference" in record.message
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
    places, group = grouped_rows(Groups.read(ends, rows=8), multiple=4)
    assert places.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert group.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1]


class PretendDeepGEMM(ModuleType):
    """Computes what DeepGEMM's kernels for SM90 do, on a CPU, and refuses what they refuse."""

    @staticmethod
    def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        recipe = recipe or (1, 128, 128)
        assert disable_ue8m0_cast
        assert d.stride(1) == 1
        assert d.stride(0) * d.itemsize % 16 == 0
        left = a[0].float() * a[1].repeat_interleave(128, 1)
        wide = b[1].repeat_interleave(recipe[1], 0)[: len(b[0])]
        right = b[0].float() * wide.repeat_interleave(128, 1)
        if recipe[1] == 1:  # sm90_fp8_gemm_1d1d
            assert c is not None
            assert c.dtype == d.dtype == torch.float32
            if c.data_ptr() == d.data_ptr():
                assert (c.shape, c.stride()) == (d.shape, d.stride())
            else:
                d.copy_(c)
            assert "k" not in compiled_dims
            d.add_(left @ right.t())
        else:  # sm90_fp8_gemm_1d2d
            assert c is None
            assert d.dtype == torch.bfloat16
            d.copy_(left @ right.t())

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, disable_ue8m0_cast=False):
        assert disable_ue8m0_cast
        assert len(a[0]) % 128 == 0
        assert d.dtype == torch.bfloat16
        assert d.stride(0) * d.itemsize % 16 == 0
        assert grouped_layout.dtype == torch.int32
        left = a[0].float() * a[1].repeat_interleave(128, 1)
        wide = b[1].repeat_interleave(128, 1)[:, : b[0].shape[1]]
        right = b[0].float() * wide.repeat_interleave(128, 2)
        for row, group in enumerate(grouped_layout.tolist()):
            d[row] = left[row] @ right[group].t() if group >= 0 else float("nan")


@pytest.mark.parametrize("width", [200, 203])
def test_deep_gemm_is_called_with_its_layouts(monkeypatch, width):
    monkeypatch.setitem(sys.modules, "deep_gemm", PretendDeepGEMM("deep_gemm"))
    a = activations(drawn((5, 300)), fp8.BLOCK_FP8)
    for dtype in (torch.bfloat16, torch.float32):
        for form in (fp8.BLOCK_FP8, fp8.Format(weight_rows=1)):
            b = weight(drawn((width, 300), 1), form)
            ours = BACKENDS["deep_gemm"].multiply(a, b, dtype=dtype)
            exact = BACKENDS["reference"].multiply(a, b, dtype=dtype)
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)
    # The last one, of a weight gradient in float32, was not rounded to bfloat16 on the way.
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-4)
    b = weight(drawn((3, width, 300), 1), fp8.BLOCK_FP8)
    groups = Groups.read(torch.tensor([2, 2, 5]), rows=5)
    ours = BACKENDS["deep_gemm"].multiply_grouped(a, b, groups, dtype=torch.bfloat16)
    exact = BACKENDS["reference"].multiply_grouped(a, b, groups, dtype=torch.bfloat16)
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)


def installed_parameters(names):
    """Names of the parameters of the first function that the installed deep_gemm has.

    They are read from its source if they are there, since its library may not load. Functions of
    an extension state them in their docstring.
    """
    source = Path(importlib.util.find_spec("deep_gemm").origin).read_text(encoding="utf-8")
    functions = {
        one.name: one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)
    }
    for name in names:
        if name in functions:
            return [one.arg for one in functions[name].args.args]
    try:
        library = importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        pytest.skip(f"deep_gemm does not load: {error}")
    function = next(getattr(library, name) for name in names if hasattr(library, name))
    return re.findall(r"(\w+): ", function.__doc__.splitlines()[0])


@pytest.mark.skipif(
    importlib.util.find_spec("deep_gemm") is None, reason="deep_gemm is not installed"
)
@pytest.mark.parametrize("names", [deep_gemm._PLAIN, deep_gemm._GROUPED], ids=["plain", "grouped"])
def test_the_stand_in_has_the_parameters_of_the_installed_deep_gemm(names):
    pretended = inspect.signature(getattr(PretendDeepGEMM, names[0])).parameters
    by_position = [name for name, one in pretended.items() if one.default is one.empty]
    # Older versions have another name for the layout of groups, which is passed by position.
    found = [name.replace("m_indices", "grouped_layout") for name in installed_parameters(names)]
    assert found[: len(by_position)] == by_position
    assert set(pretended) <= set(found)


WORKING = """
import torch
def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    if recipe is not None:
        raise RuntimeError("Assertion error: no kernel for this recipe")
    left = a[0].float() * a[1].repeat_interleave(128, 1)
    right = b[0].float() * b[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    d.copy_(left @ right.t())
"""
FAULTS = {
    "OSError: _C.so: undefined symbol": "raise OSError('_C.so: undefined symbol')",
    "ImportError: libcudart.so.12": "raise ImportError('libcudart.so.12')",
    "AssertionError: CUDA_HOME": "assert False, 'CUDA_HOME'",
    "RuntimeError: the installed deep_gemm has none of fp8_gemm_nt": "gemm = None",
    "fp8_gemm_nt has no parameter c, recipe": "def fp8_gemm_nt(a, b, out): ...",
    "relative error of nan": WORKING + "    d.fill_(float('nan'))",
    "relative error of 0.9": WORKING + "    d.mul_(0.01)",
}


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Return a function that installs a module ``deep_gemm``, as if there were a GPU for it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # to be removed after the test
    monkeypatch.setattr(DeepGEMM, "refusal", lambda self, form, device: None)
    caches = choice._first_able, choice.reason_against

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
    assert "FP8 on cpu, product with a weight: backend deep_gemm (the first)" in record.message


def test_a_library_is_tried_with_each_kind_of_product(install, caplog):
    """A backend that fails one is not used for it, by name, and still used for the others."""
    install(WORKING)
    with caplog.at_level(logging.WARNING):
        names = [require_backend("auto", fp8.BLOCK_FP8, CPU, one).name for one in PRODUCTS]
    assert names == ["deep_gemm", "reference", "reference"]
    of_gradients, of_groups = (record.message for record in caplog.records)
    assert "a small weight gradient raised RuntimeError: Assertion error" in of_gradients
    assert "a small grouped product raised RuntimeError: the installed deep_gemm" in of_groups
    with pytest.raises(ValueError, match="can't multiply here: a small weight gradient raised"):
        require_backend("deep_gemm", fp8.BLOCK_FP8, CPU, "weight_gradient")
    model = nn.Sequential(nn.Linear(256, 128))
    with pytest.raises(ValueError, match="can't multiply here: a small weight gradient raised"):
        fp8.convert_linears(model, weight_gradient="fp8", backend="deep_gemm")


def test_a_layer_trains_with_a_backend_that_lacks_weight_gradients(install):
    install(WORKING)
    found = []
    for backend in ("auto", "reference"):
        x, w = drawn((40, 256)).requires_grad_(), drawn((128, 256), 1).requires_grad_()
        y = linear(x, w, form=fp8.BLOCK_FP8, weight_gradient="fp8", backend=backend)
        found.append([y.detach(), *torch.autograd.grad(y, (x, w), drawn(y.shape, 2))])
    for ours, exact in zip(*found, strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() < 0.01


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_strict_stand_in_passes_the_trial_of_each_product(install, monkeypatch, product):
    install(WORKING)
    monkeypatch.setitem(sys.modules, "deep_gemm", PretendDeepGEMM("deep_gemm"))
    assert choice.reason_against("deep_gemm", fp8.BLOCK_FP8, CPU, product) is None


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


def skip_unless_used(name, form, device, product):
    """Skip the test of a backend that ``require_backend`` passes over, for its reason."""
    reason = choice.reason_against(name, form, device, product)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def test_the_tests_on_a_gpu_skip_a_library_that_does_not_load(install):
    install(FAULTS["OSError: _C.so: undefined symbol"])
    with pytest.raises(pytest.skip.Exception, match="deep_gemm: a small .* undefined symbol"):
        skip_unless_used("deep_gemm", fp8.BLOCK_FP8, CPU, "weight")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("form", [fp8.BLOCK_FP8, fp8.BLOCK_FP8_UE8M0])
@pytest.mark.parametrize("name", ["torch", "deep_gemm", "flashinfer"])
def test_a_backend_on_a_gpu_is_the_reference(name, form, product, rows):
    device = torch.device("cuda", torch.cuda.current_device())
    skip_unless_used(name, form, device, product)
    a = activations(drawn((rows, 700)).to(device), form)

    def computed(backend, dtype):
        if product == "weight":
            b = weight(drawn((320, 700), 1).to(device), form)
            return BACKENDS[backend].multiply(a, b, dtype=dtype)
        if product == "grouped":
            b = weight(drawn((3, 320, 700), 1).to(device), form)
            ends = torch.tensor([rows // 2, rows // 2, rows], dtype=torch.int32, device=device)
            groups = Groups.read(ends, rows=rows)
            return BACKENDS[backend].multiply_grouped(a, b, groups, dtype=dtype)
        left, right = drawn((256, rows)).to(device), drawn((320, rows), 1).to(device)
        return BACKENDS[backend].multiply(
            activations(left, form), activations(right, form), dtype=dtype
        )

    ours, exact = computed(name, torch.bfloat16), computed("reference", torch.float32)
    # bfloat16's half step, and sums in another order within tensor cores
    assert ((ours.float() - exact).norm() / exact.norm()).item() < 5e-3
