"""The loss algebra, against tables worked out by hand, float64 gradients and properties."""

import math

import numpy as np
import pytest
import torch
from conftest import make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import loss, packing
from primerl.types import TrainingSample

F64 = {"dtype": torch.float64}


def test_token_logprobs_of_two_tokens_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [2.0, 2.0]], **F64)

    logprobs = loss.token_logprobs(logits, torch.tensor([1, 0]))

    torch.testing.assert_close(logprobs, torch.log(torch.tensor([0.75, 0.5], **F64)))


def test_temperature_divides_the_logits_of_each_row():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]], **F64)
    labels = torch.tensor([1, 1])

    both = loss.token_logprobs(logits, labels, temperature=torch.tensor([0.5, 2.0], **F64))

    expected = [2 - math.log(1 + math.e**2), 0.5 - math.log(1 + math.e**0.5)]
    torch.testing.assert_close(both, torch.tensor(expected, **F64))
    torch.testing.assert_close(loss.token_logprobs(logits, labels, temperature=0.5)[0], both[0])


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(4, 50).bfloat16()

    logprobs = loss.token_logprobs(logits, torch.arange(4))

    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1)[range(4), range(4)])


def test_clipped_by_hand():
    # The ratio r, the advantage A, and min(r A, clip(r, 0.8, 1.3) A).
    table = [
        (1.0, 2.0, 2.0),
        (1.5, 1.0, 1.3),
        (0.5, 1.0, 0.5),
        (1.5, -1.0, -1.5),
        (0.5, -1.0, -0.8),
    ]
    r, advantages, expected = (torch.tensor(column, **F64) for column in zip(*table, strict=True))
    behavior = torch.full_like(r, -3.0)
    logprobs = (behavior + r.log()).requires_grad_()

    per_token, aux = loss.clipped(logprobs, behavior, advantages, clip_low=0.2, clip_high=0.3)
    per_token.sum().backward()

    torch.testing.assert_close(per_token, -expected)
    assert aux["clipped"].tolist() == [0, 1, 0, 0, 1]
    # d/dlogp of -r A is -r A where the clip does not bind, and nothing where it does.
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, 0.0, -0.5, 1.5, 0.0], **F64))


def test_dppo_by_hand():
    # p, mu, A; the loss is -A p/mu, dropped where p left mu by more than 0.2 in A's direction.
    table = [
        (0.5, 0.4, 1.0, False),
        (0.7, 0.4, 1.0, True),
        (0.1, 0.4, 1.0, False),
        (0.1, 0.4, -1.0, True),
        (0.7, 0.4, -1.0, False),
        (0.1, 0.4, 0.0, True),
        (0.010, 0.001, 1.0, False),  # ten times likelier, but hardly moved: a clip would stop it
    ]
    p, mu, advantages, dropped = (torch.tensor(c, **F64) for c in zip(*table, strict=True))
    logprobs = p.log().requires_grad_()

    per_token, aux = loss.dppo(logprobs, mu.log(), advantages, mask_low=0.2, mask_high=0.2)
    per_token.sum().backward()

    expected = torch.where(dropped.bool(), 0.0, -advantages * p / mu)
    torch.testing.assert_close(per_token.detach(), expected)
    torch.testing.assert_close(logprobs.grad, expected)  # d r / d logp = r
    assert aux["dropped"].tolist() == dropped.tolist()


def test_dppo_bounds_are_separate():
    up = (torch.tensor([0.7]).log(), torch.tensor([0.4]).log(), torch.tensor([1.0]))
    down = (torch.tensor([0.1]).log(), torch.tensor([0.4]).log(), torch.tensor([-1.0]))

    assert loss.dppo(*up, mask_low=0.0, mask_high=0.4)[1]["dropped"].item() == 0
    assert loss.dppo(*up, mask_low=0.4, mask_high=0.2)[1]["dropped"].item() == 1
    assert loss.dppo(*down, mask_low=0.4, mask_high=0.0)[1]["dropped"].item() == 0
    assert loss.dppo(*down, mask_low=0.2, mask_high=0.4)[1]["dropped"].item() == 1


@pytest.mark.parametrize("surrogate", [loss.clipped, loss.dppo])
def test_on_policy_the_gradient_is_reinforce(surrogate):
    logprobs = torch.tensor([-1.0, -2.0, -0.1], **F64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], **F64)

    surrogate(logprobs, logprobs.detach(), advantages)[0].sum().backward()

    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize("surrogate", [loss.clipped, loss.dppo])
def test_gradients_agree_with_finite_differences(surrogate):
    torch.manual_seed(0)
    behavior = -torch.rand(40, **F64)
    advantages = torch.randn(40, **F64)
    logprobs = (behavior + 0.05 * torch.randn(40, **F64)).requires_grad_()

    assert torch.autograd.gradcheck(lambda x: surrogate(x, behavior, advantages)[0], logprobs)


@pytest.mark.parametrize("surrogate", [loss.clipped, loss.dppo])
def test_an_extreme_ratio_is_held_and_counted(surrogate):
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-100.0, -1.0])

    per_token, aux = surrogate(logprobs, behavior, torch.tensor([-1.0, -1.0]))
    per_token.sum().backward()

    assert torch.isfinite(per_token).all()
    assert logprobs.grad.tolist() == [0.0, 1.0]
    assert aux["log_ratio_limited"].tolist() == [1.0, 0.0]


def test_another_ratio_can_be_passed():
    def halved(logprobs, behavior_logprobs):
        return 0.5 * loss.token_ratio(logprobs, behavior_logprobs)

    x = torch.tensor([-1.0])

    assert loss.dppo(x, x, torch.tensor([1.0]), ratio=halved)[0].item() == -0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda x: loss.clipped(x, x, x, clip_low=-0.1),
        lambda x: loss.clipped(x, x, x, clip_low=1.1),
        lambda x: loss.clipped(x, x, x, clip_high=-0.1),
        lambda x: loss.dppo(x, x, x, mask_low=-0.1),
    ],
)
def test_hyperparameters_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call(torch.tensor([-1.0]))


def test_token_mean_by_hand():
    x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    mask = torch.tensor([True, False, True])

    mean = loss.token_mean(x, mask, denom=10)
    mean.backward()

    assert mean.item() == 0.5
    torch.testing.assert_close(x.grad, torch.tensor([0.1, 0.0, 0.1]))


def test_what_is_masked_out_cannot_spoil_the_mean_or_its_gradient():
    x = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    y = x.log()  # nan and -inf where masked out
    mask = torch.tensor([True, False, False])

    loss.token_mean(y, mask, denom=torch.tensor(1)).backward()

    assert x.grad[0] == 1
    assert loss.token_mean(y, mask, denom=1).item() == 0


@pytest.mark.parametrize("denom", [0, -1, float("nan"), torch.tensor(0)])
def test_a_denominator_must_be_positive(denom):
    with pytest.raises(ValueError, match="trained tokens"):
        loss.token_mean(torch.zeros(1), torch.tensor([True]), denom=denom)


def test_mismatch_kl_counts_only_trained_tokens_of_the_trainers_version():
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    behavior = torch.tensor([-1.1, -9.0, -9.0, -0.9])
    mask = torch.tensor([True, True, False, True])
    versions = torch.tensor([2, 1, 2, 2], dtype=torch.int32)

    total, count = loss.mismatch_kl(logprobs, behavior, mask, versions, version=2)

    expected = (math.exp(0.1) - 1 - 0.1) + (math.exp(-0.1) - 1 + 0.1)
    assert count.item() == 2
    assert total.item() == pytest.approx(expected, rel=1e-4)


def test_mismatch_kl_of_equal_logprobs_is_zero_and_never_negative():
    x = -torch.rand(100)
    mask = torch.ones(100, dtype=torch.bool)
    versions = torch.zeros(100, dtype=torch.int32)

    assert loss.mismatch_kl(x, x, mask, versions, version=0)[0].item() == 0
    assert loss.mismatch_kl(x, x + 1e-6, mask, versions, version=0)[0].item() >= 0


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_packed(shapes):
    """One weight per token id, so that the gradient of every token can be told apart."""
    samples = [
        make_sample(
            prompt,
            completion,
            kind=TrainingSample,
            seed=number,
            advantages=np.linspace(-1, 1, prompt + completion),
        )
        for number, (prompt, completion) in enumerate(shapes)
    ]
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)

    def gradient(max_tokens, ranks):
        weight = torch.linspace(-2, 0, 64, dtype=torch.float64, requires_grad=True)
        for batches in packing.pack(samples, max_tokens=max_tokens, ranks=ranks):
            for batch in batches:
                logprobs = weight[batch.labels] - 0.01 * weight[batch.token_ids]
                per_token, _ = loss.dppo(logprobs, batch.behavior_logprobs, batch.advantages)
                loss.token_mean(per_token, batch.loss_mask, denom=trained).backward()
        return weight.grad

    torch.testing.assert_close(gradient(13, 1), gradient(200, 1))
    torch.testing.assert_close(gradient(13, 3), gradient(200, 1))
