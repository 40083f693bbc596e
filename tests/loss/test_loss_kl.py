"""k1, k2 and k3 by hand, and by enumerating a vocabulary: their means and mean gradients."""

import math

import numpy as np
import pytest
import torch
from loss_cases import F64

from primerl import loss

ESTIMATES = {"k1": loss.k1, "k2": loss.k2, "k3": loss.k3}


@pytest.mark.parametrize(
    ("name", "expected", "slope"),
    [
        # d = log 2, -log 2 and 0: the derivatives by log p are 1, -d and 1 - e^d.
        ("k1", [-math.log(2), math.log(2), 0.0], [1.0, 1.0, 1.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0], [-math.log(2), math.log(2), 0.0]),
        ("k3", [1 - math.log(2), math.log(2) - 0.5, 0.0], [-1.0, 0.5, 0.0]),
    ],
)
def test_by_hand(name, expected, slope):
    x = torch.tensor([0.25, 0.50, 0.3], **F64).log().requires_grad_()
    other = torch.tensor([0.50, 0.25, 0.3], **F64).log()

    estimate = ESTIMATES[name](x, other)
    estimate.sum().backward()

    assert estimate.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert x.grad.tolist() == pytest.approx(slope, rel=1e-12, abs=1e-15)


def distributions(seed, size=7):
    rng = np.random.default_rng(seed)
    theta, q_logits = 1.5 * rng.standard_normal((2, size))
    p, q = np.exp(theta) / np.exp(theta).sum(), np.exp(q_logits) / np.exp(q_logits).sum()
    return theta, p, q


def kl(p, q):
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("seed", range(3))
def test_means_over_the_policys_tokens(seed):
    _, p, q = distributions(seed)
    log_p, log_q = torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q))

    means = {
        name: float((torch.from_numpy(p) * estimate(log_p, log_q)).sum())
        for name, estimate in ESTIMATES.items()
    }

    assert means["k1"] == pytest.approx(kl(p, q), rel=1e-12)
    assert means["k3"] == pytest.approx(kl(p, q), rel=1e-12)
    assert means["k2"] == pytest.approx(float((p * np.log(p / q) ** 2 / 2).sum()), rel=1e-12)
    assert abs(means["k2"] - kl(p, q)) > 1e-3  # biased
    assert (loss.k2(log_p, log_q) >= 0).all()
    assert (loss.k3(log_p, log_q) >= 0).all()
    assert (loss.k1(log_p, log_q) < 0).any()


@pytest.mark.parametrize("seed", range(3))
def test_mean_gradients_over_the_policys_tokens(seed):
    """k1: none; k2: that of KL(p || q); k3: that of KL(q || p), in the logits of p."""
    theta, p, q = distributions(seed)
    expected = {
        "k1": np.zeros_like(p),
        "k2": p * (np.log(p / q) - kl(p, q)),
        "k3": p - q,
    }

    for name, estimate in ESTIMATES.items():
        logits = torch.from_numpy(theta).requires_grad_()
        drawn = torch.from_numpy(p)  # how often a token is drawn, which a loss can't change
        (drawn * estimate(logits.log_softmax(-1), torch.from_numpy(np.log(q)))).sum().backward()
        np.testing.assert_allclose(logits.grad.numpy(), expected[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_distillation_has_the_gradient_of_reverse_kl(seed):
    """``ref_logprobs - logprobs`` as an advantage, in expectation on policy."""
    theta, p, q = distributions(seed)
    logits = torch.from_numpy(theta).requires_grad_()
    logprobs = logits.log_softmax(-1)

    per_token, _ = loss.distill(logprobs, logprobs.detach(), torch.from_numpy(np.log(q)))
    (torch.from_numpy(p) * per_token).sum().backward()

    expected = p * (np.log(p / q) - kl(p, q))
    np.testing.assert_allclose(logits.grad.numpy(), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "below", "above"),
    [
        ("k1", -20.0, 20.0),
        ("k2", 200.0, 200.0),
        ("k3", math.exp(20) - 21, 19 + math.exp(-20)),
    ],
)
def test_beyond_twenty_they_are_clamped_without_gradient(name, below, above):
    x = torch.tensor([-60.0, -5.0], **F64, requires_grad=True)
    other = torch.tensor([-5.0, -60.0], **F64)

    estimate = ESTIMATES[name](x, other)
    estimate.sum().backward()

    assert estimate.tolist() == pytest.approx([below, above], rel=1e-12)
    assert x.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATES)
def test_gradients_agree_with_finite_differences(name):
    x = torch.randn(20, generator=torch.Generator().manual_seed(0), **F64).requires_grad_()

    assert torch.autograd.gradcheck(lambda x: ESTIMATES[name](x, torch.zeros(20, **F64)), x)


def test_k3_keeps_its_digits_where_the_models_nearly_agree():
    """``e^d - 1 - d`` of d = 1e-3 in float32: two digits would be left of the plain difference."""
    x, other = torch.tensor([0.0]), torch.tensor([2**-10])
    d = 2**-10

    assert loss.k3(x, other).item() == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-3)


def test_cross_entropy_by_hand():
    x = torch.tensor([0.5, 0.25, 1.0], **F64).log().requires_grad_()

    entropy = loss.cross_entropy(x)
    entropy.sum().backward()

    assert entropy.tolist() == pytest.approx([math.log(2), math.log(4), 0.0], rel=1e-12)
    assert x.grad.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(given):
    x, other = torch.tensor([-1.0], dtype=given), torch.tensor([-1.5], dtype=given)

    computed = {loss.cross_entropy(x).dtype, *(fn(x, other).dtype for fn in ESTIMATES.values())}

    assert computed == {torch.float64 if given == torch.float64 else torch.float32}
    assert loss.k3(x, other).item() == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-5)
