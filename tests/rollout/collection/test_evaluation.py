"""Tasks played for an evaluation: every end comes, whatever it is, and none comes twice."""

import asyncio
import threading

import pytest

from primerl import rollout, testing
from primerl.rollout.engines.health import EngineFailed
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=1.0)
TASKS = [{"id": f"task {number}", "prompt": [number]} for number in range(5)]


async def play(task, engine, params):
    """A reply to the task's tokens; the reward is the task's number."""
    completion = await engine.generate(task["prompt"] or [1], params)
    chat = rollout.Conversation(engine, testing.character_tokenizer("ab"), params)
    await chat.turn("ab")
    return chat.rollout(
        reward=float(task["id"].split()[1]), metrics={"n": len(completion.token_ids)}
    )


def ends(engine=None, environment=play, tasks=TASKS, **how):
    engine = engine or testing.ScriptedEngine()
    return list(rollout.evaluate_tasks(engine, environment, tasks, PARAMS, **how))


def test_each_task_is_played_as_often_as_asked():
    played = ends(samples=3)
    assert sorted((end.task["id"], end.index) for end in played) == [
        (task["id"], index) for task in TASKS for index in range(3)
    ]
    for end in played:
        assert end.rollout.reward == float(end.task["id"].split()[1])
        assert end.error is None
        assert end.message is None
        assert end.seconds >= 0


def test_an_environment_that_raises_is_an_end_like_others():
    attempts = []

    async def environment(task, engine, params):
        attempts.append(task["id"])
        if task["id"] == "task 1":
            raise KeyError("no such tool")
        if task["id"] == "task 2":
            raise rollout.RewardError("the reward raised")
        return await play(task, engine, params)

    played = {end.task["id"]: end for end in ends(environment=environment, retries=2)}
    assert len(played) == 5
    assert played["task 1"].rollout is None
    assert played["task 1"].error == "KeyError"
    assert "no such tool" in played["task 1"].message
    assert __file__ in played["task 1"].message
    assert attempts.count("task 1") == 3
    assert played["task 2"].error == "RewardError"
    assert played["task 3"].rollout is not None


def test_what_was_played_before_is_not_repeated():
    done = {("task 0", 0), ("task 0", 1), ("task 3", 1)}
    played = ends(samples=2, skip=done)
    assert {(end.task["id"], end.index) for end in played}.isdisjoint(done)
    assert len(played) == 7


def test_no_more_are_in_flight_than_asked():
    engine = testing.ScriptedEngine(latency=0.01)
    ends(engine, samples=4, concurrency=3)
    assert engine.peak_in_flight == 3


def test_ends_come_while_others_are_played():
    release = threading.Event()

    async def environment(task, engine, params):
        while task["id"] == "task 0" and not release.is_set():
            await asyncio.sleep(0.01)
        return await play(task, engine, params)

    playing = rollout.evaluate_tasks(testing.ScriptedEngine(), environment, TASKS, PARAMS)
    first = [next(playing).task["id"] for _ in range(4)]
    assert "task 0" not in first
    release.set()
    assert [end.task["id"] for end in playing] == ["task 0"]


def test_leaving_early_cancels_what_is_in_flight():
    cancelled, closed = [], []

    class Environment:
        async def __call__(self, task, engine, params):
            try:
                await asyncio.sleep(0 if task["id"] == "task 4" else 1000)
            except asyncio.CancelledError:
                cancelled.append(task["id"])
                raise
            return await play(task, engine, params)

        async def aclose(self):
            closed.append(True)

    playing = rollout.evaluate_tasks(testing.ScriptedEngine(), Environment(), TASKS, PARAMS)
    assert next(playing).task["id"] == "task 4"
    playing.close()
    assert sorted(cancelled) == [f"task {number}" for number in range(4)]
    assert closed == [True]


def test_what_is_cancelled_cleans_up_before_the_environment_is_closed():
    ended = []

    class Environment:
        async def __call__(self, task, engine, params):
            if task["id"] == "task 4":
                return await play(task, engine, params)
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.1 * int(task["id"].split()[1]))
                ended.append(task["id"])

        async def aclose(self):
            ended.append("closed")

    playing = rollout.evaluate_tasks(testing.ScriptedEngine(), Environment(), TASKS, PARAMS)
    assert next(playing).task["id"] == "task 4"
    playing.close()
    assert sorted(ended[:-1]) == [f"task {number}" for number in range(4)]
    assert ended[-1] == "closed"


def test_a_play_that_hangs_ends_at_its_deadline():
    async def environment(task, engine, params):
        if task["id"] == "task 0":
            await asyncio.sleep(1000)
        return await play(task, engine, params)

    played = {end.task["id"]: end for end in ends(environment=environment, rollout_timeout_s=0.3)}
    assert played["task 0"].error == "TimeoutError"
    assert played["task 0"].message == "TimeoutError: the rollout had not ended after 0.3 s"
    assert played["task 0"].seconds >= 0.3
    assert played["task 4"].rollout is not None


def test_an_environment_that_cannot_be_closed_is_an_error_and_no_hang():
    class Environment:
        async def __call__(self, task, engine, params):
            if task["id"] == "task 2":
                raise EngineFailed("gone")
            return await play(task, engine, params)

        async def aclose(self):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        ends(environment=Environment(), concurrency=1)


def test_an_outage_of_the_engine_is_waited_for():
    fails = iter([True] * 6 + [False] * 1000)
    engine = testing.ScriptedEngine(
        failures=lambda _: ConnectionError("gone") if next(fails) else None
    )
    played = ends(engine, retries=0)
    assert [end.error for end in played] == [None] * 5


def test_an_outage_of_the_engine_takes_no_time_of_a_play():
    fails = iter([True] * 6 + [False] * 1000)  # with pauses of 3.15 s
    engine = testing.ScriptedEngine(
        failures=lambda _: ConnectionError("gone") if next(fails) else None
    )
    (end,) = ends(engine, tasks=TASKS[:1], retries=0, rollout_timeout_s=2.0)
    assert end.error is None
    assert end.seconds > 3


def test_an_engine_that_stays_away_is_an_error_after_what_was_yielded():
    calls = []

    def failure(_):
        calls.append(1)
        return ConnectionError("gone") if len(calls) > 4 else None

    engine = testing.ScriptedEngine(failures=failure)
    playing = rollout.evaluate_tasks(engine, play, TASKS, PARAMS, concurrency=1, timeout_s=0.2)
    assert [next(playing).task["id"], next(playing).task["id"]] == ["task 0", "task 1"]
    with pytest.raises(EngineFailed, match="has failed every request for"):
        list(playing)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"concurrency": 0}, {"retries": -1}, {"rollout_timeout_s": 0.0}]
)
def test_numbers_out_of_range(wrong):
    with pytest.raises(ValueError, match="expected at least"):
        ends(**wrong)


def test_tasks_need_an_id():
    with pytest.raises(ValueError, match="has no 'id' that is a string"):
        ends(tasks=[{"prompt": "2 + 2?"}])


def test_no_tasks_have_no_ends():
    assert ends(tasks=[]) == []
