"""Clients of OpenAI and Anthropic at the gateway, sampled by vLLM while weights are published.

Fifty rollouts at once, and mini-swe-agent from PyPI: pip install mini-swe-agent && pytest
tests/vllm/test_gateway.py -m slow
"""

import asyncio
import contextlib
import time
from collections import Counter

import mini_swe_agent
import pytest
import torch
from api_clients import CLIENTS, anthropic, connections, openai
from chat_tokenizer import tool_call, trained
from forced_text import ForcedText

from primerl import models, rollout, serving, weights
from primerl.rollout import AgentLimits
from primerl.types import SamplingParams

WAIT_S = 900.0
TEXTS = ["Name a colour.", "Another, please.", "And a third."]


@pytest.fixture(scope="module")
def policy(smollm2):
    return models.load_pretrained(smollm2)


@contextlib.contextmanager
def publisher(server, policy):
    """The engine, and a function that publishes slightly other weights as a version."""
    model, _ = policy
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with serving.VLLMEngine(server) as engine:
        transport = weights.SharedMemory(model, engine)

        def publish(version):
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.mul_(1.0 + 1e-4 * version)
            transport.publish(version)

        try:
            yield engine, publish
        finally:
            model.load_state_dict(state)


def sampled(requests):
    """Each token with all that came before it, its logprob and its version."""
    return Counter(
        ((*prompt, *completion.token_ids.tolist()[: i + 1]), float(logprob), int(version))
        for prompt, completion in requests
        for i, (logprob, version) in enumerate(
            zip(completion.logprobs, completion.versions, strict=True)
        )
    )


async def converse(engine, tokenizer, publish, count):
    """Conversations of three turns, between which weights are published."""
    params = SamplingParams(max_tokens=8)
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


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_every_token_that_clients_saw_is_trained_once_with_its_version(
    server, policy, monkeypatch, count
):
    """So many rollouts at once."""
    with publisher(server, policy) as (engine, publish):
        recorded = ForcedText(engine, lambda *_: None, monkeypatch)
        played, said = asyncio.run(converse(recorded, policy[1], publish, count))

    assert len(recorded.requests) == count * 3
    assert trained([sample for one in played for sample in one.samples]) == sampled(
        recorded.requests
    )
    for number, one in enumerate(played):
        (sample,) = one.samples
        assert one.metrics["requests_answered"] == 3
        versions = sample.versions[sample.loss_mask].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        texts = [turn[number][0] for turn in said]
        replies = [m["content"] for m in one.conversation["messages"] if m["role"] == "assistant"]
        assert texts == replies


SCRIPT = [tool_call("look"), "It is open."]


def test_streams_and_whole_replies_with_calls_are_the_same(server, policy, monkeypatch):
    """All clients say the same, streamed or not, while weights change between and in replies."""
    _, tokenizer = policy

    def script(prompt, number):
        return SCRIPT["tool\n" in tokenizer.decode(prompt)]

    async def talk(session, client, stream, publish):
        chat = client(session, stream=stream)
        chat.say("Is the door open?")
        said = [await chat.reply()]
        if publish is not None:
            await asyncio.to_thread(publish, 1)
        chat.result(said[0][1][0], "The door is open.")
        answering = asyncio.create_task(chat.reply())
        if publish is not None:
            await asyncio.to_thread(publish, 2)
        said.append(await answering)
        return [(text, [call[1:] for call in calls], reason) for text, calls, reason in said]

    async def play(engine, publish):
        params = SamplingParams(max_tokens=128)
        async with (
            asyncio.timeout(WAIT_S),
            contextlib.AsyncExitStack() as stack,
            rollout.gateway(engine, tokenizer, params=params) as gateway,
            connections(),
        ):
            await asyncio.to_thread(publish, 0)
            sessions = [await stack.enter_async_context(gateway.open()) for _ in range(6)]
            said = await asyncio.gather(
                *(
                    talk(session, CLIENTS[i % 3], i % 2 == 0, publish if i == 0 else None)
                    for i, session in enumerate(sessions)
                )
            )
            for client, error in ((CLIENTS[0], openai), (CLIENTS[1], anthropic)):
                chat = client(sessions[0], key=f"{sessions[0].key}x")
                chat.say("Hello")
                with pytest.raises(error.AuthenticationError):
                    await chat.reply()
            return said, [session.rollout(reward=0.0) for session in sessions]

    with publisher(server, policy) as (engine, publish):
        forced = ForcedText(engine, script, monkeypatch)
        said, played = asyncio.run(play(forced, publish))

    call = ("", [("look", {})], "tool_calls")
    assert said == [[call, ("It is open.", [], "stop")]] * 6
    assert [len(one.samples) for one in played] == [1] * 6
    assert trained([sample for one in played for sample in one.samples]) == sampled(forced.requests)
    assert set(played[0].samples[0].versions.tolist()) > {-1, 0}
    # vLLM has sampled its own way through the text, which tokenizing the text anew would lose.
    ways = [completion.token_ids.tolist()[:-1] for _, completion in forced.requests]
    assert any(way != tokenizer.encode(tokenizer.decode(way)) for way in ways)


def test_a_client_that_leaves_ends_its_request_in_vllm(server, policy):
    async def play(engine):
        params = SamplingParams(max_tokens=700)  # half a minute
        async with (
            asyncio.timeout(WAIT_S),
            rollout.gateway(engine, policy[1], params=params) as gateway,
            connections(),
        ):
            async with gateway.open() as session:
                waiting = []
                for client in CLIENTS:
                    chat = client(session, stream=True)
                    chat.say("Count to a million.")
                    options = {"max_tokens": 700} if client.name == "messages" else {}
                    waiting.append(asyncio.create_task(chat.reply(**options)))
                await running(engine, 3)
                for task in waiting:
                    task.cancel()
                began = time.monotonic()
                await running(engine, 0)
                print(f"\nends within {time.monotonic() - began:.2f} s")
            return session

    async def running(engine, count):
        name = "vllm:num_requests_running"
        while sum(one[name] for one in (await asyncio.to_thread(engine.metrics)).values()) != count:
            await asyncio.sleep(0.05)

    with publisher(server, policy) as (engine, publish):
        publish(0)
        session = asyncio.run(play(engine))
    assert session.outcomes["disconnected"] == 3
    assert session.history.calls == []


@pytest.mark.slow
@mini_swe_agent.installed
def test_mini_swe_agent_is_trained_token_for_token(server, policy, monkeypatch):
    """Its replies are forced, its tokens sampled by vLLM, whose weights change after each."""
    _, tokenizer = policy
    commands = [
        "echo fixed > result.txt",
        "cat result.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]

    class Published(ForcedText):
        async def generate(self, prompt_ids, params, *, session=None):
            await asyncio.to_thread(publish, len(self.requests))
            return await super().generate(prompt_ids, params, session=session)

    def fixed(task, run):
        result = run.folder / "result.txt"
        assert result.exists(), run.output
        return float(result.read_text() == "fixed\n")

    # Its own instructions are longer than the context of the server that tests share.
    brief = "agent.instance_template=Solve this task with bash commands: {{task}}"
    environment = rollout.command_agent(
        mini_swe_agent.command_with(brief),
        tokenizer,
        reward=fixed,
        variables=mini_swe_agent.VARIABLES,
        limits=AgentLimits(max_turns=10, timeout_s=WAIT_S),
    )

    async def play(engine):
        try:
            task = {"id": "t", "prompt": "Write 'fixed' into result.txt."}
            return await environment(task, engine, SamplingParams(max_tokens=256))
        finally:
            await environment.aclose()

    with publisher(server, policy) as (engine, publish):
        forced = Published(
            engine, lambda _, number: tool_call("bash", command=commands[number]), monkeypatch
        )
        played = asyncio.run(play(forced))

    assert (played.stop, played.reward, played.metrics["turns"]) == ("stop", 1.0, 3)
    (sample,) = played.samples
    assert trained([sample]) == sampled(forced.requests)
    assert set(sample.versions[sample.loss_mask].tolist()) == {0, 1, 2}
    assert '"output": "fixed\\n"' in tokenizer.decode(sample.token_ids)
