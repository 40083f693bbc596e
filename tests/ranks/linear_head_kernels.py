"""Run by tests/loss/test_linear_head_kernels.py: Triton's kernels, interpreted or compiled."""

import math
import os

import pytest
import torch
from hopper import compile_for_hopper

from primerl.loss import linear_head, linear_head_tiles, linear_head_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Use the kernels on a CPU, for tiles of 128 columns that they read 64 at a time."""
    uses = []

    def reason(z):
        uses.append(z.shape)
        return None if z.dtype == torch.float32 else "float64"

    monkeypatch.setattr(linear_head_tiles, "reason_against_triton", reason)
    monkeypatch.setattr(linear_head_tiles, "CPU_TILE", 1)
    monkeypatch.setattr(linear_head_triton, "COLUMNS", 64)
    return uses


def reference(hidden, weight, labels, temperature):
    """Logprobs ``[t, c]`` and entropies ``[t]``, from logits in float64."""
    z = hidden @ weight.T / torch.as_tensor(temperature).double().expand(len(hidden)).unsqueeze(1)
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    return log_p.gather(1, labels.view(len(labels), -1)).view(labels.shape), entropy


def gradients(outputs, inputs, wanted):
    generator = torch.Generator().manual_seed(1)
    terms = [(x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in outputs]
    total = {"logprobs": terms[0], "entropy": terms[1], "both": terms[0] + terms[1]}[wanted]
    return torch.autograd.grad(total, inputs)


def problem(t, v, labels_per_row, *, dtype=torch.float32, h=8):
    generator = torch.Generator().manual_seed(t + v)
    hidden = torch.randn(t, h, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=generator).to(dtype).requires_grad_()
    shape = (t, labels_per_row) if labels_per_row else (t,)
    labels = torch.randint(0, v, shape, generator=generator)
    if labels_per_row > 1:
        labels[:, 1] = labels[:, 0]  # a token may come twice
    return hidden, weight, labels


def compare(hidden, weight, labels, temperature, wanted, *, chunk_tokens=2, error=2e-6):
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = reference(*exact, labels, temperature)
    ours = linear_head.head_logprobs(hidden, weight, labels, temperature, None, chunk_tokens)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=error, atol=5 * error)
    found = gradients(ours, (hidden, weight), wanted)
    for mine, other in zip(found, gradients(theirs, exact, wanted), strict=True):
        assert mine.dtype == hidden.dtype
        assert (mine.double() - other).norm() <= error * other.norm()


# Of 300 columns, the last tile has 44; of 257, it has one. The last chunk has one row.
@interpreted
@pytest.mark.parametrize(
    ("t", "v", "labels_per_row", "wanted"),
    [
        (3, 300, 0, "logprobs"),
        (3, 257, 1, "entropy"),
        (3, 257, 5, "logprobs"),
        (3, 300, 5, "both"),
        (1, 2, 3, "both"),
    ],
)
def test_interpreted_kernels_compute_logprobs_and_entropies(kernels, t, v, labels_per_row, wanted):
    temperature = 0.5 + torch.rand(t, generator=torch.Generator().manual_seed(2))
    compare(*problem(t, v, labels_per_row), temperature, wanted)
    assert kernels


@interpreted
def test_a_single_token_is_certain():
    hidden, weight, labels = problem(2, 1, 0)
    outputs = linear_head.head_logprobs(hidden, weight, labels, 0.5, None)
    assert not any(x.any() for x in (*outputs, *gradients(outputs, (hidden, weight), "both")))


@interpreted
def test_interpreted_kernels_take_one_temperature():
    compare(*problem(2, 200, 0), 0.7, "both", chunk_tokens=100)


@interpreted
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_interpreted_kernels_write_the_gradient_in_16_bits(chunk_tokens):
    arguments = problem(3, 200, 0, dtype=torch.float16)
    compare(*arguments, 1.0, "both", chunk_tokens=chunk_tokens, error=5e-3)


@interpreted
def test_interpreted_kernels_take_no_rows():
    hidden, weight, labels = problem(4, 200, 0)
    rows = torch.zeros(4, dtype=torch.bool)
    outputs = linear_head.head_logprobs(hidden, weight, labels, 1.0, rows)
    assert not any(x.any() for x in gradients(outputs, (hidden, weight), "both"))


@interpreted
def test_interpreted_kernels_take_upstream_gradients_that_are_one_number():
    """The gradient of a sum has strides of 0."""
    hidden, weight, labels = problem(2, 200, 3)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logprobs, entropy = linear_head.head_logprobs(hidden, weight, labels, 1.0, None)
    found = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    theirs = torch.autograd.grad(sum(x.sum() for x in reference(*exact, labels, 1.0)), exact)
    for mine, other in zip(found, theirs, strict=True):
        assert (mine.double() - other).norm() <= 2e-6 * other.norm()


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")
@pytest.mark.parametrize("scale", [1e4, 1e35])
def test_huge_logits_neither_overflow_nor_give_nan(scale):
    """Half of them are below the range of exp in every block; the highest is in the last one."""
    hidden, weight, labels = problem(3, 300, 0)
    with torch.no_grad():
        weight.mul_(scale)
        weight[-1] = 2 * scale * hidden[0]
    logprobs, entropy = linear_head.head_logprobs(hidden, weight, labels, 1.0, None)
    theirs = reference(hidden.double(), weight.double(), labels, 1.0)
    torch.testing.assert_close(logprobs.double(), theirs[0], rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(entropy.double(), theirs[1], rtol=1e-2, atol=1e-2)
    found = gradients((logprobs, entropy), (hidden, weight), "both")
    assert all(x.isfinite().all() for x in found)


@interpreted
@pytest.mark.parametrize("wanted", ["logprobs", "both"])
def test_logits_of_minus_infinity_have_no_mass(wanted):
    hidden = torch.ones(2, 2, requires_grad=True)
    weight = torch.zeros(300, 2)
    weight[:200] = -3e38  # the whole first block, and the sum of two is beyond float32
    weight.requires_grad_()
    outputs = linear_head.head_logprobs(hidden, weight, torch.tensor([200, 299]), 1.0, None)
    of_weight = gradients(outputs, (hidden, weight), wanted)[1]
    torch.testing.assert_close(outputs[0], torch.full((2,), -math.log(100)))
    torch.testing.assert_close(outputs[1], torch.full((2,), math.log(100)))
    assert not of_weight[:200].any()
    assert of_weight.isfinite().all()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_is_not_hidden():
    hidden, weight, labels = problem(2, 200, 0)
    with torch.no_grad():
        hidden[1, 0] = math.nan
    outputs = linear_head.head_logprobs(hidden, weight, labels, 1.0, None)
    of_hidden = gradients(outputs, (hidden, weight), "both")[0]
    for x in (*outputs, of_hidden[:, 0]):
        assert x.isnan().tolist() == [False, True]


@interpreted
def test_both_kernels_run_once():
    linear_head_triton.run_once(torch.device("cpu"))


TYPES = {
    **dict.fromkeys(("z", "divisor", "highest", "total", "weighted", "chosen"), "*fp32"),
    **dict.fromkeys(("a", "b", "c"), "*fp32"),
    "labels": "*i64",
    "start": "i32",
    "columns": "i32",
    "count": "i32",
    "out": "*bf16",
}
FORWARD, BACKWARD = linear_head_triton._add_statistics, linear_head_triton._gradient
WITH_ALL = {"SCALED": True, "OF_LABELS": True, "OF_ENTROPY": True}
KERNELS = {
    "statistics": (FORWARD, {"SCALED": False, "LABELS": 1, "count": 1}),
    "statistics of 64 labels": (FORWARD, {"SCALED": True, "LABELS": 64}),
    "gradient": (BACKWARD, {"SCALED": False, "OF_LABELS": True, "OF_ENTROPY": False, "count": 1}),
    "gradient with all": (BACKWARD, WITH_ALL),
}


@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_within_its_resources(name):
    kernel, constants = KERNELS[name]
    found = compile_for_hopper(
        kernel, TYPES, constants | {"COLUMNS": 4096}, warps=linear_head_triton.WARPS
    )
    print(name, found.shared, found.stack, found.registers)

    assert found.shared < 16 * 2**10
    assert found.stack == 0
    assert found.registers <= 64  # so that four programs of 8 warps fit into a multiprocessor
    assert "ld.global.v4.b32" in found.ptx
