"""How long a gateway's event loop is held up while one client sends large messages."""

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import pytest

from primerl import rollout, testing
from primerl.rollout import AgentLimits
from primerl.types import Completion, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
PARAMS = SamplingParams(max_tokens=64)
LARGE = 10_000_000  # characters
SECONDS = 10.0
CLIENT = """
import asyncio, json, sys
import aiohttp

async def main(url, key, body, count, pause):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        while True:
            async with http.post(url, data=body) as answer:
                await answer.read()
            await asyncio.sleep(pause)

async def all_of(url, key, size, count, pause):
    text = "What is it? " * (size // 12 + 1)
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    await asyncio.gather(*(main(url, key, body, count, pause) for _ in range(count)))

url, key, size, count, pause = sys.argv[1:]
asyncio.run(all_of(url, key, int(size), int(count), float(pause)))
"""


class Instant:
    """An engine that replies at once."""

    context_length = 1 << 17
    version = 0
    routes = None

    def __init__(self, tokenizer):
        self._reply = tokenizer.encode("It is a door.", add_special_tokens=False)
        self._reply.append(tokenizer.eos_token_id)

    async def generate(self, prompt_ids, params, *, session=None):  # noqa: ARG002
        await asyncio.sleep(0.2)
        return Completion(
            token_ids=self._reply,
            logprobs=[-1.0] * len(self._reply),
            versions=[0] * len(self._reply),
            finish_reason="stop",
        )


async def lags(tokenizer, size):
    """Return the event loop's lags in milliseconds while 50 clients and a large one send."""
    engine = Instant(tokenizer)
    found = []
    limits = AgentLimits(max_turns=10**6)
    async with (
        rollout.gateway(engine, tokenizer, params=PARAMS) as gateway,
        gateway.open(limits=limits) as small,
        gateway.open(limits=limits) as large,
    ):
        url = f"{gateway.url}/v1/chat/completions"
        clients = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, url, *arguments)
            for arguments in (
                (small.key, "2000", "50", "1.0"),
                (large.key, str(size), "1", "0.0"),
            )
        ]
        await asyncio.sleep(3.0)
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            begin = time.perf_counter()
            await asyncio.sleep(0.005)
            found.append(1000 * (time.perf_counter() - begin - 0.005))
        for client in clients:
            client.kill()
            await client.wait()
        answered = small.outcomes["answered"]
    return found, answered


@pytest.mark.parametrize("size", [100, 100_000, LARGE])
def test_the_loop_while_one_client_sends_large_messages(benchmark, tmp_path, size):
    from transformers import AutoTokenizer

    benchmark.group = "event loop of a gateway, 50 clients and one that sends large messages"
    folder = testing.smollm2(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    results = []

    def run():
        results.append(asyncio.run(lags(tokenizer, size)))

    benchmark.pedantic(run, rounds=1)
    found, answered = results[0]
    hundredths = statistics.quantiles(found, n=100)
    benchmark.extra_info |= {
        "p50 ms": round(hundredths[49], 1),
        "p99 ms": round(hundredths[98], 1),
        "max ms": round(max(found), 1),
        "requests answered": answered,
    }
    print(json.dumps(benchmark.extra_info))
