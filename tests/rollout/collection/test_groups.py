"""One group: retries, survivors, deadlines, rollouts that refuse to end."""

import asyncio

import numpy as np
import pytest
from conftest import FakeEngine, make_sample

from primerl import rollout
from primerl.rollout.collection.groups import GroupFailed, Progress
from primerl.types import Rollout, SamplingParams

PARAMS = SamplingParams(max_tokens=3)


def play(environment, *, size=4, engine=None, **options):
    return asyncio.run(
        rollout.run_group(
            environment,
            {"id": "t", "environment": "words"},
            engine or FakeEngine(delay_s=0),
            PARAMS,
            size=size,
            task_id="t",
            **options,
        )
    )


def fails_at(*attempts, error=ConnectionError):
    """An environment whose attempts of these numbers fail; the reward is the attempt's number."""
    count = iter(range(1000))

    async def environment(task, engine, params):
        number = next(count)
        if number in attempts:
            raise error(f"attempt {number}")
        return Rollout(samples=[make_sample()], reward=number)

    return environment


async def hangs(task, engine, params):
    await asyncio.sleep(3600)


def test_all_rollouts_of_a_group_in_order():
    group = play(fails_at())

    assert group.rewards.tolist() == [0, 1, 2, 3]
    assert group.task_id == "t"
    assert group.environment == "words"


def test_a_failed_rollout_is_played_again_and_counted():
    progress = Progress()

    group = play(fails_at(1, 4), retries=2, progress=progress)

    assert group.rewards.tolist() == [0, 2, 3, 5]  # 1 again as 2, and 4 again as 5
    assert progress.retried == 2
    assert progress.errors == {"ConnectionError": 2}


def test_a_group_closes_with_its_survivors():
    progress = Progress()

    group = play(fails_at(0, 2), min_size=2, progress=progress)

    assert group.rewards.tolist() == [1, 3]
    assert progress.errors == {"ConnectionError": 2}


def test_too_few_survivors_fail_with_the_last_error_as_the_cause():
    with pytest.raises(GroupFailed, match="3 of 4 rollouts failed.*attempt 3") as caught:
        play(fails_at(0, 2, 3), min_size=2)

    assert caught.value.reason == "failed"
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_sampling_stops_for_a_group_that_cannot_be_used():
    cancelled = []

    async def environment(task, engine, params):
        if not cancelled and not started:
            started.append(1)
            raise ConnectionError("lost")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    started = []
    with pytest.raises(GroupFailed):
        play(environment)

    assert len(cancelled) == 3


def test_stragglers_are_cancelled_at_the_deadline_and_the_rest_is_kept():
    count = iter(range(100))

    async def environment(task, engine, params):
        number = next(count)
        if number == 2:
            await asyncio.sleep(3600)
        return Rollout(samples=[make_sample()], reward=number)

    group = play(environment, min_size=3, timeout_s=0.05)

    assert group.rewards.tolist() == [0, 1, 3]


def test_a_deadline_that_leaves_too_few_is_a_timeout_by_name():
    with pytest.raises(GroupFailed, match="4 had not ended after") as caught:
        play(hangs, timeout_s=0.05)

    assert caught.value.reason == "timeout"


def test_a_reward_error_is_not_retried():
    attempts = iter(range(100))

    def reward(task, reply):
        next(attempts)
        raise KeyError("gold")

    from conftest import CharacterCodes

    environment = rollout.single_turn(CharacterCodes(), reward=reward)

    async def prompted(task, engine, params):
        return await environment({"prompt": "a"}, engine, params)

    with pytest.raises(rollout.RewardError, match="gold"):
        play(prompted, size=1, retries=5)

    assert next(attempts) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned a NoneType; expected a Rollout"),
        ({"reward": 1}, "returned a dict; expected a Rollout"),
        (
            Rollout(samples=[make_sample(10, 2000)], reward=1.0),
            "a sample that trains token 2009, beyond the engine's context of 1000",
        ),
        (
            Rollout(samples=[make_sample()], reward=1.0, conversation={"image": np.zeros(2)}),
            "a conversation that can't be stored .*numpy",
        ),
        (
            Rollout(samples=[make_sample()], reward=1.0, conversation={"messages": ["\ud83d"]}),
            "a conversation that can't be stored .*surrogates",
        ),
    ],
)
def test_a_malformed_or_huge_reply_is_a_failure_that_says_what_was_wrong(value, message):
    async def environment(task, engine, params):
        return value

    with pytest.raises(GroupFailed, match=message) as caught:
        play(environment)

    assert caught.value.reason == "failed"


def test_an_environment_that_exits_or_cancels_itself_is_a_failure():
    async def exits(task, engine, params):
        raise SystemExit(3)

    async def cancels(task, engine, params):
        raise asyncio.CancelledError

    with pytest.raises(GroupFailed, match="raised SystemExit: 3"):
        play(exits)
    with pytest.raises(GroupFailed, match="cancelled from within"):
        play(cancels)


def test_a_rollout_that_refuses_to_be_cancelled_is_abandoned(monkeypatch):
    monkeypatch.setattr("primerl.rollout.collection.groups.CANCEL_S", 0.05)
    release = []

    async def stubborn(task, engine, params):
        while not release:
            try:
                await asyncio.sleep(0.3)
                release.append(1)
            except asyncio.CancelledError:
                pass

    with pytest.raises(GroupFailed, match="had not ended"):
        play(stubborn, size=1, timeout_s=0.05)


def test_progress_knows_the_oldest_version_that_a_group_may_have_sampled_with():
    engine = FakeEngine(delay_s=0)
    progress = Progress()
    seen = []

    async def environment(task, engine_, params):
        seen.append(progress.oldest_version(served=9))
        await engine_.generate([2, 3], params)
        engine.version = 5  # published between two turns
        await engine_.generate([2, 3], params)
        seen.append(progress.oldest_version(served=9))
        return Rollout(samples=[make_sample(version=2)], reward=1.0)

    engine.version = 4
    play(environment, size=1, engine=engine, progress=progress)

    assert seen == [9, 4]
    assert progress.oldest_version(served=9) == 2  # of the tokens that it returned
    assert progress.tokens == 6
