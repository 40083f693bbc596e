"""A rollout worker on a fleet of servers that die, hang, answer wrongly, leave and join.

The environment variables CHAOS_SEEDS (``"0 1 2"``) and CHAOS_SECONDS set other schedules.
"""

import asyncio
import itertools
import os
import random
import time
from collections import Counter

import attrs
import pytest
from chaos import Chaos, draw_events

from primerl import rollout, serving
from primerl.types import NOT_SAMPLED, Rollout, Sample, SamplingParams

LENGTHS = (8, 16, 32, 64)
PROMPT = (1, 2, 3)
SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "2").split()]


def seconds(default):
    return float(os.environ.get("CHAOS_SECONDS", default))


@pytest.fixture
def hasty(monkeypatch):
    """Shorten all time limits to those of a short test."""
    for module, name, value in (
        ("servers", "QUIET_S", 1.0),
        ("servers", "IDLE_S", 1.0),
        ("servers", "STALLED_S", 2.0),
        ("fleet", "SILENT_S", 4.0),
        ("stalls", "LOOK_S", 0.5),
        ("circuit_breaker", "FIRST_OPEN_S", 0.5),
        ("circuit_breaker", "MOST_OPEN_S", 2.0),
    ):
        monkeypatch.setattr(f"primerl.serving.client.{module}.{name}", value)


# ---- training ----


async def converse(task, engine, params):
    """Play one to three turns; the sample is the whole conversation."""
    draw = random.Random(task["id"])
    token_ids, mask, logprobs, versions = list(PROMPT), [False] * 3, [0.0] * 3, [NOT_SAMPLED] * 3
    for _ in range(draw.randint(1, 3)):
        turn = attrs.evolve(params, max_tokens=draw.choice(LENGTHS))
        answer = await engine.generate(token_ids, turn, session=task["id"])
        token_ids = [*token_ids, *answer.token_ids.tolist(), *PROMPT]
        mask += [True] * len(answer.token_ids) + [False] * 3
        logprobs += [*answer.logprobs.tolist(), 0.0, 0.0, 0.0]
        versions += [*answer.versions.tolist(), *[NOT_SAMPLED] * 3]
    sample = Sample(
        token_ids=token_ids, loss_mask=mask, behavior_logprobs=logprobs, versions=versions
    )
    return Rollout(samples=[sample], reward=1.0)


def turns_of(sample):
    """Yield the sampled tokens of each turn, and their versions."""
    columns = (sample.loss_mask, sample.token_ids, sample.versions)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for sampled, turn in itertools.groupby(rows, key=lambda row: row[0]):
        if sampled:
            _, token_ids, versions = zip(*turn, strict=True)
            yield token_ids, versions


def require_closed_account(stats):
    ended = stats["trained"] + stats["dropped"]
    assert stats["started"] == ended + stats["in_flight"] + stats["buffered"], stats


def train(seed, *, for_s, mean_s, isolation):
    """Train under chaos; check all that is trained, and return the worker's counts."""
    events = draw_events(seed, seconds=for_s, places=5, well=2, mean_s=mean_s)
    answers_used = Counter()
    with (
        Chaos(events, places=5, slots=6, token_s=0.004) as fleet,
        serving.VLLMEngine([one.url for one in fleet.servers], run="chaos") as engine,
    ):
        engine.load_weights({}, version=0)
        with rollout.worker(
            engine,
            converse,
            [{"id": str(number)} for number in range(50_000)],
            params=SamplingParams(max_tokens=max(LENGTHS)),
            group_size=4,
            groups_per_step=6,
            max_staleness=3,
            timeout_s=120,
            isolation=isolation,
        ) as rollouts:
            fleet.begin(engine)
            ends = time.monotonic() + for_s
            version = 0
            while time.monotonic() < ends:
                for group in rollouts.take(version):
                    for sample in (one.samples[0] for one in group.rollouts):
                        for token_ids, versions in turns_of(sample):
                            labels = [f"chaos-{number}" for number in versions]
                            assert fleet.answers[token_ids] == labels
                            answers_used[token_ids] += 1
                version += 1
                engine.load_weights({}, version=version)
                require_closed_account(rollouts.stats())
            fleet.stop()
            rollouts.take(version)
            stats = rollouts.stats()
        require_closed_account(rollouts.stats())
    assert max(answers_used.values()) == 1, "no answer is used twice"
    print(f"\nseed {seed}: {version} steps; {fleet.describe()}; dropped: {stats['dropped_by']}")
    return stats


def require_nothing_lost(stats):
    """No rollout failed: groups were dropped only because they were too old."""
    assert not stats["errors"]
    assert not stats["engine_errors"]
    assert set(stats["dropped_by"]) <= {"stale", "cancelled"}


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled(seed, hasty):
    require_nothing_lost(train(seed, for_s=seconds(12), mean_s=2.0, isolation="thread"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled_for_long(seed):
    require_nothing_lost(train(seed, for_s=seconds(600), mean_s=20.0, isolation="process"))


# ---- capacity ----


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_what_lives_is_used(seed):
    """With twice as many requests as slots, at least 85% of the living capacity is used."""
    for_s = seconds(600)
    events = draw_events(seed, seconds=for_s, places=5, well=2, mean_s=20.0)
    over = False

    async def request_for_ever(engine, number, answers):
        draw = random.Random(number)
        for turn in itertools.count():
            params = SamplingParams(max_tokens=draw.choice(LENGTHS))
            answer = await engine.generate([1, number], params, session=f"{number}-{turn // 4}")
            assert tuple(answer.token_ids.tolist()) in answers
            if over:
                return

    async def use(engine, fleet):
        nonlocal over
        clients = [
            asyncio.create_task(request_for_ever(engine, number, fleet.answers))
            for number in range(60)
        ]
        await asyncio.sleep(for_s)
        share = fleet.sampled / fleet.capacity
        over = True
        await asyncio.to_thread(fleet.stop)
        await asyncio.gather(*clients)
        return share

    with (
        Chaos(events, places=5, slots=6, token_s=0.02) as fleet,
        serving.VLLMEngine([one.url for one in fleet.servers], run="chaos") as engine,
    ):
        engine.adopt(0)
        fleet.begin(engine)
        share = asyncio.run(use(engine, fleet))
    print(f"\nseed {seed}: {share:.1%} of the living capacity; {fleet.describe()}")
    assert share > 0.85
