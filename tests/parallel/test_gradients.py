import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_

from primerl import parallel


def with_gradients(*gradients):
    parameters = []
    for gradient in gradients:
        gradient = torch.as_tensor(gradient)
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def test_by_hand():
    a, b, absent = *with_gradients([3.0, 0.0], [[4.0]]), torch.nn.Parameter(torch.zeros(2))

    norm = parallel.clip_gradients([a, b, absent], 2.5)

    assert norm == 5.0
    assert norm.shape == ()
    assert a.grad.tolist() == pytest.approx([1.5, 0.0])
    assert b.grad.tolist() == [pytest.approx([2.0])]
    assert absent.grad is None


def test_a_small_norm_is_left_alone():
    (a,) = with_gradients([0.3, 0.4])

    assert parallel.clip_gradients([a], 0.6) == pytest.approx(0.5)
    assert torch.equal(a.grad, torch.tensor([0.3, 0.4]))


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), min_size=1, max_size=4),
    st.floats(0.1, 10),
)
def test_as_torch_does(gradients, max_norm):
    ours = with_gradients(*(torch.tensor(g) for g in gradients))
    theirs = with_gradients(*(torch.tensor(g) for g in gradients))

    norm = parallel.clip_gradients(iter(ours), max_norm)

    assert norm.item() == pytest.approx(clip_grad_norm_(theirs, max_norm).item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)


def test_the_norm_of_half_precision_gradients_is_not_rounded_to_it():
    (a,) = with_gradients(torch.full((1000,), 0.01, dtype=torch.bfloat16))
    exact = a.grad.double().norm().item()

    norm = parallel.clip_gradients([a], 1.0)

    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert a.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_reported_to_the_guard(value):
    (a,) = with_gradients([1.0, value])

    norm = parallel.clip_gradients([a], 1.0)

    assert not norm.isfinite()
    assert not parallel.UpdateGuard(on_nonfinite="skip").allows(0.0, norm)


def test_an_infinite_norm_only_measures():
    (a,) = with_gradients([3.0, 4.0])

    assert parallel.clip_gradients([a], math.inf) == 5.0
    assert a.grad.tolist() == [3.0, 4.0]


def test_without_gradients_the_norm_is_0():
    assert parallel.clip_gradients([], 1.0) == 0.0
    assert parallel.clip_gradients([torch.nn.Parameter(torch.ones(1))], 1.0) == 0.0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_norm_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm is .*, expected a number above 0"):
        parallel.clip_gradients([], max_norm)


MESHES = ["fsdp", "hsdp", "ep", "ep of all", "ep, hsdp", "few experts"]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_gradients_have_the_norm_of_one_process_on_every_rank(optimized, mesh):
    for found in optimized:
        one = found["clipped"][mesh]
        assert one["norm"] == pytest.approx(1.0, rel=1e-6)
        assert one["distinct"] == 1
        assert one["after"] == pytest.approx(0.5, rel=1e-5)
        assert one["placements"] == (1 if mesh in ("fsdp", "hsdp") else 2)


def test_gradients_whose_norm_is_unclear_are_refused(optimized):
    for found in optimized:
        half, terms = found["refused gradients"]
        assert "a mesh of 2 ranks, but there are 4" in half
        assert "is not reduced over its ranks" in terms


@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float64, torch.bfloat16)])
def test_gradients_of_64_bits_keep_them(dtypes):
    parameters = with_gradients(*(torch.full((2,), 1 / 3, dtype=dtype) for dtype in dtypes))

    norm = parallel.clip_gradients(parameters, math.inf)

    assert norm.dtype == torch.float64
    squares = [(parameter.grad.double() ** 2).sum().item() for parameter in parameters]
    assert norm.item() == pytest.approx(math.sqrt(sum(squares)), rel=1e-14)
