"""The load that vLLM reports, and how many rollouts the worker keeps in flight by it."""

import asyncio

import pytest

from primerl import serving
from primerl.rollout import AdaptiveConcurrency
from primerl.rollout.collection.concurrency import follow_load, load_of
from primerl.types import SamplingParams

WAIT_S = 300.0


@pytest.mark.slow
def test_the_cap_grows_with_room_and_shrinks_with_a_queue(server):
    """The server decodes 32 requests at once."""

    async def play(engine):
        def ask(count):
            params = SamplingParams(max_tokens=900)
            prompts = [[5 + number] * 8 for number in range(count)]
            return [asyncio.create_task(engine.generate(one, params)) for one in prompts]

        async def follow(flying, until):
            caps = []
            settings = AdaptiveConcurrency(cap=float(flying), every_s=0.2)
            following = asyncio.create_task(
                follow_load(
                    engine,
                    settings,
                    training=lambda: flying,
                    evaluated=lambda: 0,
                    apply=caps.append,
                )
            )
            while not (caps and until(caps)):
                assert not following.done()
                await asyncio.sleep(0.05)
            following.cancel()

        async with asyncio.timeout(WAIT_S):
            tasks = ask(2)
            await follow(2, lambda caps: caps[-1] > 2.2)
            tasks += ask(60)
            await follow(62, lambda caps: caps[-1] < 60)
            load, _ = load_of(engine.metrics(), in_flight=62, preempted=0.0)
            for task in tasks:
                task.cancel()
        return load

    with serving.VLLMEngine(server) as engine:
        engine.adopt(0)
        load = asyncio.run(play(engine))
    assert load.queued > 0
    assert 0 < load.kv_use < 1
