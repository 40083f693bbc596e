"""Time of forward and backward passes of groups, with prompts computed once or per rollout.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_prefixes.py -m "" --benchmark-only -s

The batch has 8 prompts of 46 tokens, each with 8 completions of 64 tokens. The model is
SmolLM2-135M in bfloat16 on all cores. The variants take turns; ratios compare successive runs.
"""

import os
import statistics
import time

import numpy as np
import pytest
import torch

from primerl import loss, models, packing, testing
from primerl.types import NOT_SAMPLED, TrainingSample

PROMPTS, GROUP, PROMPT_TOKENS, TOKENS, ROUNDS = 8, 8, 46, 64, 3


def samples():
    draw = np.random.default_rng(0)
    trained = np.arange(PROMPT_TOKENS + TOKENS) >= PROMPT_TOKENS
    for _ in range(PROMPTS):
        prompt = draw.integers(100, 40_000, PROMPT_TOKENS)
        for _ in range(GROUP):
            yield TrainingSample(
                token_ids=[*prompt, *draw.integers(100, 40_000, TOKENS)],
                loss_mask=trained,
                behavior_logprobs=-1.0 * trained,
                versions=np.where(trained, 0, NOT_SAMPLED),
                advantages=1.0 * trained,
            )


def step(model, drawn, *, share_prefixes):
    began = time.perf_counter()
    (batches,) = packing.pack(drawn, max_tokens=2048, ranks=1, share_prefixes=share_prefixes)
    for b in batches:
        logprobs = loss.model_logprobs(
            model, b.token_ids, b.position_ids, b.labels, rows=b.loss_mask
        )
        loss.token_mean(-logprobs, b.loss_mask, denom=PROMPTS * GROUP * TOKENS).backward()
    model.zero_grad()
    return time.perf_counter() - began


@pytest.mark.benchmark(group="prompts shared by a group", warmup=False)
def test_a_step_with_and_without(benchmark, tmp_path):
    torch.set_num_threads(os.cpu_count())
    folder = os.environ.get("PRIMERL_SMOLLM2") or str(testing.smollm2(tmp_path / "smollm2"))
    model, _ = models.load_pretrained(folder, dtype=torch.bfloat16)
    drawn = list(samples())
    pairs = []

    def pair():
        pairs.append([step(model, drawn, share_prefixes=share) for share in (True, False)])

    pair()
    pairs.clear()
    benchmark.pedantic(pair, rounds=ROUNDS, iterations=1)
    ratio = statistics.median(shared / whole for shared, whole in pairs)
    print(f"\nseconds with and without: {pairs}; ratio {ratio:.2f}")
    benchmark.extra_info.update(pairs=pairs, ratio=ratio)
    assert ratio < 1
