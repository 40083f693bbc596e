"""Tokens per second of the engines that can serve a model on this machine."""

import asyncio
import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from primerl._common.optional import require
from primerl.rollout.engines.transformers.engine import TransformersEngine
from primerl.types import SamplingParams

ENGINES = ("TransformersEngine", "generate", "vLLM")
SampleAll = Callable[[list[list[int]], int], None]
"""A function ``(prompts, new tokens) -> None`` that samples a completion of each prompt."""


def measure_speed(
    model: str,
    *,
    dtype: str,
    requests: Sequence[int],
    prompts: Sequence[int],
    new_tokens: int,
    group: int,
    engines: Sequence[str] = ENGINES,
) -> dict[tuple[str, int, int], float]:
    """Print and return the sampled tokens per second, by engine, requests and prompt length.

    The time is that of all requests together, from the first to the last, prompts included. Each
    number is the faster one of two runs, on prompts of random tokens that no run has seen before.

    Args:
        model: model folder or hub id.
        dtype: of weights and cache.
        requests: how many requests are sent at once.
        prompts: how many tokens a prompt has.
        new_tokens: how many tokens are sampled in each request.
        group: how many requests have the same prompt.
        engines: which of ``ENGINES`` to measure; vLLM only if it is installed.
    """
    transformers = require("transformers", extra="transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.AutoConfig.from_pretrained(model)
    vocabulary = config.get_text_config().vocab_size
    rng = random.Random(0)
    speeds = {}
    print(f"{'engine':20}{'requests':>10}{'prompt':>8}{'tokens/s':>10}{'seconds':>9}")  # noqa: T201
    for name in engines:
        if name == "vLLM" and importlib.util.find_spec("vllm") is None:
            print(f"{name:20}  not installed")  # noqa: T201
            continue
        with _opened(name, model, dtype, device, max(prompts) + new_tokens) as sample_all:
            for length in prompts:
                for count in requests:
                    seconds = []
                    for _ in range(2):
                        asked = _prompts(rng, vocabulary, count, length, group)
                        began = time.perf_counter()
                        sample_all(asked, new_tokens)
                        seconds.append(time.perf_counter() - began)
                    speeds[name, count, length] = count * new_tokens / min(seconds)
                    print(  # noqa: T201
                        f"{name:20}{count:>10}{length:>8}"
                        f"{speeds[name, count, length]:>10.0f}{min(seconds):>9.2f}",
                        flush=True,
                    )
    return speeds


def _prompts(
    rng: random.Random, vocabulary: int, count: int, length: int, group: int
) -> list[list[int]]:
    prompts: list[list[int]] = []
    while len(prompts) < count:
        prompt = [rng.randrange(vocabulary) for _ in range(length)]
        prompts += [prompt] * min(group, count - len(prompts))
    return prompts


@contextmanager
def _opened(name: str, path: str, dtype: str, device: str, context: int) -> Iterator[SampleAll]:
    if name == "vLLM":
        yield _vllm(path, dtype, context)
        return
    transformers = require("transformers", extra="transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model: Any = made.to(device).eval()
    if name == "generate":
        yield lambda prompts, count: _generate(model, prompts, count)
        return
    with TransformersEngine(model) as engine:
        yield lambda prompts, count: _sample(engine, prompts, count)


def _sample(engine: TransformersEngine, prompts: list[list[int]], count: int) -> None:
    async def sample_all() -> None:
        params = SamplingParams(max_tokens=count)
        await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    asyncio.run(sample_all())


def _generate(model: Any, prompts: list[list[int]], count: int) -> None:
    token_ids = torch.tensor(prompts, device=model.device)
    model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


def _vllm(path: str, dtype: str, context: int) -> SampleAll:
    vllm = require("vllm", extra="vllm")
    served = vllm.LLM(model=path, dtype=dtype, max_model_len=context)

    def sample_all(prompts: list[list[int]], count: int) -> None:
        params = vllm.SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        served.generate(asked, params, use_tqdm=False)

    return sample_all
