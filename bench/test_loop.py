"""Times of the parts of a step, each with a baseline. Compare ratios of medians within one run."""

import asyncio
import random

import numpy as np
import pytest
import torch

from primerl import loss, packing, rollout, testing, weights
from primerl.types import NOT_SAMPLED, SamplingParams, TrainingSample

SHAPE = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model():
    return testing.tiny_model("qwen3_moe", **SHAPE)


def packed(document, total):
    token_ids = torch.randint(2, 64, (total,))
    return token_ids, torch.arange(document).repeat(total // document), token_ids.roll(-1)


@pytest.mark.parametrize("attention", ["per document", "square mask (transformers)"])
@pytest.mark.parametrize("document", [16, 512])
def test_packed_forward_and_backward(benchmark, model, document, attention):
    token_ids, position_ids, labels = packed(document, 2048)

    def ours():
        loss.model_logprobs(model, token_ids, position_ids, labels).sum().backward()

    def theirs():
        logits = model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
        ).logits[0]
        loss.token_logprobs(logits, labels).sum().backward()

    model.set_attn_implementation("sdpa")
    benchmark.group = f"forward and backward, 2048 tokens in documents of {document}"
    benchmark.pedantic(ours if attention == "per document" else theirs, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("how", ["engine", "generate (transformers), one batch"])
def test_sampling_64_completions_of_16_tokens(benchmark, model, how):
    prompts = [[random.Random(n).randrange(2, 64) for _ in range(8)] for n in range(64)]
    benchmark.group = "64 completions of 16 tokens"
    model.set_attn_implementation("sdpa")
    if how != "engine":
        batch = torch.tensor(prompts)
        benchmark.pedantic(
            lambda: model.generate(batch, max_new_tokens=16, min_new_tokens=16, do_sample=True),
            rounds=5,
            warmup_rounds=1,
        )
        return
    params = SamplingParams(max_tokens=16)
    with rollout.TransformersEngine(model, seed=0) as engine:

        async def sample():
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

        benchmark.pedantic(lambda: asyncio.run(sample()), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_64_completions_through_three_updates(benchmark, model, mode):
    prompts = [[random.Random(n).randrange(2, 64) for _ in range(8)] for n in range(64)]
    benchmark.group = "64 completions of 48 tokens through three updates"
    params = SamplingParams(max_tokens=48)
    with rollout.TransformersEngine(model, on_update=mode, seed=0) as engine:
        transport = weights.SharedMemory(model, engine)

        async def sample():
            tasks = [asyncio.create_task(engine.generate(p, params)) for p in prompts]
            for _ in range(3):
                await asyncio.sleep(0.1)
                await asyncio.to_thread(transport.publish, engine.version + 1)
            await asyncio.gather(*tasks)

        benchmark.pedantic(lambda: asyncio.run(sample()), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("what", ["pack", "token arrays alone (np.concatenate)"])
def test_packing_512_samples(benchmark, what):
    rng = np.random.default_rng(0)
    samples = []
    for length in rng.integers(16, 512, 512):
        mask = np.arange(length) > 8
        samples.append(
            TrainingSample(
                token_ids=rng.integers(2, 60, length),
                loss_mask=mask,
                behavior_logprobs=np.zeros(length),
                versions=np.where(mask, 0, NOT_SAMPLED),
                advantages=np.ones(length),
            )
        )
    benchmark.group = "packing 512 samples into 8192-token batches for 8 ranks"
    if what == "pack":
        benchmark(packing.pack, samples, max_tokens=8192, ranks=8)
    else:
        benchmark(lambda: np.concatenate([sample.token_ids for sample in samples]))
