"""ECHO's objective, from the calls of an agent to gradients, against plain cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from primerl import advantage, loss, packing, rollout, testing
from primerl.rollout import EngineCall
from primerl.types import Completion, Group, Rollout

COEFFICIENT = 0.05


def call(new_ids, tokens, parent=None):
    completion = Completion(
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        versions=[0] * len(tokens),
        finish_reason="stop",
    )
    return EngineCall(new_ids=new_ids, completion=completion, parent=parent)


def rollouts():
    """One of two turns and a fork of its second, and one that observed nothing."""
    first = call([1, 2, 3], [4, 5])
    calls = [first, call([6, 7, 8], [9], first), call([10], [11, 12], first)]
    return [
        Rollout(samples=rollout.stitch(calls, temperature=1.0), reward=1.0),
        Rollout(samples=rollout.stitch([call([1, 2], [3])], temperature=1.0), reward=0.0),
    ]


OBSERVED = {(1, 2, 3, 4, 5, 6, 7, 8, 9): [5, 6, 7], (1, 2, 3, 4, 5, 10, 11, 12): [5]}


def reference(model, samples):
    """The mean over sequences with observations, of the mean cross-entropy of these."""
    total = 0.0
    for sample in samples:
        rows = OBSERVED.get(tuple(sample.token_ids.tolist()), [])
        if rows:
            tokens = torch.tensor([sample.token_ids.tolist()])
            logits = model(tokens).logits[0]
            rows = torch.tensor(rows)
            total = total + F.cross_entropy(logits[rows - 1], tokens[0, rows]) / len(OBSERVED)
    return COEFFICIENT * total


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_the_gradient_is_that_of_cross_entropy_on_what_the_environment_said(share_prefixes):
    model = testing.tiny_model("llama", vocab_size=32)
    group = Group(task_id="t", rollouts=rollouts())
    samples = advantage.assign([group], lambda _: [0.0, 0.0])  # nothing of the policy's own loss
    samples = advantage.with_observation_weights(samples)
    observing = sum(bool(one.weights.any()) for one in samples)
    expected = torch.autograd.grad(reference(model, samples), list(model.parameters()))

    ((batch,),) = packing.pack(samples, max_tokens=64, ranks=1, share_prefixes=share_prefixes)
    observed = batch.weights > 0
    logprobs = loss.model_logprobs(
        model,
        batch.token_ids,
        batch.position_ids,
        batch.labels,
        temperature=batch.temperature,
        rows=batch.loss_mask | observed,
    )
    per_token, _ = loss.clipped(logprobs, batch.behavior_logprobs, batch.advantages)
    objective = loss.token_mean(per_token, batch.loss_mask, denom=int(batch.loss_mask.sum()))
    objective = objective + COEFFICIENT * loss.sequence_mean(
        -batch.weights * logprobs, observed, batch.sequence_ids, denom=observing
    )
    found = torch.autograd.grad(objective, list(model.parameters()))

    assert objective.item() == pytest.approx(reference(model, samples).item(), rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
