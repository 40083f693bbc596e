"""Rollouts per second of ``rollout.on_ray``, and their cost for the process of the worker.

    python -m pytest bench/test_ray.py -s -m "" -o addopts=--import-mode=importlib

The engine has no model and is portable: completions are made where the environment is. A rollout
has two turns; its tokens come back in one ``Sample``.
"""

import asyncio
import importlib.util
import time

import numpy as np
import pytest

from primerl import rollout
from primerl.rollout.processes.channel import IncomingMessage
from primerl.rollout.processes.loop_lag import LoopLag
from primerl.types import NOT_SAMPLED, Completion, Rollout, Sample, SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)
ACTORS, TOKENS = (1, 2, 4, 8), (1024, 16_384, 131_072)


class Tokens:
    """A portable engine that returns as many tokens as are asked for, at once."""

    portable = True
    version = 0
    context_length = 1 << 20

    async def generate(self, prompt_ids, params, *, session=None):  # noqa: ARG002
        return Completion(
            token_ids=np.full(params.max_tokens, 7),
            logprobs=np.full(params.max_tokens, -1.0),
            versions=np.zeros(params.max_tokens, np.int32),
            finish_reason="length",
        )


async def two_turns(task, engine, params):  # noqa: ARG001
    first = await engine.generate([2, 3], params)
    second = await engine.generate([2, 3, *first.token_ids[:8]], params)
    sampled = len(first.token_ids) + len(second.token_ids)
    return Rollout(
        samples=[
            Sample(
                token_ids=np.concatenate([[2, 3], first.token_ids, second.token_ids]),
                loss_mask=np.arange(sampled + 2) >= 2,
                behavior_logprobs=np.concatenate([[0, 0], first.logprobs, second.logprobs]),
                versions=np.concatenate([[NOT_SAMPLED] * 2, first.versions, second.versions]),
            )
        ],
        reward=1.0,
    )


async def measure(environment, engine, *, tokens, rollouts, in_flight):
    """Return rollouts/s, and the process's CPU ms per rollout and its event loop's lag in ms."""
    params = SamplingParams(max_tokens=tokens // 2)
    places = asyncio.Semaphore(in_flight)

    async def play():
        async with places:
            await environment({}, engine, params)

    await asyncio.gather(*(play() for _ in range(in_flight)))  # starts the actors
    lag = LoopLag()
    watching = asyncio.create_task(lag.run())
    began, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(play() for _ in range(rollouts)))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    watching.cancel()
    await asyncio.wait([watching])
    return rollouts / wall_s, 1e3 * cpu_s / rollouts, 1e3 * lag.p99_s


def test_cost_of_a_rollout_for_the_worker(monkeypatch):
    received = 0
    add = IncomingMessage.add

    def counted(self, frame):
        nonlocal received
        received += len(frame)
        return add(self, frame)

    monkeypatch.setattr(IncomingMessage, "add", counted)
    print("\n| actors | tokens | rollouts/s | CPU ms per rollout | bytes per token | lag p99, ms |")
    print("|---|---|---|---|---|---|")
    for actors in ACTORS:
        environment = rollout.on_ray(two_turns, actors=actors, rollouts_per_actor=8)

        async def run(environment=environment, actors=actors):
            nonlocal received
            try:
                for tokens in TOKENS:
                    count = 64 if tokens > 100_000 else 256
                    received = 0
                    rate, cpu_ms, lag_ms = await measure(
                        environment, Tokens(), tokens=tokens, rollouts=count, in_flight=8 * actors
                    )
                    each = received / (count + 8 * actors) / tokens
                    print(
                        f"| {actors} | {tokens:,} | {rate:.0f} | {cpu_ms:.1f} | {each:.1f} | "
                        f"{lag_ms:.0f} |"
                    )
            finally:
                await environment.aclose()

        asyncio.run(run())
