"""Clients of OpenAI and Anthropic at the gateway, sampled by vLLM while weights are published."""

import asyncio

import pytest
import torch
from api_clients import CLIENTS, connections
from chat_tokenizer import trained

from primerl import models, rollout, weights
from primerl.types import SamplingParams

UPDATES = 2
WAIT_S = 300.0
TEXTS = ["Name a colour.", "Another, please.", "And a third."]


class Recorded:
    """An engine whose requests are kept."""

    def __init__(self, engine):
        self._engine = engine
        self.requests = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, prompt_ids, params, *, session=None):
        prompt = list(prompt_ids)
        completion = await self._engine.generate(prompt_ids, params, session=session)
        self.requests.append((prompt, completion))
        return completion


@pytest.fixture(scope="module")
def policy(smollm2):
    return models.load_pretrained(smollm2)


async def converse(engine, tokenizer, publish, count):
    """Conversations of three turns, between which weights are published."""
    params = SamplingParams(max_tokens=12)
    async with (
        asyncio.timeout(WAIT_S),
        rollout.gateway(engine, tokenizer, params=params) as gateway,
        connections(),
    ):
        opened = [gateway.open() for _ in range(count)]
        sessions = [await one.__aenter__() for one in opened]
        chats = [
            CLIENTS[number % 3](session, stream=number % 2 == 1)
            for number, session in enumerate(sessions)
        ]
        said = []
        for version, text in enumerate(TEXTS):
            await asyncio.to_thread(publish, version)
            for chat in chats:
                chat.say(text)
            said.append(await asyncio.gather(*(chat.reply() for chat in chats)))
        for one in opened:
            await one.__aexit__(None, None, None)
        return [session.rollout(reward=0.0, keep_conversation=True) for session in sessions], said


def test_every_token_that_clients_saw_is_trained_once_with_its_version(server, policy):
    model, tokenizer = policy
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with rollout.VLLMEngine(server) as engine:
        transport = weights.SharedMemory(model, engine)

        def publish(version):
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.mul_(1.0 + 1e-4 * version)
            transport.publish(version)

        recorded = Recorded(engine)
        played, said = asyncio.run(converse(recorded, tokenizer, publish, 12))
        model.load_state_dict(state)

    sampled = [
        ((*prompt, *completion.token_ids.tolist()[: i + 1]), float(logprob), int(version))
        for prompt, completion in recorded.requests
        for i, (logprob, version) in enumerate(
            zip(completion.logprobs, completion.versions, strict=True)
        )
    ]
    assert trained([sample for one in played for sample in one.samples]) == {
        one: sampled.count(one) for one in sampled
    }
    assert len(recorded.requests) == 12 * 3
    for number, one in enumerate(played):
        (sample,) = one.samples
        assert one.metrics["requests_answered"] == 3
        versions = sample.versions[sample.loss_mask].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        texts = [turn[number][0] for turn in said]
        replies = [m["content"] for m in one.conversation["messages"] if m["role"] == "assistant"]
        assert texts == replies
