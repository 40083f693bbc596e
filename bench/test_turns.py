r"""Turns of long conversations: calls per CPU second, bytes per turn, event-loop lag.

    python -m pytest bench/test_turns.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

The path is ``Conversation.turn``, ``VLLMEngine`` and HTTP, to a server without a model in a process
of its own: uvicorn, as vLLM uses it, which answers each prompt with 64 tokens. CPU seconds are
those of the client's process, all threads. On a busy machine the loop lags because it does not run;
how long it holds others up is then the CPU time of its iterations. With TURNS_PLAIN=1 the server
does not keep prompts, as one that was not started by primerl.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from primerl import rollout, serving, testing
from primerl.types import SamplingParams

CONTEXT = 1 << 18
LETTERS = "".join(map(chr, range(0x4E00, 0x9E00)))  # 20,480 token ids, most of five digits
NEW, SAMPLED = 192, 64  # tokens that a turn appends, and that the policy replies
PLAIN = os.environ.get("TURNS_PLAIN") == "1"


def answers(prompt_tokens, request_id):
    tokens = [20_000] * SAMPLED
    return {
        "request_id": f"generate-tokens-{request_id}",
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": SAMPLED},
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "token_ids": tokens,
                "logprobs": {"content": [{"token_id": t, "logprob": -1.0} for t in tokens]},
                "weight_versions": [{"version": "bench-0", "start": 0, "end": SAMPLED}],
            }
        ],
    }


class Server:
    """The routes of vLLM that a client needs, as an ASGI application; it counts bytes."""

    def __init__(self):
        self.received = 0

    async def counted(self, scope, receive, send):
        """Count the bytes of requests before a middleware has read them."""

        async def count():
            message = await receive()
            self.received += len(message.get("body", b""))
            return message

        await self.inner(scope, count, send)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        parts = []
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        path = scope["path"]
        if path == "/inference/v1/generate":
            begin = body.index(b"[", body.index(b'"token_ids"'))
            count = body.count(b",", begin, body.index(b"]", begin)) + 1
            at = body.index(b'"request_id":"') + 14
            answer = answers(count, body[at : body.index(b'"', at)].decode())
        elif path == "/weight_info":
            answer = {"weight_version": "bench-0"}
        elif path == "/v1/models":
            answer = {"data": [{"id": "bench", "max_model_len": CONTEXT}]}
        elif path == "/received":
            answer = {"received": self.received}
        else:
            answer = {"results": [{"vocab_size": 1 << 20}]}
        content = json.dumps(answer).encode()
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def serve():
    """Serve until standard input ends; print the port."""
    import socket

    import uvicorn

    app = Server()
    app.inner = app
    if not PLAIN:
        try:
            from primerl.serving.server.kept_prompts import KeepPrompts
        except ImportError:
            pass
        else:
            app.inner = KeepPrompts(app)
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # without it, asyncio sets no TCP_NODELAY
    sock.bind(("127.0.0.1", 0))
    print(sock.getsockname()[1], flush=True)
    server = uvicorn.Server(
        uvicorn.Config(app.counted, interface="asgi3", log_level="warning", lifespan="off")
    )
    asyncio.run(server.serve([sock]))


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("uvicorn")
    program = [sys.executable, __file__]
    with subprocess.Popen(program, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as server:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


@pytest.fixture
def engine(url):
    with serving.VLLMEngine(url, run="bench") as one:
        yield one


def received(engine):
    (answer,) = engine.call("/received", None).values()
    return answer["received"]


def text(tokens):
    return "".join(random.Random(0).choices(LETTERS, k=tokens))


def begin(engine, tokenizer, tokens):
    params = SamplingParams(max_tokens=SAMPLED)
    return rollout.Conversation(engine, tokenizer, params, session=random.randbytes(8).hex()), text(
        tokens
    )


@pytest.mark.parametrize("tokens", [2048, 16_384, 65_536, 131_072])
def test_turns(benchmark, engine, tokens):
    """One rollout, turn after turn."""
    benchmark.group = f"a turn after {tokens} tokens"
    tokenizer = testing.character_tokenizer(LETTERS)
    new, turns = text(NEW), 40

    async def play():
        chat, opening = begin(engine, tokenizer, tokens)
        await chat.turn(opening)
        bytes_before, cpu, wall = received(engine), time.process_time(), time.perf_counter()
        for _ in range(turns):
            await chat.turn(new)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / turns, wall / turns, (received(engine) - bytes_before) / turns

    asyncio.run(play())
    measured = []
    benchmark.pedantic(lambda: measured.append(asyncio.run(play())), rounds=3)
    cpu, wall, size = (statistics.median(column) for column in zip(*measured, strict=True))
    benchmark.extra_info |= {
        "calls per CPU second": round(1 / cpu),
        "ms CPU": round(1000 * cpu, 3),
        "ms wall": round(1000 * wall, 3),
        "bytes per turn": round(size),
    }
    print(f"\n{tokens} tokens: {benchmark.extra_info}")


class CountedLoop(asyncio.SelectorEventLoop):
    """An event loop that notes the CPU seconds of each of its iterations in its thread."""

    def __init__(self):
        super().__init__()
        self.held = []

    def _run_once(self):
        began = time.thread_time()
        super()._run_once()
        self.held.append(time.thread_time() - began)


@pytest.mark.parametrize("rollouts", [64])
def test_lag_of_the_event_loop(benchmark, engine, rollouts):
    """Rollouts at 131k tokens at once; each waits between turns, as for a tool."""
    from primerl.rollout.processes.loop_lag import LoopLag

    benchmark.group = "64 rollouts at 131k tokens"
    tokenizer = testing.character_tokenizer(LETTERS)
    new = text(NEW)
    params = SamplingParams(max_tokens=SAMPLED)

    async def play():
        opening = text(131_072)
        lag = LoopLag()

        async def one(number):
            chat = rollout.Conversation(engine, tokenizer, params, session=f"{number}")
            await chat.turn(opening)
            opened.release()
            await started.wait()
            for _ in range(10):
                await asyncio.sleep(random.uniform(0.5, 1.5))
                await chat.turn(new)

        opened, started = asyncio.Semaphore(0), asyncio.Event()
        tasks = [asyncio.create_task(one(n)) for n in range(rollouts)]
        for _ in range(rollouts):
            await opened.acquire()
        measuring = asyncio.create_task(lag.run())
        asyncio.get_running_loop().held.clear()
        cpu = time.process_time()
        started.set()
        await asyncio.gather(*tasks)
        measuring.cancel()
        cpu = (time.process_time() - cpu) / rollouts / 10
        return lag, np.array(asyncio.get_running_loop().held), cpu

    def measured():
        with asyncio.Runner(loop_factory=CountedLoop) as runner:
            return runner.run(play())

    lag, held, cpu = benchmark.pedantic(measured, rounds=1)
    benchmark.extra_info |= {
        "p99 ms": 1000 * lag.p99_s,
        "max ms": 1000 * lag.max_s,
        "p99 of the CPU ms of an iteration": 1000 * float(np.quantile(held, 0.99)),
        "max": 1000 * float(held.max()),
        "CPU ms of a turn": 1000 * cpu,
    }
    print(f"\nlag: {benchmark.extra_info}")


if __name__ == "__main__":
    serve()
