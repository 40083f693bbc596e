"""Expert routes of rollouts that are not trained are removed from the engine's store."""

import asyncio

import attrs
import pytest
from conftest import FakeEngine, make_sample
from waiting import until

from primerl import rollout
from primerl.rollout.collection.buffer import Buffer
from primerl.rollout.collection.groups import GroupFailed
from primerl.types import Group, Rollout, SamplingParams

PARAMS = SamplingParams(max_tokens=3)


class Routes:
    """A store that knows which references are left."""

    def __init__(self):
        self.left = []

    def check(self, sample):
        pass

    def discard(self, references):
        for reference in references:
            self.left.remove(reference)


class RoutedEngine(FakeEngine):
    """An engine whose completions have the references ``0``, ``1``, ..."""

    def __init__(self):
        super().__init__(delay_s=0)
        self.routes = Routes()
        self.count = 0

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params, session=session)
        reference, self.count = str(self.count), self.count + 1
        self.routes.left.append(reference)
        return attrs.evolve(completion, routes=(reference,))


async def sampled(engine):
    completion = await engine.generate([1], PARAMS)
    return attrs.evolve(make_sample(), routes=completion.routes)


def play(environment, **options):
    """Return a group of three rollouts, or its error, and the references that are left."""
    engine = RoutedEngine()

    async def run():
        try:
            return await rollout.run_group(
                environment, {"id": "t"}, engine, PARAMS, size=3, task_id="t", **options
            )
        except GroupFailed as error:
            return error
        finally:
            await asyncio.get_running_loop().shutdown_default_executor()

    return asyncio.run(run()), engine.routes.left


def routes_of(group):
    return [ref for sample in group.samples for ref in sample.routes]


def test_a_complete_group_keeps_the_routes_of_its_samples_alone():
    async def environment(task, engine, params):
        await sampled(engine)  # the agent throws this turn away
        return Rollout(samples=[await sampled(engine)], reward=0.0)

    group, left = play(environment)

    assert len(left) == 3
    assert sorted(routes_of(group)) == sorted(left)


def test_attempts_that_fail_leave_no_routes():
    attempts = iter(range(100))

    async def environment(task, engine, params):
        sample = await sampled(engine)
        if next(attempts) < 2:
            raise ConnectionError("the tool is down")
        return Rollout(samples=[sample], reward=0.0)

    group, left = play(environment, retries=2)

    assert sorted(routes_of(group)) == sorted(left) == ["2", "3", "4"]


def test_a_group_that_fails_leaves_no_routes():
    attempts = iter(range(100))

    async def environment(task, engine, params):
        sample = await sampled(engine)
        if next(attempts) == 2:
            raise ConnectionError("the tool is down")
        return Rollout(samples=[sample], reward=0.0)

    error, left = play(environment)

    assert error.reason == "failed"
    assert left == []


def test_rollouts_that_are_cut_at_the_deadline_leave_no_routes():
    numbers = iter(range(100))

    async def environment(task, engine, params):
        sample = await sampled(engine)
        if next(numbers) == 1:
            await asyncio.sleep(3600)
        return Rollout(samples=[sample], reward=0.0)

    group, left = play(environment, timeout_s=0.2, min_size=2)
    assert sorted(routes_of(group)) == sorted(left)
    assert len(left) == 2

    numbers = iter(range(100))
    error, left = play(environment, timeout_s=0.2)
    assert error.reason == "timeout"
    assert left == []


def test_evaluated_rollouts_that_time_out_leave_no_routes():
    engine = RoutedEngine()

    async def environment(task, engine, params):
        sample = await sampled(engine)
        if task["id"] == "slow":
            await asyncio.sleep(3600)
        return Rollout(samples=[sample], reward=0.0)

    tasks = [{"id": "slow"}, {"id": "quick"}]
    found = {
        one.task["id"]: one
        for one in rollout.evaluate_tasks(
            engine, environment, tasks, PARAMS, rollout_timeout_s=0.2, concurrency=2
        )
    }

    assert found["slow"].error == "TimeoutError"
    (sample,) = found["quick"].rollout.samples
    until(lambda: engine.routes.left == list(sample.routes))


@pytest.mark.parametrize("reason", ["no_reward", "stale", "unverified", "empty"])
def test_groups_that_the_buffer_drops_are_handed_over(reason):
    def no_reward(group):
        return reason != "no_reward"

    dropped = []
    buffer = Buffer(groups_per_step=1, max_staleness=0, keep=[no_reward], on_drop=dropped.append)
    sample = make_sample()
    if reason == "empty":
        sample = attrs.evolve(sample, loss_mask=sample.loss_mask & False)
    group = Group(task_id="t", rollouts=[Rollout(samples=[sample], reward=0.0)])
    buffer.start()
    buffer.put(group)
    if reason == "stale":
        assert buffer.reserve(5, in_flight=[]) is None
    if reason == "unverified":
        buffer.mark_version(0, verified=False)

    assert dropped == [group]
    assert dict(buffer.dropped) == {reason: 1}


def test_a_worker_removes_the_routes_of_groups_that_a_filter_refuses():
    engine = RoutedEngine()

    async def environment(task, engine, params):
        return Rollout(samples=[await sampled(engine)], reward=float(task["n"] % 2))

    def rewarded(group):
        return group.rewards.mean() > 0

    with rollout.worker(
        engine,
        environment,
        [{"prompt": [1], "n": number} for number in range(8)],
        params=PARAMS,
        group_size=1,
        groups_per_step=2,
        max_staleness=0,
        keep=[rewarded],
        isolation="thread",
    ) as rollouts:
        groups = rollouts.take(version=0)
        stats = rollouts.stats()

    assert stats["dropped_by"].get("rewarded", 0) + stats["dropped_by"].get("cancelled", 0) >= 1
    kept = {ref for group in groups for ref in routes_of(group)}
    assert kept <= set(engine.routes.left)
    until(lambda: len(engine.routes.left) <= len(kept) + stats["buffered"] + stats["in_flight"])
