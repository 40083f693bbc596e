"""Evaluations beside training, in a worker on a thread or in a process of its own."""

import asyncio
import logging
import threading

import attrs
import pytest
from conftest import CharacterCodes, FakeEngine
from waiting import until

from primerl import rollout, testing
from primerl.rollout.collection.concurrency import AdaptiveConcurrency
from primerl.rollout.evaluations import UncollectedEvaluations
from primerl.types import SamplingParams

TASKS = [{"id": str(n), "prompt": f"task {n}"} for n in range(5)]
HELD_OUT = [{"id": f"held out {n}", "prompt": "ab"} for n in range(3)]
GREEDY = SamplingParams(max_tokens=3, temperature=0)
one_turn = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)


class Gate:
    """An environment whose held-out rollouts wait, before their turn, until they may go on."""

    def __init__(self):
        self.began = []
        self.ended = []
        self.open = threading.Event()

    async def __call__(self, task, engine, params):
        if not task["id"].startswith("held out"):
            return await one_turn(task, engine, params)
        self.began.append((task["id"], engine.version))
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.005)
            return await one_turn(task, engine, params)
        finally:
            self.ended.append(task["id"])


def make_worker(engine=None, environment=one_turn, **change):
    settings = {
        "params": SamplingParams(max_tokens=3),
        "group_size": 2,
        "groups_per_step": 3,
        "max_staleness": 1,
        "timeout_s": 20.0,
        "isolation": "thread",
    } | change
    return rollout.worker(engine or FakeEngine(), environment, TASKS, **settings)


def versions(rollouts):
    return [one.samples[0].versions[one.samples[0].loss_mask].tolist() for one in rollouts]


def test_training_goes_on_while_held_out_rollouts_are_played():
    engine, gate = FakeEngine(), Gate()
    with make_worker(engine, gate) as rollouts:
        evaluation = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        until(lambda: len(gate.began) == 3)
        for step in range(4):
            groups = rollouts.take(version=step)
            assert not any(group.task_id.startswith("held out") for group in groups)
            assert rollouts.ended_evaluations() == []
            engine.version = step + 1
        assert not evaluation.done()
        started = rollouts.stats()["started"]
        gate.open.set()
        until(evaluation.done)
        (ended,) = rollouts.ended_evaluations()
        assert rollouts.ended_evaluations() == []
        stats = rollouts.stats()

    assert ended is evaluation
    assert ended.version == 0  # that it was asked for; the tokens were sampled later
    assert versions(ended.result()) == [[4, 4, 4]] * 3
    assert started <= stats["started"] <= (4 + 1 + 1) * 3  # as if there were no evaluation
    assert stats["trained"] == 12


def test_an_evaluation_of_a_version_begins_when_that_is_served():
    engine, gate = FakeEngine(), Gate()
    gate.open.set()
    with make_worker(engine, gate) as rollouts:
        evaluation = rollouts.start_evaluation(HELD_OUT, GREEDY, version=2)
        for step in range(2):
            rollouts.take(version=step)
            engine.version = step + 1
        result = evaluation.result(timeout_s=20)

    assert evaluation.version == 2
    assert {version for _, version in gate.began} == {2}
    assert versions(result) == [[2, 2, 2]] * 3


def test_tokens_of_several_versions_are_a_result_unless_one_version_is_asked_for():
    class Updated(FakeEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            completion = await super().generate(prompt_ids, params)
            if params.temperature == 0:
                self.version = 1
                completion = attrs.evolve(completion, versions=[0, 0, 1])
            return completion

    for one_version in (False, True):
        with make_worker(Updated()) as rollouts:
            started = rollouts.start_evaluation(HELD_OUT[:1], GREEDY, one_version=one_version)
            if one_version:
                with pytest.raises(RuntimeError, match=r"weights \[0, 1\] were served during"):
                    started.result()
            else:
                assert versions(started.result()) == [[0, 0, 1]]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_run_that_is_resumed_evaluates_again_what_had_not_ended(isolation, tmp_path):
    opened = tmp_path / "open"

    async def environment(task, engine, params):
        while params.temperature == 0 and not opened.exists():
            await asyncio.sleep(0.005)
        return await one_turn(task, engine, params)

    def worker(state=None):
        engine = testing.ScriptedEngine()
        return engine, make_worker(engine, environment, isolation=isolation, state=state)

    engine, unended = worker()
    with unended as rollouts:
        assert [rollouts.evaluation_due(step, every=4) for step in range(3)] == [True, False, False]
        evaluation = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        for step in range(2):
            rollouts.take(version=step)
            engine.update_weights({}, version=step + 1)
        assert not evaluation.done()
        state = rollouts.state()

    opened.touch()
    engine, resumed = worker(state)
    engine.update_weights({}, version=2)
    with resumed as rollouts:
        assert rollouts.evaluation_due(2, every=4)
        assert not rollouts.evaluation_due(3, every=4)
        rollouts.start_evaluation(HELD_OUT, GREEDY, version=2)
        (ended,) = rollouts.ended_evaluations(timeout_s=20)
        assert ended.version == 2
        assert versions(ended.result()) == [[2, 2, 2]] * 3
        state = rollouts.state()

    _, resumed = worker(state)
    with resumed as rollouts:  # its results were collected
        assert not rollouts.evaluation_due(3, every=4)


def test_an_evaluation_that_ended_unseen_is_evaluated_again_too():
    with make_worker() as rollouts:
        evaluation = rollouts.start_evaluation(HELD_OUT, GREEDY)
        until(evaluation.done)
        states = [rollouts.state()]
        rollouts.ended_evaluations()
        states.append(rollouts.state())

    for state, due in zip(states, (True, False), strict=True):
        with make_worker(state=state) as rollouts:
            assert rollouts.evaluation_due(1, every=10) is due
            assert not rollouts.evaluation_due(0, every=0)


def test_a_third_evaluation_waits_until_one_has_ended_and_says_so(caplog):
    gate = Gate()
    with make_worker(environment=gate) as rollouts:
        started = [
            rollouts.start_evaluation(HELD_OUT[:1], GREEDY, version=0)
            for step in range(4)
            if rollouts.evaluation_due(step, every=1)
        ]
        assert len(started) == 2
        gate.open.set()
        until(lambda: all(one.done() for one in started))
        assert rollouts.evaluation_due(5, every=4)  # late, but not lost
        assert not rollouts.evaluation_due(6, every=4)
        assert rollouts.ended_evaluations() == started

    text = "the evaluation of version 2 waits: the evaluation of version 0 and the evaluation of"
    assert text in caplog.text


def test_what_is_due_by_hand():
    evaluations = UncollectedEvaluations()
    assert [evaluations.due(step, 2) for step in range(4)] == [True, False, True, False]
    assert not evaluations.due(0, 0)
    evaluations = UncollectedEvaluations(owed=True)
    assert evaluations
    assert not evaluations.due(3, 0)  # a run that does not evaluate any more
    assert evaluations.due(3, 2)
    assert not evaluations


def test_what_has_not_ended_in_time_is_dropped_and_cleans_up(caplog):
    gate = Gate()
    with make_worker(environment=gate) as rollouts:
        rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        until(lambda: len(gate.began) == 3)
        assert rollouts.ended_evaluations(timeout_s=0.2) == []
        until(lambda: len(gate.ended) == 3)
        gate.open.set()
        rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        (ended,) = rollouts.ended_evaluations(timeout_s=20)
        assert len(ended.result()) == 3

    assert "the evaluation of version 0 is dropped: it had not ended after 0 s" in caplog.text


def test_a_cancelled_evaluation_says_again_why_it_was_cancelled(monkeypatch):
    """Not that the worker was closed, which it was not."""
    late = "the evaluation of version 0 took longer than 0.1 s"
    with make_worker(environment=Gate()) as rollouts:
        evaluation = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=late):
                evaluation.outcomes(timeout_s=0.1)
        with pytest.raises(RuntimeError, match=late):
            evaluation.result(timeout_s=60)

        dropped = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        assert rollouts.ended_evaluations(timeout_s=0.1) == []
        assert not dropped.wait(60)
        with pytest.raises(RuntimeError, match=late):
            dropped.outcomes()

        interrupted = rollouts.start_evaluation(HELD_OUT, GREEDY)

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("primerl.rollout.workers.wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                interrupted.outcomes()
        with pytest.raises(RuntimeError, match="cancelled: the wait for it was interrupted"):
            interrupted.outcomes()


def test_closing_the_worker_says_which_evaluations_it_cancels(caplog):
    gate = Gate()
    with make_worker(environment=gate) as rollouts:
        evaluation = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        until(lambda: len(gate.began) == 3)

    assert "the evaluation of version 0 is cancelled, because the worker is closed" in caplog.text
    assert len(gate.ended) == 3
    with pytest.raises(RuntimeError, match="the worker was closed"):
        evaluation.result()


def test_a_held_out_rollout_that_takes_too_long_or_fails_is_a_result():
    async def environment(task, engine, params):
        if task["id"] == "held out 1":
            await asyncio.sleep(3600)
        if task["id"] == "held out 2":
            raise ConnectionError("no sandbox")
        return await one_turn(task, engine, params)

    with make_worker(environment=environment, group_timeout_s=0.5) as rollouts:
        started = rollouts.start_evaluation(HELD_OUT, GREEDY, keep_errors=True)
        outcomes = started.outcomes()

    assert [one.error for one in outcomes] == [None, "TimeoutError", "ConnectionError"]
    assert "the rollout had not ended after 0.5 s" in outcomes[1].message


def test_sessions_of_held_out_rollouts_have_names_of_their_own():
    sessions = []

    class Names(FakeEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            if params.temperature == 0:
                sessions.append(session)
            return await super().generate(prompt_ids, params)

    async def environment(task, engine, params):
        chat = rollout.Conversation(engine, CharacterCodes(), params, session="conversation")
        await chat.turn("ab")
        return chat.rollout(reward=1.0)

    with make_worker(Names(), environment) as rollouts:
        for _ in range(2):
            rollouts.evaluate(HELD_OUT, GREEDY)
    played = rollout.evaluate_tasks(Names(), environment, HELD_OUT, GREEDY, samples=2)
    assert len(list(played)) == 6

    assert len(sessions) == len(set(sessions)) == 12


def test_while_training_waits_for_rollouts_it_says_how_far_an_evaluation_is(caplog):
    gate, go_on = Gate(), threading.Event()

    async def environment(task, engine, params):
        while params.temperature > 0 and not go_on.is_set():
            await asyncio.sleep(0.005)
        return await gate(task, engine, params)

    with (
        make_worker(environment=environment) as rollouts,
        caplog.at_level(logging.INFO, "primerl.progress"),
    ):
        rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        taking = threading.Thread(target=rollouts.take, args=(0,))
        taking.start()
        until(lambda: "in flight; evaluation 0/3 rollouts" in caplog.text)
        go_on.set()
        taking.join(60)
        gate.open.set()
        rollouts.ended_evaluations(timeout_s=20)


class Loaded(FakeEngine):
    """Reports a load under which the cap stays, and counts the rollouts at once."""

    def __init__(self):
        super().__init__(delay_s=0.002)
        self.now = {0.0: 0, 1.0: 0}
        self.seen = []

    def metrics(self):
        return {"one": {"vllm:kv_cache_usage_perc": 0.9}}

    async def generate(self, prompt_ids, params, *, session=None):
        self.now[params.temperature] += 1
        self.seen.append((self.now[1.0], self.now[0.0]))
        try:
            return await super().generate(prompt_ids, params)
        finally:
            self.now[params.temperature] -= 1


@pytest.mark.parametrize("beside", [True, False], ids=["engine of training", "its own engine"])
def test_an_evaluation_of_many_tasks_starts_few_at_once(beside):
    """A task on the event loop for each rollout would block the loop."""
    seen = []

    async def environment(task, engine, params):
        if task["id"].startswith("held out"):
            seen.append(len(asyncio.all_tasks()))
            await asyncio.sleep(0)
        return await one_turn(task, engine, params)

    held_out = [{"id": f"held out {n}", "prompt": "ab"} for n in range(600)]
    with make_worker(environment=environment) as rollouts:
        engine = None if beside else FakeEngine()
        outcomes = rollouts.start_evaluation(held_out, GREEDY, engine=engine).outcomes()

    assert [one.task["id"] for one in outcomes] == [one["id"] for one in held_out]
    assert len(seen) == 600
    assert max(seen) < 300


def test_training_and_evaluation_share_the_cap_and_none_starves():
    engine = Loaded()
    held_out = [{"id": f"held out {n}", "prompt": "ab"} for n in range(40)]
    with make_worker(
        engine, concurrency=AdaptiveConcurrency(cap=8, most=8), max_staleness=8
    ) as rollouts:
        evaluation = rollouts.start_evaluation(held_out, GREEDY)
        step = 0
        while not evaluation.done():
            rollouts.take(version=step)
            step += 1
            engine.version = step
        assert len(evaluation.result()) == 40

    beside = [(training, held) for training, held in engine.seen if held]
    assert step > 1
    assert max(held for _, held in beside) == 4  # half of the cap
    assert max(training + held for training, held in beside) <= 8 + 1  # one may always run
    assert any(training for training, _ in beside)


class Poisoned(testing.ScriptedEngine):
    """An engine that fails each request with three prompt tokens, and answers all others."""

    async def generate(self, prompt_ids, params, *, session=None):
        if len(prompt_ids) == 3:
            raise RuntimeError("500 Internal Server Error")
        return await super().generate(prompt_ids, params, session=session)


def test_a_request_that_the_engine_always_fails_is_the_result_of_its_rollout():
    tokenizer = testing.character_tokenizer("abx")
    engine = Poisoned(["a", "b"], tokenizer=tokenizer, latency=0.002)
    environment = rollout.single_turn(tokenizer, reward=lambda task, reply: 1.0)
    training = [{"id": str(n), "prompt": "ab"} for n in range(8)]
    held_out = [{"id": "sound", "prompt": "a"}, {"id": "poison", "prompt": "aax"}]
    with rollout.worker(
        engine,
        environment,
        training,
        params=SamplingParams(max_tokens=2),
        group_size=2,
        groups_per_step=2,
        max_staleness=1,
        isolation="thread",
        timeout_s=20.0,
    ) as rollouts:
        evaluation = rollouts.start_evaluation(held_out, GREEDY, version=0, keep_errors=True)
        for version in range(1000):  # training shows that the engine answers others
            rollouts.take(version)
            engine.update_weights({}, version=version + 1)
            if evaluation.done():
                break
        (ended,) = rollouts.ended_evaluations()
        assert [one.error for one in ended.outcomes()] == [None, "RequestFailed"]


def test_evaluations_that_have_ended_are_not_lost_if_a_later_one_fails_or_is_interrupted():
    gate = Gate()

    async def failing(task, engine, params):
        if task["id"] == "broken":
            await asyncio.sleep(0.01)
            raise RuntimeError("the environment is odd")
        return await gate(task, engine, params)

    with make_worker(environment=failing) as rollouts:
        gate.open.set()
        first = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)
        until(first.done)
        second = rollouts.start_evaluation([{"id": "broken", "prompt": "ab"}], GREEDY, version=0)
        ended = rollouts.ended_evaluations(timeout_s=60.0)
        assert ended == [first, second]
        assert len(first.outcomes()) == 3
        with pytest.raises(RuntimeError, match="the environment is odd"):
            second.outcomes()

        gate.open.clear()
        third = rollouts.start_evaluation(HELD_OUT, GREEDY, version=0)

        def interrupted(timeout_s):
            raise KeyboardInterrupt

        third.wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            rollouts.ended_evaluations(timeout_s=60.0)
        assert not third.collected, "it is still owed"
        gate.open.set()
