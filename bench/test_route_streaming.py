"""Lag of event loops while 1 GB of expert routes passes through one engine client.

    pytest bench/test_route_streaming.py -o addopts=--import-mode=importlib --benchmark-only -s

A server in another process answers like vLLM, with the shape of GLM-5: routes of 78 decoder layers,
8 of 256 experts each, as base64 within JSON. The client's process is like a worker's: its main
event loop awaits completions. The lag of that loop and of the client's own loop is measured. The
store copies the rows, like a store in shared memory. As in a worker, earlier objects are excluded
from garbage collection. Peak memory is in units of the routes of one response; ROUTES_AT_ONCE
responses are in flight, and one or two are copied at a time. *Before* is a client that reads the
response as a whole and decodes the JSON and then the base64, all on the event loop.

*Worker* is the whole path: the process of a rollout worker, and a store in shared memory, which
compresses the rows. ``idle`` is the lag of an idle event loop in another process, which shows the
effect of the machine's load. ``trainer_heap`` is the peak of Python's heap in the process of rank 0
over the same time.

The environment variables ROUTES_GB, ROUTES_PROMPT, ROUTES_SAMPLED and ROUTES_AT_ONCE set other
sizes.
"""

import asyncio
import base64
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import resource
import time
import tracemalloc

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from primerl import replay, rollout, serving
from primerl.rollout.processes.loop_lag import LoopLag
from primerl.types import Rollout, Sample, SamplingParams

GIGABYTES = float(os.environ.get("ROUTES_GB", 1))
PROMPT = int(os.environ.get("ROUTES_PROMPT", 127_000))
SAMPLED = int(os.environ.get("ROUTES_SAMPLED", 4_000))
AT_ONCE = int(os.environ.get("ROUTES_AT_ONCE", 4))
LAYERS, K = 78, 8
ROWS = PROMPT + SAMPLED - 1
REQUESTS = max(AT_ONCE, round(GIGABYTES * 1e9 / (ROWS * LAYERS * K)))
PERIOD_S = 0.002


def answer(label):
    """Return the parts of a response: up to the request's id, up to the routes, routes, end."""
    rows = np.random.default_rng(0).integers(0, 32, (ROWS, LAYERS, K), np.uint8)
    rows += 32 * np.arange(K, dtype=np.uint8)  # distinct experts per token
    file = io.BytesIO()
    np.save(file, rows)
    entry = {"token": "token_id:77", "logprob": -1.25, "bytes": None, "top_logprobs": []}
    choice = {
        "index": 0,
        "logprobs": {"content": [entry] * SAMPLED},
        "finish_reason": "length",
        "token_ids": [77] * SAMPLED,
        "weight_versions": [{"version": label, "start": 0, "end": SAMPLED}],
    }
    end = json.dumps({"choices": [choice]}, separators=(",", ":"))
    end = end.removeprefix('{"choices":[{').encode()
    return b'","choices":[{"routed_experts":"', base64.b64encode(file.getvalue()) + b'",', end


def serve(pipe):
    """Serve requests, in a separate process, until killed."""
    state = {"label": "default"}
    numbers = itertools.count()
    parts = []

    async def generate(request):
        body = await request.json()
        begin, routes, end = parts
        begin = f'{{"request_id":"{body["request_id"]}'.encode() + begin
        size = len(begin) + len(routes) + len(end)
        response = web.StreamResponse(headers={"Content-Length": str(size)})
        await response.prepare(request)
        await response.write(begin + routes[:176])
        # Vary three experts of the first token, so that all prompts differ and none is
        # deduplicated.
        number = next(numbers) % 32
        await response.write(base64.b64encode(bytes(number + 32 * at for at in (4, 5, 6))))
        for at in range(180, len(routes), 1 << 20):
            await response.write(routes[at : at + (1 << 20)])
        await response.write(end)
        return response

    async def adopt(request):
        state["label"] = (await request.json())["new_version"]
        parts[:] = answer(state["label"])
        return web.json_response({})

    async def other(_):
        return web.json_response(
            {
                "weight_version": state["label"],
                "data": [{"id": "glm", "max_model_len": PROMPT + SAMPLED}],
                "results": [{"vocab_size": 1000, "loaded": False}],
            }
        )

    async def main():
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/inference/v1/generate", generate)
        application.router.add_post("/update_weight_version", adopt)
        application.router.add_route("*", "/{path:.*}", other)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.sleep(3600)

    asyncio.run(main())


@pytest.fixture(scope="module")
def url():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    assert here.poll(60)
    yield here.recv()
    process.kill()
    process.join()


class CopyingStore:
    def put(self, rows, **_):
        assert rows.shape == (ROWS, LAYERS, K)
        np.copyto(np.empty_like(rows), rows)
        return ("fake:0",)

    def check(self, sample):
        pass


async def watch(lags):
    """Record how late timers fire, until cancelled."""
    while True:
        due = time.perf_counter() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        lags.append(time.perf_counter() - due)


def idle(pipe):
    """Run an idle event loop, in a separate process, and send its lag on request."""

    async def main():
        lag = LoopLag()
        measuring = asyncio.create_task(lag.run())
        while not pipe.poll():
            await asyncio.sleep(0.1)
        measuring.cancel()
        pipe.send(
            {"idle_p99_ms": round(1e3 * lag.p99_s, 1), "idle_max_ms": round(1e3 * lag.max_s, 1)}
        )

    asyncio.run(main())


@pytest.fixture
def idle_lag():
    """Start an idle loop; return a function that ends it and returns its lag."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=idle, args=(there,), daemon=True)
    process.start()

    def ended():
        here.send(None)
        assert here.poll(60)
        return here.recv()

    yield ended
    process.kill()
    process.join()


def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(benchmark, seconds, before, **lags):
    benchmark.extra_info["peak_copies"] = round((resident() - before) / (ROWS * LAYERS * K), 1)
    benchmark.extra_info["requests"] = REQUESTS
    benchmark.extra_info["gigabytes"] = round(REQUESTS * ROWS * LAYERS * K / 1e9, 2)
    benchmark.extra_info["mb_per_s"] = round(REQUESTS * ROWS * LAYERS * K / 1e6 / seconds)
    for name, values in lags.items():
        benchmark.extra_info |= {
            f"{name}_p50_ms": round(1e3 * float(np.quantile(values, 0.5)), 1),
            f"{name}_p99_ms": round(1e3 * float(np.quantile(values, 0.99)), 1),
            f"{name}_max_ms": round(1e3 * max(values), 1),
        }
    print(f"\n{benchmark.extra_info}")


def in_parallel(request):
    """Send all requests, AT_ONCE at a time, and measure the lag of this event loop."""

    async def main():
        lags, left = [], iter(range(REQUESTS))

        async def client(number):
            await asyncio.sleep(0.1 * number)
            for _ in left:
                await request()

        watcher = asyncio.create_task(watch(lags))
        await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
        watcher.cancel()
        return lags

    return main()


def test_routes_through_the_engine(benchmark, url):
    engine = serving.VLLMEngine(url, routes=CopyingStore(), request_timeout_s=3600)
    prompt = [1] * PROMPT
    params = SamplingParams(max_tokens=SAMPLED)

    async def request():
        completion = await engine.generate(prompt, params)
        assert completion.routes == ("fake:0",)

    with engine, asyncio.Runner() as runner:
        engine.adopt(0)
        client_lags = []
        watcher = engine._connected().loop.submit(watch(client_lags))
        gc.collect()
        gc.freeze()
        before = resident()
        lags = benchmark.pedantic(lambda: runner.run(in_parallel(request)), rounds=1)
        watcher.cancel()
    gc.unfreeze()
    report(benchmark, benchmark.stats.stats.mean, before, lag=lags, client_lag=client_lags)


async def one_reply(task, engine, params):
    """Environment with prompts of token ids; like an agent's, its tokens are in arrays."""
    prompt = np.ones(PROMPT, np.int32)
    completion = await engine.generate(prompt, params)
    count = len(completion.token_ids)
    sample = Sample(
        token_ids=np.concatenate([prompt, completion.token_ids]),
        loss_mask=np.arange(PROMPT + count) >= PROMPT,
        behavior_logprobs=np.concatenate([np.zeros(PROMPT, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(PROMPT, -1, np.int32), completion.versions]),
        routes=completion.routes,
    )
    return Rollout(samples=[sample], reward=float(task["id"]))


def test_routes_through_the_worker(benchmark, url, idle_lag):
    shape = replay.RouteShape(layers=range(3, LAYERS), decoder_layers=LAYERS, experts=256, k=K)
    with (
        replay.Store(shape) as store,
        serving.VLLMEngine(url, routes=store, request_timeout_s=3600) as engine,
    ):
        engine.adopt(0)
        with rollout.worker(
            engine,
            one_reply,
            [{"id": str(number)} for number in range(REQUESTS)],
            params=SamplingParams(max_tokens=SAMPLED),
            group_size=AT_ONCE,
            groups_per_step=math.ceil(REQUESTS / AT_ONCE),
            max_staleness=0,
        ) as rollouts:
            tracemalloc.start()
            groups = benchmark.pedantic(lambda: rollouts.take(version=0), rounds=1)
            _, heap = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            stats = rollouts.stats()
            machine = idle_lag()
        samples = [one for group in groups for rollout in group.rollouts for one in rollout.samples]
        found = [replay.read(one, span=(0, ROWS)) for one in samples[-1].routes]
        assert sum(len(one.rows) for one in found) == ROWS
        assert stats["errors"] == {}
        samples_bytes = sum(
            one.token_ids.nbytes + one.behavior_logprobs.nbytes + one.versions.nbytes
            for one in samples
        )
        references = sum(len(one) for sample in samples for one in sample.routes)
        assert replay.discard(samples) == 2 * len(samples)
    seconds = benchmark.stats.stats.mean
    raw = len(samples) * ROWS * LAYERS * K
    benchmark.extra_info |= {
        "gigabytes": round(raw / 1e9, 2),
        "mb_per_s": round(raw / 1e6 / seconds),
        "lag_p99_ms": round(1e3 * stats["loop_lag_p99_s"], 1),
        "lag_max_ms": round(1e3 * stats["loop_lag_max_s"], 1),
        **machine,
        "trainer_heap_mb": round(heap / 1e6, 1),
        "tokens_and_logprobs_mb": round(samples_bytes / 1e6, 1),
        "references_kb": round(references / 1e3, 1),
    }
    print(f"\n{benchmark.extra_info}")


def test_before(benchmark, url):
    prompt = [1] * PROMPT

    async def request():
        body = {"request_id": "x", "token_ids": prompt}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/inference/v1/generate", json=body) as response,
        ):
            choice = json.loads(await response.read())["choices"][0]
        rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True)))
        CopyingStore().put(rows, start=0, versions=None)

    before = resident()
    with asyncio.Runner() as runner:
        lags = benchmark.pedantic(lambda: runner.run(in_parallel(request)), rounds=1)
    report(benchmark, benchmark.stats.stats.mean, before, lag=lags)
