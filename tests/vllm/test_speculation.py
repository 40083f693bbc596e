"""A server of two tensor-parallel workers that drafts tokens from n-grams, under weight updates.

Drafts don't change what is sampled: every logprob is that of the version that the token names.
Interpreted kernels sample a few tokens a second.
"""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
import torch
from publishing import logprobs_of, train

from primerl import models, serving, weights
from primerl.types import SamplingParams

pytestmark = pytest.mark.slow  # four processes
CLOSE = 2e-5  # of logprobs in float32
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Policy:
    """A model that repeats itself, so that some drafts are accepted, and its published versions."""

    def __init__(self, folder):
        self.model, _ = models.load_pretrained(folder)
        self.versions = {}
        with torch.no_grad():
            self.model.lm_head.weight.mul_(4)

    def train(self, version):
        train(self.model, scale=0.05, fraction=0.01, seed=version)
        self.versions[version] = {k: v.clone() for k, v in self.model.state_dict().items()}

    def errors(self, prompt, answer, temperature):
        """Return the differences between a completion's logprobs and those of its versions."""
        ids = prompt + answer.token_ids.tolist()
        found = np.zeros(len(answer.token_ids))
        for version in {*answer.versions.tolist()}:
            self.model.load_state_dict(self.versions[version])
            own = logprobs_of(self.model, ids, temperature=temperature)[len(prompt) :].numpy()
            chosen = answer.versions == version
            found[chosen] = np.abs(own - answer.logprobs)[chosen]
        return found


def accepted(engine):
    (values,) = engine.metrics().values()
    return values[ACCEPTED]


async def sample(engine, prompts, temperature, tokens):
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))


def test_two_workers_with_drafts(dense, drafting_server, tmp_path):
    policy = Policy(dense)
    prompts = [[5, 6, 7, 8 + number] * 10 for number in range(8)]
    with contextlib.closing(serving.VLLMEngine(drafting_server)) as engine:
        transport = weights.Disk(policy.model, engine, folder=tmp_path / "w", encoding="delta")
        for version, kind in ((1, "full"), (2, "delta")):
            policy.train(version)
            receipt = transport.publish(version)
            assert receipt.kind == kind
            ((one, two),) = receipt.servers.values()
            assert one["digest"] == two["digest"] == receipt.digest
        weights.Canary(policy.model, engine).check(2)

        before = accepted(engine)
        for temperature in (1.0, 0.7):
            answers = asyncio.run(sample(engine, prompts, temperature, 24))
            errors = [
                policy.errors(*one, temperature) for one in zip(prompts, answers, strict=True)
            ]
            print(f"T={temperature}: within {np.max(errors):.2g}, {accepted(engine)} accepted")
            assert np.max(errors) < CLOSE
        assert accepted(engine) > before

        async def overtaken():
            sampling = asyncio.create_task(sample(engine, prompts, 1.0, 48))
            while not engine.servers()[0]["in_flight"]:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            policy.model.load_state_dict(policy.versions[2])
            policy.train(3)
            await asyncio.to_thread(transport.publish, 3)
            return await sampling

        before = accepted(engine)
        answers = asyncio.run(overtaken())
        assert accepted(engine) > before
        pairs = {pair for one in answers for pair in itertools.pairwise(one.versions.tolist())}
        assert pairs == {(2, 2), (2, 3), (3, 3)}
        errors = [policy.errors(*one, 1.0) for one in zip(prompts, answers, strict=True)]
        print(f"overtaken: within {np.max(errors):.2g}")
        assert np.max(errors) < CLOSE
