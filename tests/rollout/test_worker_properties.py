"""The counts balance and the bound holds, whatever fails and whenever a run is interrupted."""

import asyncio
import random

import pytest
from conftest import CharacterCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import filters, rollout, testing
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=4)
CODES = CharacterCodes()


def troubled(draw, trouble):
    """An environment of one to three turns in which, at random, everything goes wrong."""

    async def environment(task, engine, params):
        chat = rollout.Conversation(engine, CODES, params)
        for _ in range(draw.randint(1, 3)):
            await chat.turn("go on")
            fate = draw.random() / trouble if trouble else 1.0
            if fate < 0.02:
                await asyncio.sleep(3600)  # until its group is timed out or cancelled
            elif fate < 0.06:
                raise ConnectionError("lost")
            elif fate < 0.07:
                return {"reward": "much"}
            elif fate < 0.08:
                raise SystemExit(1)
            await asyncio.sleep(draw.random() * 0.004)
        if "poison" in task["id"]:
            raise ValueError("poison")
        return chat.rollout(reward=draw.randint(0, 2))

    return environment


def balanced(stats):
    ended = stats["trained"] + stats["dropped"] + stats["buffered"]
    return stats["started"] == ended + stats["in_flight"]


@pytest.mark.thorough
@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 3),
    on_stale=st.sampled_from(["drop", "wait", "mask_tokens"]),
    trouble=st.sampled_from([0.0, 0.3, 0.6]),
    retries=st.integers(0, 2),
    min_group=st.integers(1, 3),
    first=st.sampled_from([0, 1000]),
    interruptions=st.sets(st.integers(1, 9), max_size=3),
)
@settings(max_examples=20, deadline=None)
def test_the_accounts_balance_and_the_bound_holds(
    seed, bound, on_stale, trouble, retries, min_group, first, interruptions
):
    draw = random.Random(seed)
    engine = testing.ScriptedEngine(
        [[50, 51, 52, 53]],
        latency=lambda rng: 0.004 * rng.random(),
        failures=0.1 * trouble,
        seed=seed,
    )
    engine.update_weights({}, version=first)
    plan = {
        "params": PARAMS,
        "group_size": 3,
        "groups_per_step": 2,
        "max_staleness": bound,
        "on_stale": on_stale,
        "min_group": min_group,
        "retries": retries,
        "group_timeout_s": 1.0,
        "quarantine_after": 2,
        "keep": [filters.has_signal],
        "timeout_s": 30.0,
        "isolation": "thread",
    }
    tasks = [{"id": f"{n} poison" if n % 9 == 8 else str(n)} for n in range(5000)]
    state, step, taken, last = None, first, 0, {}
    while step < first + 10:
        environment = troubled(draw, trouble)
        with rollout.worker(engine, environment, tasks, state=state, **plan) as rollouts:
            while step < first + 10:
                for group in rollouts.take(version=step):
                    staleness = step - group.versions
                    assert 0 <= staleness.min()
                    assert staleness.max() <= bound
                    assert min_group <= len(group.rollouts) <= 3
                    assert filters.has_signal(group)
                    taken += 1
                step += 1
                engine.update_weights({}, version=step)
                stats = rollouts.stats()
                assert balanced(stats)
                assert stats["trained"] == taken == 2 * (step - first)
                held = stats["in_flight"] + stats["buffered"]
                assert held <= 2 * (bound + 1)
                assert all(stats["dropped_by"].get(name, 0) >= last[name] for name in last)
                last = stats["dropped_by"]
                if step - first in interruptions:
                    interruptions = interruptions - {step - first}
                    break
            state = rollouts.state()
        final = rollouts.stats()
        assert balanced(final)
        assert final["in_flight"] == 0
    if on_stale == "wait":
        assert "stale" not in final["dropped_by"]
