"""The cap on rollouts in flight, on a simulated engine, and in the worker."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_engine import simulate
from waiting import until

from primerl import rollout, testing
from primerl.rollout.collection.concurrency import AdaptiveConcurrency, Load, load_of
from primerl.types import Rollout, Sample, SamplingParams


def load(**options):
    return Load(**{"in_flight": 16, "queued": 0, "preemptions": 0, "kv_use": 0.5, **options})


def test_the_cap_grows_with_room_and_shrinks_with_trouble():
    settings = AdaptiveConcurrency(cap=16)

    assert settings.after(load()).cap > 16
    assert settings.after(load(in_flight=4)).cap == 16  # more would change nothing
    assert settings.after(load(kv_use=0.9)).cap == 16
    assert settings.after(load(kv_use=1.0)).cap == pytest.approx(15.2)
    assert settings.after(load(preemptions=1)).cap == settings.after(load(queued=1)).cap < 16
    assert settings.after(load(in_flight=30, preemptions=9)).cap == 16  # it still drains
    near = settings.after(load(preemptions=1))
    assert near.after(load(in_flight=15)).cap / near.cap < settings.after(load()).cap / 16


def test_an_evaluation_beside_a_group_larger_than_the_cap_keeps_no_cap_from_growing():
    """One group of 32 and one rollout of an evaluation run under any cap, such as one of 16."""
    settings = AdaptiveConcurrency(cap=16)
    beside = {"in_flight": 33, "group_size": 32}
    assert settings.after(load(**beside, evaluated=1)).cap == pytest.approx(16 * 1.15)
    assert settings.after(load(**beside)).cap == 16  # these are left over from a larger cap


@pytest.mark.parametrize("group_size", [1, 4, 8, 16, 32, 48])
def test_whole_groups_keep_no_cap_from_growing(group_size):
    settings = AdaptiveConcurrency(cap=16)
    for _ in range(60):
        fitting = int(settings.cap) // group_size * group_size
        in_flight = max(group_size, fitting)  # one group is always in flight
        settings = settings.after(load(in_flight=in_flight, group_size=group_size))
    assert settings.cap > 1000


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2), st.floats(0, 1)), max_size=50))
def test_the_cap_stays_within_its_bounds(observed):
    settings = AdaptiveConcurrency(cap=8, least=4, most=32)
    for in_flight, preemptions, kv_use in observed:
        settings = settings.after(load(in_flight=in_flight, preemptions=preemptions, kv_use=kv_use))
        assert 4 <= settings.cap <= 32


FIXED = (16, 24, 32, 48, 64, 96)


@pytest.mark.thorough
@pytest.mark.parametrize(("length", "capacity"), [(500, 40_000), (2000, 60_000)])
def test_it_is_within_five_percent_of_the_best_fixed_cap(length, capacity):
    options = {"length": length, "capacity": capacity, "seconds": 4000.0}
    best = max(simulate(cap, **options)[0] for cap in FIXED)
    settings = AdaptiveConcurrency()

    def follow(observed):
        nonlocal settings
        if observed is not None:
            names = ("in_flight", "queued", "preemptions", "kv_use")
            settings = settings.after(Load(**dict(zip(names, observed, strict=True))))
        return settings.cap

    rate, caps, _, _ = simulate(follow, **options)
    assert rate >= 0.95 * best
    late = caps[len(caps) // 4 :]
    assert late.std() < 0.35 * late.mean()


def test_of_several_servers_the_fullest_counts():
    metrics = {
        "a": {"vllm:num_preemptions_total": 3.0, "vllm:kv_cache_usage_perc": 0.5},
        "b": {"vllm:num_preemptions_total": 4.0, "vllm:kv_cache_usage_perc": 0.9},
    }

    observed, preempted = load_of(metrics, in_flight=5, preempted=5.0)

    assert attrs.astuple(observed) == (5, 0, 2, 0.9, 1, 0)
    assert preempted == 7.0


class Measured(testing.ScriptedEngine):
    """An engine whose memory is full, or in use to another share."""

    asked = 0
    use = 1.0

    def metrics(self):
        self.asked += 1
        return {"one": {"vllm:kv_cache_usage_perc": self.use}}


async def environment(task, engine, params):
    completion = await engine.generate([1], params)
    count = len(completion.token_ids)
    return Rollout(
        samples=[
            Sample(
                token_ids=[1, *completion.token_ids],
                loss_mask=[False] + [True] * count,
                behavior_logprobs=[0, *completion.logprobs],
                versions=[-1, *completion.versions],
            )
        ],
        reward=1.0,
    )


def worker(engine, *, isolation="thread", **options):
    return rollout.worker(
        engine,
        environment,
        [{"id": "a"}],
        isolation=isolation,
        **{
            "params": SamplingParams(max_tokens=4),
            "group_size": 2,
            "groups_per_step": 8,
            "max_staleness": 0,
            **options,
        },
    )


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_worker_keeps_to_the_cap(isolation):
    engine = Measured(latency=0.01)

    settings = AdaptiveConcurrency(cap=4, every_s=0.01)
    with worker(engine, isolation=isolation, concurrency=settings) as rollouts:
        assert len(rollouts.take(version=0)) == 8
        until(lambda: engine.asked > 2)

    assert engine.peak_in_flight <= 4
    free = Measured(latency=0.01)
    with worker(free) as rollouts:
        rollouts.take(version=0)
    assert free.peak_in_flight > 4


@pytest.mark.thorough
def test_the_worker_has_more_large_groups_in_flight_while_there_is_room():
    engine = Measured(latency=0.01)
    engine.use = 0.1
    settings = AdaptiveConcurrency(cap=16, every_s=0.01)
    with worker(engine, group_size=16, concurrency=settings) as rollouts:

        def step():
            rollouts.take(version=engine.version)
            engine.update_weights({}, version=engine.version + 1)
            return engine.peak_in_flight > 32

        until(step)


def test_an_engine_without_metrics_is_refused():
    with pytest.raises(ValueError, match=r"ScriptedEngine has no metrics\(\)"):
        worker(testing.ScriptedEngine(), concurrency=AdaptiveConcurrency())


def test_settings_out_of_range_are_refused():
    for settings in ({"cap": 0.5}, {"low": 0.99}, {"growth": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            AdaptiveConcurrency(**settings)
