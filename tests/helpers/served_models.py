"""Small models to serve, and requests to them."""

import asyncio
import copy
import random

import pytest
import torch

from primerl import testing


def perturbed(model, seed):
    """Return a copy of the model with clearly different weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


def wide_model(family="qwen3_moe"):
    """Make a tiny model whose logits differ enough that wrong weights show."""
    return perturbed(testing.tiny_model(family), seed=99)


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, 64) for _ in range(rng.randint(1, 12))] for _ in range(count)]


async def generate_all(engine, requests):
    return await asyncio.gather(*(engine.generate(p, params) for p, params in requests))


def require_pause(engine):
    if not engine._batcher.can_pause:
        pytest.skip("this transformers cannot pause; updates wait until requests have ended")
