"""Score and generate with the mixers of hybrid models, with whatever kernels are installed.

tests/attention/test_mixer_kernels.py runs this file with the kernels of flash-linear-attention, and
imports it for the same models and documents without them.
"""

import asyncio
import sys

import torch
from served_models import generate_all, perturbed

from primerl import loss, rollout
from primerl.rollout.engines.transformers import snapshots
from primerl.testing.families import tiny_family
from primerl.types import SamplingParams

# The kernels divide a document into chunks of 64 tokens.
LENGTHS = (5, 70, 3, 66)


def make_model(family):
    return perturbed(tiny_family(family).eval(), 7)


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 96, (length,), generator=generator) for length in lengths]


def gradients(logprobs, model):
    """Return the gradients of a weighted sum of logprobs, of all parameters end to end."""
    total = (logprobs * torch.linspace(1, 2, len(logprobs))).sum()
    found = torch.autograd.grad(total, list(model.parameters()), materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def score(family):
    """Return the logprobs of packed documents, and their gradients."""
    model, token_ids = make_model(family), torch.cat(documents())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    logprobs = loss.model_logprobs(model, token_ids, positions, token_ids.roll(-1))
    return logprobs.detach(), gradients(logprobs, model)


def generate(family):
    """Return prompts, and the tokens and logprobs that the embedded engine continues them with.

    Prompts are computed in segments of 24 tokens, each from the state of the one before.
    """
    snapshots.SEGMENT_TOKENS = 24
    prompts = [document.tolist() for document in documents((50, 5))]
    params = SamplingParams(max_tokens=4)
    with rollout.TransformersEngine(make_model(family), seed=0, cache_tokens=512) as engine:
        found = asyncio.run(generate_all(engine, [(prompt, params) for prompt in prompts]))
    return [
        (prompt, one.token_ids.tolist(), torch.tensor(one.logprobs.tolist()))
        for prompt, one in zip(prompts, found, strict=True)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, family, path = sys.argv
    torch.save((*score(family), generate(family)), path)
