"""Logprobs from hidden states, against logprobs from materialized logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from primerl import loss
from primerl.loss import linear_head, linear_head_tiles

F64 = {"dtype": torch.float64}


@pytest.fixture
def small_tiles(monkeypatch):
    """Blocks of 128 columns, so that a small vocabulary spans several."""
    monkeypatch.setattr(linear_head_tiles, "CPU_TILE", 1)


def naive(hidden, weight, labels, temperature=1.0):
    wide = torch.promote_types(hidden.dtype, torch.float32)
    divisor = temperature.unsqueeze(1) if torch.is_tensor(temperature) else temperature
    log_p = ((hidden @ weight.T).to(wide) / divisor).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def problem(t, v, h, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, **F64)

    hidden, weight = random(t, h).to(dtype), (random(v, h)).to(dtype)
    labels = torch.randint(0, v, (t,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradients(outputs, inputs, *, seed=0, retain_graph=False):
    """Gradients of a random combination of logprobs and entropies."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(
        (x * torch.randn(x.shape, generator=generator, **F64).to(x.dtype)).sum() for x in outputs
    )
    return torch.autograd.grad(total, inputs, retain_graph=retain_graph)


def test_two_rows_by_hand():
    """One hidden unit and three tokens: logits 0, log 2, log 5 in row 0 and their doubles in 1."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], **F64).requires_grad_()
    hidden = torch.tensor([[1.0], [2.0]], **F64).requires_grad_()

    logprobs, entropy = loss.linear_logprobs(hidden, weight, torch.tensor([2, 1]))
    logprobs.sum().backward()

    p, q = torch.tensor([1.0, 2, 5], **F64) / 8, torch.tensor([1.0, 4, 25], **F64) / 30
    torch.testing.assert_close(logprobs, torch.stack([p[2].log(), q[1].log()]))
    torch.testing.assert_close(entropy, torch.stack([-(p * p.log()).sum(), -(q * q.log()).sum()]))
    of_logits = torch.stack([torch.tensor([0, 0, 1.0]) - p, torch.tensor([0, 1.0, 0]) - q])
    torch.testing.assert_close(weight.grad[:, 0], of_logits[0] + 2 * of_logits[1])
    torch.testing.assert_close(hidden.grad, of_logits @ weight.detach())


def test_of_a_uniform_row_the_entropy_is_the_log_of_the_vocabulary_and_its_gradient_nothing():
    hidden = torch.zeros(2, 3, **F64).requires_grad_()
    weight = torch.randn(1000, 3, **F64)

    logprobs, entropy = loss.linear_logprobs(hidden, weight, torch.tensor([0, 999]))
    (of_entropy,) = torch.autograd.grad(entropy.sum(), hidden)

    torch.testing.assert_close(entropy, torch.full((2,), math.log(1000), **F64))
    torch.testing.assert_close(logprobs, -entropy)
    torch.testing.assert_close(of_entropy, torch.zeros(2, 3, **F64))


@settings(max_examples=60, deadline=None)
@given(
    t=st.integers(1, 40),
    v=st.integers(1, 400),
    h=st.integers(1, 9),
    chunk_tokens=st.integers(1, 50),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    temperature=st.sampled_from([1.0, 1, 0.6, "0-dim", "each row"]),
    share=st.sampled_from([None, 0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_as_with_logits(t, v, h, chunk_tokens, dtype, temperature, share, seed):
    hidden, weight, labels = problem(t, v, h, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(temperature, str):
        temperature = 0.5 + torch.rand([] if temperature == "0-dim" else [t], generator=generator)
    rows = None if share is None else torch.rand(t, generator=generator) < share
    tile, linear_head_tiles.CPU_TILE = linear_head_tiles.CPU_TILE, 1
    try:
        ours = loss.linear_logprobs(
            hidden, weight, labels, temperature=temperature, rows=rows, chunk_tokens=chunk_tokens
        )
        of_ours = gradients(ours, (hidden, weight))
    finally:
        linear_head_tiles.CPU_TILE = tile

    each = torch.as_tensor(temperature, dtype=dtype).expand(t)
    theirs = naive(hidden, weight, labels, each)
    if rows is not None:
        theirs = [x.where(rows, 0.0) for x in theirs]
    tolerance = {"atol": 1e-11, "rtol": 1e-11} if dtype == torch.float64 else {}
    if dtype == torch.float32:
        tolerance = {"atol": 2e-5, "rtol": 1e-4}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, other, **tolerance)
    for mine, other in zip(of_ours, gradients(theirs, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradcheck_of_both_outputs(small_tiles, chunk_tokens):
    hidden, weight, labels = problem(5, 140, 2)
    rows = torch.tensor([True, False, True, True, True])
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.0], **F64)

    def outputs(hidden, weight):
        return loss.linear_logprobs(
            hidden, weight, labels, temperature=temperature, rows=rows, chunk_tokens=chunk_tokens
        )

    assert torch.autograd.gradcheck(outputs, (hidden, weight))
    for one in range(2):
        assert torch.autograd.gradcheck(lambda *x, one=one: outputs(*x)[one], (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [4, 4096])
def test_half_precision_is_no_worse_than_with_logits(small_tiles, dtype, chunk_tokens):
    """Errors against float64, of the values and of both gradients."""
    hidden, weight, labels = problem(256, 3000, 64, dtype=dtype)
    with torch.no_grad():
        weight.mul_(0.3)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]

    def everything(function, inputs):
        outputs = function(*inputs, labels)
        return [*outputs, *gradients(outputs, inputs)]

    def ours(*arguments):
        return loss.linear_logprobs(*arguments, chunk_tokens=chunk_tokens)

    truth = everything(naive, exact)
    mine, theirs = (everything(f, (hidden, weight)) for f in (ours, naive))
    assert [x.dtype for x in mine] == [torch.float32, torch.float32, dtype, dtype]
    for x, y, true in zip(mine, theirs, truth, strict=True):
        assert (x - true).norm() < 1.1 * (y - true).norm()


def test_only_selected_rows_reach_the_head():
    """NaN hidden states, invalid labels and NaN gradients in other rows have no effect."""
    hidden, weight, labels = problem(4, 50, 3)
    rows = torch.tensor([False, True, False, True])
    clean = loss.linear_logprobs(hidden, weight, labels, rows=rows)
    of_clean = gradients(clean, (hidden, weight))
    with torch.no_grad():
        hidden[~rows] = math.nan
    labels[~rows] = torch.tensor([-100, 10**9])

    logprobs, entropy = loss.linear_logprobs(hidden, weight, labels, rows=rows)
    of_dirty = gradients((logprobs, entropy), (hidden, weight), retain_graph=True)
    poisoned = torch.where(rows, 1.0, math.nan)
    of_poisoned = torch.autograd.grad((logprobs * poisoned).sum(), (hidden, weight))

    torch.testing.assert_close([logprobs, entropy], list(clean))
    assert logprobs[~rows].tolist() == entropy[~rows].tolist() == [0.0, 0.0]
    torch.testing.assert_close(of_dirty, of_clean)
    assert not of_dirty[0][~rows].any()
    assert all(x.isfinite().all() for x in of_poisoned)


def test_nothing_selected_gives_zeros_with_a_graph():
    hidden, weight, labels = problem(3, 20, 4)

    logprobs, entropy = loss.linear_logprobs(
        hidden, weight, labels, rows=torch.zeros(3, dtype=torch.bool)
    )
    (logprobs.sum() + entropy.sum()).backward()

    assert logprobs.tolist() == entropy.tolist() == [0.0] * 3
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden))
    torch.testing.assert_close(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(wanted):
    hidden, weight, labels = problem(3, 20, 4)
    both = gradients(loss.linear_logprobs(hidden, weight, labels), (hidden, weight))
    frozen = weight if wanted == "hidden" else hidden
    frozen.requires_grad_(False)

    outputs = loss.linear_logprobs(hidden, weight, labels)
    sum(outputs).sum().backward(retain_graph=True)

    assert frozen.grad is None
    (only,) = gradients(outputs, [hidden if wanted == "hidden" else weight])
    torch.testing.assert_close(only, both[wanted == "weight"])


def test_without_gradients_there_is_no_graph():
    hidden, weight, labels = problem(3, 20, 4)

    with torch.no_grad():
        logprobs, _ = loss.linear_logprobs(hidden, weight, labels)

    assert not logprobs.requires_grad


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e35])
def test_huge_logits_give_no_nan(small_tiles, scale):
    """Half of them below the range of exp in every block; the highest in the last block."""
    hidden, weight, labels = problem(6, 300, 4, dtype=torch.float32)
    with torch.no_grad():
        weight.mul_(scale)
        weight[-1] = 2 * scale * hidden[0]

    ours = loss.linear_logprobs(hidden, weight, labels)

    theirs = naive(hidden.double(), weight.double(), labels)
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-4, atol=1e-2)
    assert all(x.isfinite().all() for x in gradients(ours, (hidden, weight)))


def test_logits_that_overflow_to_minus_infinity_have_no_mass(small_tiles):
    hidden = torch.ones(2, 2, dtype=torch.float32, requires_grad=True)
    weight = torch.zeros(300, 2)
    weight[:200] = -3e38  # the whole first block, and the sum of two is beyond float32
    weight.requires_grad_()

    logprobs, entropy = loss.linear_logprobs(hidden, weight, torch.tensor([200, 299]))
    gradient_of_weight = gradients((logprobs, entropy), (hidden, weight))[1]

    torch.testing.assert_close(logprobs, torch.full((2,), -math.log(100)))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(100)))
    assert not gradient_of_weight[:200].any()
    assert gradient_of_weight.isfinite().all()


def test_autocast_computes_the_product_as_it_would_that_of_a_linear_layer():
    hidden, weight, labels = problem(20, 300, 16, dtype=torch.float32)
    half = naive(hidden.bfloat16(), weight.bfloat16(), labels)

    with torch.autocast("cpu", torch.bfloat16):
        ours = loss.linear_logprobs(hidden, weight, labels)
        unchanged = loss.linear_logprobs(hidden.double(), weight.double(), labels)

    torch.testing.assert_close(ours, half, atol=1e-5, rtol=1e-5)
    assert {x.dtype for x in ours} == {torch.float32}
    torch.testing.assert_close(unchanged, naive(hidden.double(), weight.double(), labels))
    assert [x.dtype for x in gradients(ours, (hidden, weight))] == [torch.float32] * 2


def test_no_more_than_a_tile_of_logits_is_materialized():
    hidden, weight, labels = problem(512, 9000, 8, dtype=torch.bfloat16)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            sizes.extend(x.numel() for x in leaves if isinstance(x, torch.Tensor))
            return out

    with Sizes():
        sum(loss.linear_logprobs(hidden, weight, labels, chunk_tokens=128)).sum().backward()

    assert max(sizes) <= linear_head_tiles.CPU_TILE < 512 * 9000


def test_at_most_chunk_tokens_rows_are_computed_at_once(small_tiles, monkeypatch):
    hidden, weight, labels = problem(50, 300, 4)
    shapes, matmul = [], linear_head_tiles.matmul

    def recorded(a, b, dtype):
        shapes.append((len(a), b.shape[1]))
        return matmul(a, b, dtype)

    monkeypatch.setattr(linear_head_tiles, "matmul", recorded)
    loss.linear_logprobs(hidden, weight, labels, chunk_tokens=16)

    assert sorted(set(shapes)) == [(2, 44), (2, 128), (16, 44), (16, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_product_replaces_what_memory_held(dtype):
    total = torch.full((4, 4), math.nan)
    a, b = torch.full((4, 2), 3.0, dtype=dtype), torch.full((2, 4), 5.0, dtype=dtype)

    linear_head_tiles.add_product(total, a, b, first=True)
    linear_head_tiles.add_product(total, a, b, first=False)

    assert total.tolist() == [[60.0] * 4] * 4


def test_a_plan_on_tensors_without_values_changes_no_later_product():
    hidden, weight, labels = problem(4, 50, 3, dtype=torch.bfloat16)
    expected = loss.linear_logprobs(hidden, weight, labels)
    linear_head_tiles._device_widens.cache_clear()

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        planned = linear_head.head_logprobs(
            *(mode.from_tensor(x) for x in (hidden, weight, labels)), 1.0, None
        )

    assert [x.shape for x in planned] == [x.shape for x in expected]
    torch.testing.assert_close(loss.linear_logprobs(hidden, weight, labels), expected)


def test_why_no_triton_kernel_is_used():
    assert "not on cpu" in linear_head_tiles.reason_against_triton(torch.zeros(1, 1))
    with FakeTensorMode():
        on_gpu = torch.zeros(1, 1, device="cuda")
        assert "no values" in linear_head_tiles.reason_against_triton(on_gpu)
        assert "float64" in linear_head_tiles.reason_against_triton(on_gpu.double())


def test_triton_that_can_not_run_is_named_once(monkeypatch, caplog):
    """As on a machine that cannot compile what starts a kernel; here there is no GPU at all."""
    pytest.importorskip("triton")
    from primerl.loss import linear_head_triton

    def fails(device):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(linear_head_triton, "run_once", fails)
    linear_head_tiles._failure_of_triton.cache_clear()
    try:
        for _ in range(2):
            reason = linear_head_tiles._failure_of_triton(torch.device("cuda", 7))
    finally:
        linear_head_tiles._failure_of_triton.cache_clear()

    assert reason == "Triton can't run on cuda:7: no C compiler"
    assert [record.message for record in caplog.records] == [
        f"The LM head runs without its fused kernels, more slowly. {reason}"
    ]


HIDDEN, WEIGHT, LABELS = torch.zeros(4, 3), torch.zeros(9, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((HIDDEN[0], WEIGHT, LABELS), {}, r"hidden has shape \(3,\)"),
        (
            (HIDDEN, WEIGHT.int(), LABELS),
            {},
            "weight has dtype torch.int32, expected a floating-point",
        ),
        (
            (HIDDEN.long(), WEIGHT, LABELS),
            {},
            "hidden has dtype torch.int64, expected a floating-point",
        ),
        ((HIDDEN, WEIGHT.T, LABELS), {}, r"weight has shape \(3, 9\), but hidden .* the same h"),
        ((HIDDEN.double(), WEIGHT, LABELS), {}, "float64, but weight torch.float32"),
        (
            (HIDDEN, WEIGHT, LABELS[:3]),
            {},
            r"labels has shape \(3,\), but hidden has",
        ),
        ((HIDDEN, WEIGHT, LABELS.float()), {}, "labels has dtype torch.float32"),
        ((HIDDEN, WEIGHT, LABELS.bool()), {}, "labels has dtype torch.bool"),
        ((HIDDEN, WEIGHT, LABELS + 9), {}, r"labels\[0\] is 9, outside the vocabulary of 9"),
        ((HIDDEN, WEIGHT, LABELS - 1), {}, r"labels\[0\] is -1, outside"),
        ((HIDDEN, WEIGHT, LABELS), {"rows": LABELS[:2] > 0}, r"rows has shape \(2,\), but hidden"),
        ((HIDDEN, WEIGHT, LABELS), {"rows": LABELS}, "rows has dtype torch.int64"),
        ((HIDDEN, WEIGHT, LABELS), {"temperature": HIDDEN}, r"temperature has shape \(4, 3\)"),
        ((HIDDEN, WEIGHT, LABELS), {"temperature": 0.0}, "temperature is 0.0"),
        ((HIDDEN, WEIGHT, LABELS), {"temperature": math.inf}, "temperature is inf"),
        (
            (HIDDEN, WEIGHT, LABELS),
            {"temperature": torch.tensor([1, 1, -2.0, 1])},
            "temperature is -2.0",
        ),
        ((HIDDEN, WEIGHT, LABELS), {"chunk_tokens": 0}, "chunk_tokens is 0; expected 1 or more"),
    ],
)
def test_errors_of_linear_logprobs(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        loss.linear_logprobs(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((WEIGHT[0], LABELS), {}, r"logits has shape \(3,\)"),
        ((HIDDEN.long(), LABELS), {}, "logits has dtype torch.int64"),
        ((HIDDEN, LABELS[:3]), {}, r"labels has shape \(3,\), but logits has .* the same t"),
        ((HIDDEN, LABELS + 3), {}, r"labels\[0\] is 3, outside the vocabulary of 3"),
        ((HIDDEN, LABELS), {"temperature": torch.ones(3)}, r"temperature has shape \(3,\)"),
        ((HIDDEN, LABELS), {"temperature": math.nan}, "temperature is nan"),
    ],
)
def test_errors_of_token_logprobs(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        loss.token_logprobs(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_as_on_the_cpu(dtype):
    hidden, weight, labels = problem(300, 70_000, 64, dtype=dtype)
    rows = torch.arange(300) % 3 > 0
    on_gpu = [x.detach().cuda() for x in (hidden, weight)]
    for x in on_gpu:
        x.requires_grad_()

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = loss.linear_logprobs(*exact, labels, rows=rows)
    ours = loss.linear_logprobs(*on_gpu, labels.cuda(), rows=rows.cuda(), chunk_tokens=128)

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.cpu().double(), other, atol=10 * tolerance, rtol=tolerance)
    mine = torch.autograd.grad(sum(ours).sum(), on_gpu)
    other = torch.autograd.grad(sum(truth).sum(), exact)
    for x, y in zip(mine, other, strict=True):
        assert (x.cpu().double() - y).norm() < 2 * tolerance * y.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_on_a_gpu_are_no_worse_than_logits(monkeypatch, dtype, wanted):
    """Errors against float64, over two chunks of rows and four blocks, the last one ragged."""
    monkeypatch.setattr(linear_head_tiles, "TILE", 2**24)
    hidden, weight, labels = (x.cuda() for x in problem(700, 110_003, 64, dtype=dtype))
    weight = (0.3 * weight).detach()
    temperature = 0.5 + torch.rand(700, generator=torch.Generator().manual_seed(1)).cuda()
    assert linear_head_tiles.reason_against_triton(hidden.float()) is None

    def everything(function, hidden, weight):
        inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        outputs = function(*inputs, labels, temperature=temperature)
        chosen = {"logprobs": outputs[:1], "entropy": outputs[1:], "both": outputs}[wanted]
        total = sum((x * torch.linspace(-1, 1, len(x)).to(x)).sum() for x in chosen)
        return [*outputs, *torch.autograd.grad(total, inputs)]

    def ours(*arguments, **options):
        return loss.linear_logprobs(*arguments, chunk_tokens=512, **options)

    truth = everything(naive, hidden.double(), weight.double())
    for x, y, true in zip(
        everything(ours, hidden, weight), everything(naive, hidden, weight), truth, strict=True
    ):
        assert (x - true).norm() < 1.1 * (y - true).norm() + 3e-6 * true.norm()


@pytest.mark.gpu
def test_huge_and_missing_logits_on_a_gpu():
    hidden = torch.full((3, 2), 1e4, device="cuda", requires_grad=True)
    weight = torch.randn(70_000, 2, device="cuda")
    weight[:40_000] = -3e38  # logits of -inf
    weight[-1] = 2e4
    weight.requires_grad_()
    labels = torch.tensor([69_999, 69_999, 50_000], device="cuda")

    logprobs, entropy = loss.linear_logprobs(hidden, weight, labels)
    logprobs.sum().backward(retain_graph=True)
    entropy.sum().backward()

    exact = torch.stack([hidden[0].double() @ weight[i].double() for i in (50_000, 69_999)])
    torch.testing.assert_close(logprobs[:2], torch.zeros_like(logprobs[:2]))
    torch.testing.assert_close(logprobs[2].double(), exact[0] - exact[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy, torch.zeros_like(entropy))
    assert not weight.grad[:40_000].any()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.gpu
def test_extra_memory_on_a_gpu_is_a_tile_and_the_gradients():
    hidden, weight, labels = (x.cuda() for x in problem(4096, 151_936, 8, dtype=torch.bfloat16))
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    sum(loss.linear_logprobs(hidden, weight, labels)).sum().backward()

    extra = torch.cuda.max_memory_allocated() - before
    # Float32 logits and 16-bit gradients; the products' workspace and gradients take less than 1/4.
    assert extra < 1.25 * linear_head_tiles.TILE * (4 + 2)
