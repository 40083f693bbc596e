"""Linear layers and experts in FP8, forward and backward, against float64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from primerl import fp8
from primerl._common.forward_passes import group_ends
from primerl.fp8 import quantization
from primerl.fp8.grouped import has_grouped_gradient
from primerl.fp8.linear import linear
from primerl.fp8.quantization import values_of, weight
from primerl.parallel.expert_parallel.experts import grouped_matmul

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

COSINE = 0.998
"""The least of a layer's outputs and gradients with those in float64; a product's is 0.9993."""
FORMS = {
    "float32": fp8.BLOCK_FP8,
    "ue8m0": fp8.BLOCK_FP8_UE8M0,
    "mxfp8": fp8.MXFP8,
    "blocks of 16": fp8.Format.of_blocks(16),
}


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cosine(a, b):
    return torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gradients(function, *inputs):
    inputs = [one.clone().requires_grad_() for one in inputs]
    out = function(*inputs)
    dy = drawn(out.shape, 99).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, dy)


def rounded(x, rows, block, scale):
    """To FP8 and back, by the public quantizers."""
    q, scales = fp8.quantize_weight(x, block=block, scale=scale, rows=rows)
    return fp8.dequantize(q, scales, block=block)


@pytest.mark.parametrize("weight_gradient", ["bf16", "fp8"])
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_is_close_to_float64(name, weight_gradient):
    form = FORMS[name]
    x, w = drawn((3, 50, 320)), drawn((200, 320), 1)

    def ours(x, w):
        return linear(x, w, form=form, weight_gradient=weight_gradient, backend="reference")

    found = gradients(ours, x, w)
    expected = gradients(lambda x, w: x.double() @ w.double().T, x, w)
    for one, exact in zip(found, expected, strict=True):
        assert cosine(one, exact) > COSINE
    y, dx, dw = (relative(a, b) for a, b in zip(found, expected, strict=True))
    assert 0.02 < y < 0.045  # two operands with a relative error of 0.026 each
    assert 0.02 < dx < 0.045
    assert 0.02 < dw < 0.045 if weight_gradient == "fp8" else dw < 0.004


def test_each_product_is_that_of_its_dequantized_operands():
    """To the rounding of float32: the formula of the module, operand by operand."""
    form = fp8.Format.of_blocks(32)
    x, w, dy = drawn((40, 70)), drawn((50, 70), 1), drawn((40, 50), 99)

    def ours(x, w):
        return linear(x, w, form=form, weight_gradient="fp8", backend="reference")

    y, dx, dw = gradients(ours, x, w)

    def product(a, b):
        return a.double() @ b.double()

    row, square = (1, 32, "float32"), (32, 32, "float32")
    torch.testing.assert_close(
        y.double(), product(rounded(x, *row), rounded(w, *square).T), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        dx.double(), product(rounded(dy, *row), rounded(w, *square)), rtol=1e-5, atol=1e-5
    )
    columns = product(rounded(dy.t(), *row), rounded(x.t(), *row).T)
    torch.testing.assert_close(dw.double(), columns, rtol=1e-5, atol=1e-5)


def test_the_bytes_of_the_weight_are_the_same_in_both_directions():
    w = drawn((200, 320))
    operand = weight(w, fp8.BLOCK_FP8)
    assert torch.equal(values_of(operand).t(), values_of(operand.transposed()))
    other = weight(w.t().contiguous(), fp8.BLOCK_FP8)
    assert torch.equal(values_of(other), values_of(operand.transposed()))
    with pytest.raises(ValueError, match="not square"):
        weight(w, fp8.MXFP8).transposed()


def test_a_layer_takes_over_the_parameters_of_another():
    plain = nn.Linear(96, 40)
    layer = fp8.Fp8Linear(plain, form=fp8.Format.of_blocks(32))
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
    assert "float32 scales of 32, backend=auto" in repr(layer)
    x = drawn((5, 96))
    without = linear(x, plain.weight, form=layer.form, weight_gradient="bf16", backend="reference")
    assert torch.equal(layer(x), without + plain.bias)
    layer(x).sum().backward()
    torch.testing.assert_close(plain.bias.grad, torch.full((40,), 5.0))
    assert plain.weight.grad.dtype == torch.float32


def test_it_computes_in_16_bits_under_autocast():
    layer = fp8.Fp8Linear(nn.Linear(96, 40), form=fp8.Format.of_blocks(32))
    x = drawn((5, 96))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    half = linear(
        x.bfloat16(), layer.weight.bfloat16(), form=layer.form, weight_gradient="bf16",
        backend="reference",
    )  # fmt: skip
    assert torch.equal(y, half + layer.bias.bfloat16())
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_it_computes_in_the_dtype_of_its_input_with_a_bias_in_another():
    layer = fp8.Fp8Linear(nn.Linear(96, 40), form=fp8.Format.of_blocks(32))
    x = drawn((5, 96)).bfloat16().requires_grad_()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_a_frozen_weight_keeps_no_input():
    layer = fp8.Fp8Linear(nn.Linear(96, 40), form=fp8.Format.of_blocks(32))
    layer.weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = layer(drawn((5, 96)).requires_grad_())
    assert kept == [(96, 40), (6,)]  # the transposed weight and its scales
    y.sum().backward()
    assert layer.weight.grad is None


@pytest.fixture
def quantized(monkeypatch):
    """Record the shape of each quantized matrix, and whether it and its transpose were asked."""
    calls = []

    def recorded(x, rows, form, *, straight=True, transposed=False):
        calls.append((tuple(x.shape), straight, transposed))
        return quantization.layouts(x, rows, form, straight=straight, transposed=transposed)

    monkeypatch.setattr("primerl.fp8.linear.layouts", recorded)
    return calls


@pytest.mark.parametrize("weight_gradient", ["bf16", "fp8"])
@pytest.mark.parametrize("form", [fp8.Format.of_blocks(32), fp8.MXFP8], ids=["square", "mxfp8"])
def test_a_weight_is_quantized_once_for_both_passes_unless_it_is_sharded(
    quantized, form, weight_gradient
):
    x, w = drawn((40, 96)), drawn((64, 96), 1)
    product = partial(linear, form=form, weight_gradient=weight_gradient, backend="reference")
    found = []
    for keep in (True, False):
        quantized.clear()
        found.append(gradients(partial(product, keep_weight=keep), x, w))
        own = [call[1:] for call in quantized if call[0] == (64, 96)]
        assert own == ([(True, True)] if keep else [(True, False), (False, True)])
        others = [call[1:] for call in quantized if call[0] != (64, 96)]
        assert others == [(True, weight_gradient == "fp8")] * 2  # x and dy
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


def step_of_a_fused_optimizer(w):
    before = w._version
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.1, fused=True).step()
    if torch.__version__.startswith("2.13"):
        assert w._version == before  # so nothing may be kept by version


def copied(w):
    with torch.no_grad():
        w.copy_(2 * w)


def written_through_data(w):
    w.data.mul_(2)


@pytest.mark.parametrize("change", [step_of_a_fused_optimizer, copied, written_through_data])
def test_no_quantized_weight_outlives_a_change(change):
    layer = fp8.Fp8Linear(nn.Linear(96, 40, bias=False), form=fp8.Format.of_blocks(32))
    x = drawn((5, 96)).requires_grad_()
    layer(x).sum().backward()
    change(layer.weight)
    fresh = nn.Linear(96, 40, bias=False)
    fresh.load_state_dict(layer.state_dict())
    fresh = fp8.Fp8Linear(fresh, form=layer.form)
    (ours,) = torch.autograd.grad(layer(x).square().sum(), x)
    (expected,) = torch.autograd.grad(fresh(x).square().sum(), x)
    assert torch.equal(ours, expected)
    layer.load_state_dict({"weight": drawn((40, 96), 7)})
    fresh.load_state_dict({"weight": drawn((40, 96), 7)})
    assert torch.equal(layer(x), fresh(x))


def test_a_changed_weight_leaves_the_backward_pass_of_an_earlier_product_as_it_was():
    layer = fp8.Fp8Linear(nn.Linear(96, 40, bias=False), form=fp8.Format.of_blocks(32))
    x = drawn((5, 96)).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    y = layer(x)
    copied(layer.weight)
    (ours,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(ours, expected)


def test_a_value_that_is_no_number_reaches_the_loss():
    layer = fp8.Fp8Linear(nn.Linear(96, 40), form=fp8.Format.of_blocks(32))
    for value in (float("nan"), float("inf")):
        x = drawn((5, 96))
        x[2, 40] = value
        assert layer(x)[2].isnan().all()
        assert layer(x)[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("weight_gradient", ["bf16", "fp8"])
@pytest.mark.parametrize("counts", [[40, 0, 60], [0, 0, 0], [3, 5, 1]])
def test_experts_are_layers_of_their_own_rows(counts, weight_gradient):
    form = fp8.Format.of_blocks(32)
    x, w = drawn((sum(counts), 70)), drawn((3, 50, 70), 1)
    ends = torch.tensor(counts).cumsum(0).int()
    matmul = fp8.GroupedMatmul(form=form, weight_gradient=weight_gradient)
    y, dx, dw = gradients(lambda x, w: matmul(x, w.transpose(1, 2), ends), x, w)
    assert y.shape == (sum(counts), 50)
    dy = drawn(y.shape, 99)
    for expert, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        rows = slice(end - count, end)
        mine, own = x[rows].clone().requires_grad_(), w[expert].clone().requires_grad_()
        alone = linear(mine, own, form=form, weight_gradient=weight_gradient, backend="reference")
        alone.backward(dy[rows])
        assert torch.equal(y[rows], alone)
        assert torch.equal(dx[rows], mine.grad)
        assert torch.equal(dw[expert], own.grad)


@pytest.mark.parametrize("form", [fp8.Format.of_blocks(32), fp8.MXFP8], ids=["square", "mxfp8"])
def test_weights_of_experts_are_quantized_once_for_both_passes_unless_they_are_sharded(
    monkeypatch, form
):
    calls = []

    def recorded(x, rows, form, *, straight=True, transposed=False):
        calls.append((straight, transposed))
        return quantization.layouts(x, rows, form, straight=straight, transposed=transposed)

    monkeypatch.setattr("primerl.fp8.grouped.layouts", recorded)
    x, w, ends = drawn((7, 96)), drawn((2, 64, 96), 1), torch.tensor([3, 7])
    matmul = fp8.GroupedMatmul(form=form)
    found = []
    for keep in (True, False):
        calls.clear()
        monkeypatch.setattr("primerl.fp8.grouped.keeps_weights", lambda keep=keep: keep)
        found.append(gradients(lambda x, w: matmul(x, w.transpose(1, 2), ends), x, w))
        assert calls == ([(True, True)] if keep else [(True, False), (False, True)])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("weight_gradient", ["bf16", "fp8"])
def test_the_host_reads_where_the_rows_of_experts_end_once(monkeypatch, weight_gradient):
    """On a GPU, it waits each time."""
    reads = []

    def recorded(ends, rows):
        reads.append(rows)
        return group_ends(ends, rows)

    monkeypatch.setattr("primerl.fp8.backends.interface.group_ends", recorded)
    x, w, ends = drawn((7, 96)), drawn((2, 64, 96), 1), torch.tensor([3, 7])
    matmul = fp8.GroupedMatmul(form=fp8.Format.of_blocks(32), weight_gradient=weight_gradient)
    matmul(x, w.transpose(1, 2), ends)  # tries the backends
    reads.clear()
    gradients(lambda x, w: matmul(x, w.transpose(1, 2), ends), x, w)
    assert reads == [7]


def test_one_grouped_product_computes_the_weight_gradients_of_experts(monkeypatch):
    """As on a GPU; torch has the product on a CPU too."""
    x, w = drawn((9, 72)).bfloat16(), drawn((4, 48, 72), 1).bfloat16()
    ends, matmul = torch.tensor([4, 4, 8, 9]), fp8.GroupedMatmul(form=fp8.Format.of_blocks(16))
    found = []
    for has in (True, False):
        monkeypatch.setattr("primerl.fp8.grouped.has_grouped_gradient", lambda *_, has=has: has)
        found.append(gradients(lambda x, w: matmul(x, w.transpose(1, 2), ends), x, w)[2])
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-6)
    assert not found[0][1].any()  # of an expert without rows


def test_torch_has_no_grouped_product_for_other_weight_gradients():
    dy, x = drawn((9, 48)).bfloat16(), drawn((9, 72)).bfloat16()
    assert not has_grouped_gradient(dy, x, torch.bfloat16)  # on a CPU
    with FakeTensorMode():
        dy, none, narrow, x = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((9, 48), (0, 48), (9, 44), (9, 72))
        )
        assert not has_grouped_gradient(dy, x, torch.float32)
        assert not has_grouped_gradient(none, x, torch.bfloat16)
        assert not has_grouped_gradient(narrow, x, torch.bfloat16)


@pytest.mark.gpu
def test_experts_on_a_gpu_have_one_grouped_product_and_no_wait_in_the_backward_pass():
    counts = torch.tensor([40, 0, 300, 17])
    ends = counts.cumsum(0).int().cuda()
    x = drawn((357, 256)).to("cuda", torch.bfloat16).requires_grad_()
    w = drawn((4, 128, 256), 1).to("cuda", torch.bfloat16).requires_grad_()
    dy = drawn((357, 128), 2).to("cuda", torch.bfloat16)
    matmul = fp8.GroupedMatmul()
    matmul(x, w.transpose(1, 2), ends).backward(dy)  # compiles kernels
    x.grad = w.grad = None
    y = matmul(x, w.transpose(1, 2), ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dx, dw = x.grad.cpu(), w.grad.cpu()
    sizes = counts.tolist()
    parts = [one.detach().cpu().double().split(sizes) for one in (dy, x)]
    products = [of_y.t() @ of_x for of_y, of_x in zip(*parts, strict=True)]
    assert relative(dw, torch.stack(products)) < 0.005
    matrices = w.detach().cpu().double()
    products = [of_y @ one for of_y, one in zip(parts[0], matrices, strict=True)]
    assert cosine(dx, torch.cat(products)) > COSINE


@pytest.mark.filterwarnings("default")  # torch emits warnings while it traces
def test_experts_of_a_compiled_layer_are_those_of_an_eager_one():
    x, w, ends = drawn((7, 70)), drawn((2, 50, 70), 1), torch.tensor([3, 7], dtype=torch.int32)
    matmul = fp8.GroupedMatmul(form=fp8.Format.of_blocks(32))

    def layer(x, w):
        return 3 * matmul(2 * x, w.transpose(1, 2), ends)

    torch.compiler.reset()
    compiled = gradients(torch.compile(layer, backend="aot_eager", dynamic=True), x, w)
    for ours, expected in zip(compiled, gradients(layer, x, w), strict=True):
        assert torch.equal(ours, expected)


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    scale=st.sampled_from(["float32", "ue8m0"]),
    seed=st.integers(0, 2**16),
)
def test_experts_are_close_to_float64(counts, sizes, scale, seed):
    x, w = drawn((sum(counts), sizes[0]), seed), drawn((len(counts), *sizes), seed + 1)
    ends = torch.tensor(counts).cumsum(0).int()
    matmul = fp8.GroupedMatmul(form=fp8.Format.of_blocks(16, scale=scale))
    found = gradients(lambda x, w: matmul(x, w, ends), x, w)
    expected = gradients(lambda x, w: grouped_matmul(x.double(), w.double(), ends), x, w)
    # A factor is off by 1 / 16 of itself at most, or by less than 1 / 900 of the largest.
    largest = x.abs().amax() * w.abs().amax() if x.numel() else torch.tensor(0.0)
    bound = 0.13 * grouped_matmul(x.abs().double(), w.abs().double(), ends)
    bound = bound + largest * sizes[0] / 400 + 1e-6
    assert ((found[0] - expected[0]).abs() <= bound).all()
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == exact.shape
        assert one.isfinite().all()


@pytest.mark.parametrize("ends", [[3, 1, 5], [1, 1, 4], [1, 5, 6]])
def test_groups_that_overlap_or_leave_rows_over_are_refused(ends):
    matmul = fp8.GroupedMatmul(form=fp8.Format.of_blocks(16))
    with pytest.raises(ValueError, match=r"groups end at .*, of which the last is 5"):
        matmul(drawn((5, 32)), drawn((3, 32, 20), 1), torch.tensor(ends))


def test_an_unknown_weight_gradient_is_refused():
    with pytest.raises(ValueError, match='weight_gradient is \'fp32\'; expected "bf16" or "fp8"'):
        fp8.GroupedMatmul(weight_gradient="fp32")
