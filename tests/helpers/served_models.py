"""Small models to serve, and requests to them."""

import asyncio
import copy
import random

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


def in_flight(engine):
    """Return the requests that the embedded engine is decoding."""
    return list(engine._decoder._scheduler.running)


def most_sampled(engine):
    """Return the number of tokens of the longest completion in flight."""
    return max((len(request.logprobs) for request in in_flight(engine)), default=0)


def pages_in_use(engine):
    return sum(pool.used for pool in engine._decoder._scheduler.pages.pools)
