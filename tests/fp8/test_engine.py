"""The embedded engine as an FP8 sampler, against trainers that multiply in FP8 and that don't."""

import asyncio

import pytest
import torch
from served_models import generate_all, prompts

from primerl import fp8, loss, parallel, rollout, testing, weights
from primerl.types import SamplingParams

FORM = fp8.Format.of_blocks(16)
PARAMS = SamplingParams(max_tokens=6)


def in_fp8(model):
    fp8.convert_linears(model, form=FORM)
    return experts_in_fp8(model)


def experts_in_fp8(model):
    parallel.divide_experts(model, matmul=fp8.GroupedMatmul(form=FORM))
    return model


def mismatch_kl(trainer, asked, completions):
    total = 0.0
    for prompt, completion in zip(asked, completions, strict=True):
        ids = torch.tensor(prompt + completion.token_ids.tolist())
        with torch.no_grad():
            logprobs = loss.model_logprobs(trainer, ids, torch.arange(len(ids)), ids.roll(-1))
        ratio = logprobs[len(prompt) - 1 : -1] - torch.tensor(completion.logprobs)
        total += (ratio.expm1() - ratio).mean().item() / len(asked)
    return total


def test_it_samples_in_fp8_what_a_trainer_in_fp8_computes():
    """Its linear layers are copied as they are; its experts' product needs ``prepare``."""
    settings = {"hidden_size": 64, "eos_token_id": None, "initializer_range": 0.2}
    plain, trainer = (testing.tiny_model("qwen3_moe", **settings).eval() for _ in range(2))
    in_fp8(trainer)
    asked = prompts(6)
    with rollout.TransformersEngine(trainer, seed=0, prepare=experts_in_fp8) as engine:
        first = asyncio.run(generate_all(engine, [(one, PARAMS) for one in asked]))
        assert mismatch_kl(trainer, asked, first) < mismatch_kl(plain, asked, first) / 4
        with torch.no_grad():
            for ours, other in zip(trainer.parameters(), plain.parameters(), strict=True):
                ours.mul_(1.1)
                other.mul_(1.1)
        weights.SharedMemory(trainer, engine).publish(1)
        second = asyncio.run(generate_all(engine, [(one, PARAMS) for one in asked]))
    assert all(one.versions.tolist() == [1] * 6 for one in second)
    assert mismatch_kl(trainer, asked, second) < mismatch_kl(plain, asked, second) / 4


@pytest.mark.thorough
def test_a_copy_of_experts_without_prepare_is_an_error_that_names_it():
    trainer = in_fp8(testing.tiny_model("qwen3_moe"))
    with pytest.raises(ValueError, match="prepare=lambda copied"):
        rollout.TransformersEngine(trainer)
