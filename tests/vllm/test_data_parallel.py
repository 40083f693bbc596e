"""A server of two data-parallel ranks: pinned sessions, new weights on both ranks, a restart."""

import asyncio
import contextlib
import os
import signal

import numpy as np
import pytest
from publishing import train
from waiting import until

from primerl import models, serving, weights
from primerl.types import SamplingParams

pytestmark = pytest.mark.slow  # seven processes
TURNS, SESSIONS, ADDED = 6, 7, 64  # an odd number, of which a rotation pins none
QUERIED, HIT = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


async def play(engine, sessions, seed):
    """Turns of several sessions at once: each prompt continues that of the turn before."""
    draws = np.random.default_rng(seed)
    prompts = [draws.integers(0, 512, ADDED).tolist() for _ in sessions]
    for _ in range(TURNS):
        params = SamplingParams(max_tokens=4)
        calls = [
            engine.generate(prompt, params, session=session)
            for prompt, session in zip(prompts, sessions, strict=True)
        ]
        for prompt, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
            added = draws.integers(0, 512, ADDED - len(answer.token_ids))
            prompt += [*answer.token_ids.tolist(), *added.tolist()]


def cached_share(engine, sessions, seed):
    """Return the share of the tokens that the cache could have, which it had.

    In turn t, counted from 0, it could have t blocks of the t + 1 that a prompt has.
    """

    def read():
        (ranks,) = engine.rank_metrics().values()
        assert len(ranks) == 2
        return np.array([[rank[QUERIED], rank[HIT]] for rank in ranks.values()])

    before = read()
    asyncio.run(play(engine, sessions, seed))
    queried, hit = (read() - before).T
    if sessions[0] is not None:
        assert min(queried) > 0, "both ranks served"
    return sum(hit) / (sum(queried) * sum(range(TURNS)) / sum(range(1, TURNS + 1)))


def test_two_data_parallel_ranks(dense, two_ranks, tmp_path):
    model, _ = models.load_pretrained(dense)
    with contextlib.closing(serving.VLLMEngine(two_ranks)) as engine:
        transport = weights.Disk(model, engine, folder=tmp_path / "w", encoding="delta")
        kinds = []
        for version in (1, 2):
            train(model, scale=0.05, fraction=0.01, seed=version)
            receipt = transport.publish(version)
            kinds.append(receipt.kind)
            ((first,),) = receipt.servers.values()  # vLLM answers only for the first rank
            assert first["digest"] == receipt.digest
        assert kinds == ["full", "delta"]
        weights.Canary(model, engine).check(2)

        sessions = [f"rollout-{number}" for number in range(SESSIONS)]
        pinned = cached_share(engine, sessions, seed=1)
        free = cached_share(engine, [None] * SESSIONS, seed=2)
        print(f"cached: {pinned:.3f} of the tokens with sessions, {free:.3f} without")
        assert pinned >= 0.95
        assert free < 0.9

        os.kill(two_ranks.pid, signal.SIGKILL)
        until(lambda: not engine.servers()[0]["alive"])
        two_ranks.restart()
        until(lambda: engine.servers()[0]["serving"], within_s=300)
        (row,) = engine.servers()
        assert (row["version"], row["ranks"]) == (2, 2)
        weights.Canary(model, engine).check(2)
