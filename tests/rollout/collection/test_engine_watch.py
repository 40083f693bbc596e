"""The usage of engines: by hand from two readings, over a run, and in the worker's stats."""

import asyncio
import logging

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from primerl import rollout, testing
from primerl._common.engine_usage import EngineUsage, engine_usage, usage_together
from primerl.rollout.collection import engine_watch
from primerl.rollout.collection.engine_watch import EngineWatch
from primerl.types import Rollout, Sample, SamplingParams

BEFORE = {
    "vllm:prompt_tokens_total": 1000.0,
    "vllm:prefix_cache_queries_total": 900.0,
    "vllm:prefix_cache_hits_total": 100.0,
    "vllm:generation_tokens_total": 50.0,
    "vllm:num_preemptions_total": 3.0,
    "vllm:num_requests_running": 9.0,
}
AFTER = {
    "vllm:prompt_tokens_total": 2000.0,
    "vllm:prefix_cache_queries_total": 1700.0,
    "vllm:prefix_cache_hits_total": 500.0,
    "vllm:external_prefix_cache_hits_total": 80.0,
    "vllm:generation_tokens_total": 250.0,
    "vllm:num_preemptions_total": 4.0,
    "vllm:num_requests_running": 6.0,
    "vllm:num_requests_waiting": 2.0,
    "vllm:kv_cache_usage_perc": 0.5,
}


def test_rates_by_hand():
    usage = engine_usage(BEFORE, AFTER, seconds=4.0)
    assert usage.rates() == {
        "cache_hits": 400 / 800,
        "external_hits": 80 / 800,
        "prefill_tokens_per_s": (1000 - 400 - 80) / 4,
        "decode_tokens_per_s": 200 / 4,
        "running": 6.0,
        "waiting": 2.0,
        "kv_use": 0.5,
        "preemptions": 1.0,
    }


def test_a_restarted_server_counts_from_zero():
    usage = engine_usage(AFTER, BEFORE, seconds=1.0)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.preemptions) == (1000, 100, 3)


def test_what_was_not_counted_has_no_rate():
    assert EngineUsage().rates() == {}
    assert "cache_hits" not in engine_usage(BEFORE, BEFORE, seconds=1.0).rates()
    late = EngineUsage(seconds=1.0, queried_tokens=50, cached_tokens=50)
    assert late.rates()["prefill_tokens_per_s"] == 0, "the prompts are counted later"


def test_ranks_together_and_intervals_in_turn():
    one = EngineUsage(seconds=2.0, generated_tokens=10, running_s=4.0, kv_use_s=1.0)
    two = EngineUsage(seconds=2.0, generated_tokens=30, running_s=6.0, kv_use_s=0.5)
    together = usage_together([one, two]).rates()
    assert (together["decode_tokens_per_s"], together["running"]) == (20, 5)
    assert together["kv_use"] == 0.5
    in_turn = one.then(two).rates()
    assert (in_turn["decode_tokens_per_s"], in_turn["running"]) == (10, 2.5)
    assert in_turn["kv_use"] == 1.5 / 4
    assert usage_together([]) == EngineUsage()


@given(
    counts=st.lists(
        st.lists(st.integers(0, 1000), min_size=2, max_size=6).map(sorted), min_size=1, max_size=4
    )
)
def test_the_total_of_a_run_is_what_the_servers_counted_between_readings(counts):
    watch = EngineWatch()
    for turn in range(max(map(len, counts))):
        readings = {
            str(n): {0: {"vllm:generation_tokens_total": float(one[turn])}}
            for n, one in enumerate(counts)
            if turn < len(one)
        }
        watch.add(readings, now=10.0 * turn)
    assert watch.total.generated_tokens == sum(one[-1] - one[0] for one in counts)
    assert watch.total.seconds == 10 * (max(map(len, counts)) - 1)


def test_a_server_that_did_not_answer_is_left_out():
    watch = EngineWatch()
    reading = {rank: {"vllm:generation_tokens_total": 10.0} for rank in range(2)}
    later = {rank: {"vllm:generation_tokens_total": 30.0} for rank in range(3)}
    watch.add({"a": reading, "b": reading}, now=5.0)
    assert (watch.ranks, watch.total) == ({}, EngineUsage())
    watch.add({"a": later}, now=7.0)
    assert list(watch.ranks) == ["a"]
    assert list(watch.ranks["a"]) == [0, 1], "rank 2 has no earlier reading"
    watch.add({"a": later, "b": later}, now=9.0)
    assert watch.total.generated_tokens == 40
    stats = watch.stats()
    assert stats["engine"] == attrs.asdict(watch.total)
    assert stats["servers"]["a"]["decode_tokens_per_s"] == 0
    assert list(stats["servers"]["a"]["ranks"]) == [0, 1, 2]


def test_the_load_in_the_live_view():
    watch = EngineWatch()
    assert watch.describe() == ""
    watch.add({"a": {0: BEFORE}, "b": {0: BEFORE}}, now=0.0)
    watch.add({"a": {0: AFTER}, "b": {0: AFTER}}, now=4.0)
    assert watch.describe() == "12 requests running, 4 waiting, KV 50%, 50% cached"


def test_an_engine_that_can_not_be_read_is_reported_once(monkeypatch, caplog):
    class Broken:
        calls = 0

        def metrics(self):
            self.calls += 1
            raise ValueError("no metrics today")

    async def watch(engine):
        watching = asyncio.create_task(EngineWatch().run(engine))
        while engine.calls < 3:
            await asyncio.sleep(0.001)
        watching.cancel()

    monkeypatch.setattr(engine_watch, "EVERY_S", 0.001)
    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(watch(Broken()), 30))
    assert caplog.text.count("no metrics today") == 1


class Measured(testing.ScriptedEngine):
    """Its counter grows by 10 with each reading; 5 requests wait."""

    def __init__(self):
        super().__init__([[7]])
        self.counted = 0.0

    def metrics(self):
        self.counted += 10.0
        counted = {"vllm:generation_tokens_total": self.counted, "vllm:num_requests_waiting": 5.0}
        return {"this process": counted}


async def environment(task, engine, params):
    completion = await engine.generate([1], params)
    count = len(completion.token_ids)
    sample = Sample(
        token_ids=[1, *completion.token_ids],
        loss_mask=[False] + [True] * count,
        behavior_logprobs=[0, *completion.logprobs],
        versions=[-1, *completion.versions],
    )
    return Rollout(samples=[sample], reward=1.0)


def worker(engine, *, isolation="thread", **options):
    return rollout.worker(
        engine,
        environment,
        [{"id": "a"}],
        params=SamplingParams(max_tokens=1),
        group_size=1,
        groups_per_step=1,
        max_staleness=0,
        isolation=isolation,
        **options,
    )


def test_the_worker_counts_what_its_engine_did_over_a_resumed_run(monkeypatch):
    monkeypatch.setattr(engine_watch, "EVERY_S", 0.01)
    with worker(Measured()) as rollouts:
        until(lambda: rollouts.stats()["engine"]["generated_tokens"] >= 30)
        state = rollouts.state()
    stats = rollouts.stats()
    counted = stats["engine"]["generated_tokens"]
    assert stats["engine"]["waiting_s"] == pytest.approx(5 * stats["engine"]["seconds"])
    assert stats["servers"]["this process"]["ranks"][0]["waiting"] == pytest.approx(5.0)
    with worker(Measured(), state=state) as rollouts:
        assert 30 <= rollouts.stats()["engine"]["generated_tokens"] <= counted + 1000
        until(lambda: rollouts.stats()["engine"]["generated_tokens"] > counted)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_engine_without_metrics_is_not_asked(isolation, caplog):
    with worker(testing.ScriptedEngine([[7]]), isolation=isolation) as rollouts:
        rollouts.take(version=0)
        stats = rollouts.stats()
    assert stats["servers"] == {}
    assert set(stats["engine"].values()) == {0.0}
    assert "could not be read" not in caplog.text


def test_a_worker_in_a_process_reads_the_engine_of_its_parent():
    engine = Measured()
    with worker(engine, isolation="process"):
        until(lambda: engine.counted > 0)
