"""Logprobs of tokens; the other parts of the loss are in tests/loss/test_loss_*.py."""

import math

import torch

from primerl import loss

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
