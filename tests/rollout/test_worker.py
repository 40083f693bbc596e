"""The worker on a thread, with an engine that samples at random."""

import asyncio
import functools
import inspect
import itertools
import logging
import re
import threading
import time

import attrs
import numpy as np
import pytest
from conftest import CharacterCodes, FakeEngine

from primerl import filters, rollout
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=3)
TASKS = [{"id": str(n), "prompt": f"task {n}"} for n in range(5)]


def make_worker(engine=None, environment=None, tasks=TASKS, **change):
    settings = {
        "params": PARAMS,
        "group_size": 2,
        "groups_per_step": 3,
        "max_staleness": 1,
        "timeout_s": 20.0,
        "isolation": "thread",  # test_worker_process.py has the other
    } | change
    environment = environment or rollout.single_turn(
        CharacterCodes(), reward=lambda task, reply: len(set(reply))
    )
    return rollout.worker(engine or FakeEngine(), environment, tasks, **settings)


def balanced(stats):
    ended = stats["trained"] + stats["dropped"] + stats["buffered"]
    return stats["started"] == ended + stats["in_flight"]


def test_groups_arrive_within_the_bound_while_weights_change():
    engine = FakeEngine(delay_s=0.005)
    with make_worker(engine, max_staleness=2) as rollouts:
        for step in range(30):
            groups = rollouts.take(version=step)
            stale = np.concatenate([step - group.versions for group in groups])

            assert len(groups) == 3
            assert 0 <= stale.min()
            assert stale.max() <= 2
            assert balanced(rollouts.stats())
            engine.version = step + 1

    assert rollouts.stats()["trained"] == 90
    assert rollouts.stats()["rollout_tokens"] >= 90 * 6


def test_zero_staleness_is_the_synchronous_loop():
    engine = FakeEngine()
    with make_worker(engine, max_staleness=0) as rollouts:
        for step in range(5):
            groups = rollouts.take(version=step)

            assert all((group.versions == step).all() for group in groups)
            assert rollouts.stats()["started"] == 3 * (step + 1)
            engine.version = step + 1


def test_training_without_publishing_stops_at_the_bound_and_says_so():
    with make_worker(max_staleness=1) as rollouts:
        rollouts.take(version=0)
        rollouts.take(version=1)
        with pytest.raises(RuntimeError, match="still serves version 0.*publish weights"):
            rollouts.take(version=2)


def test_tasks_are_played_in_order_and_again():
    seen = []
    base = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)

    async def environment(task, engine, params):
        seen.append(task["id"])
        return await base(task, engine, params)

    with make_worker(environment=environment, group_size=1, max_staleness=3) as rollouts:
        rollouts.take(version=0)
        rollouts.take(version=1)

    assert seen[:7] == ["0", "1", "2", "3", "4", "0", "1"]


def test_filtered_groups_are_counted_and_replaced():
    rewards = iter([1.0, 1.0, 0.0, 1.0] * 1000)
    environment = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: next(rewards))

    with make_worker(FakeEngine(delay_s=0), environment, keep=[filters.has_signal]) as rollouts:
        groups = rollouts.take(version=0)
        stats = rollouts.stats()

    assert all(filters.has_signal(group) for group in groups)
    assert stats["dropped_by"]["has_signal"] >= 1
    assert balanced(stats)


def test_evaluation_plays_each_task_once_in_order_beside_training():
    environment = rollout.single_turn(
        CharacterCodes(), reward=lambda task, reply: float(task["id"])
    )
    with make_worker(environment=environment) as rollouts:
        began = time.monotonic()
        results = rollouts.evaluate(TASKS, SamplingParams(max_tokens=3, temperature=0))
        elapsed = time.monotonic() - began
        waited, state = rollouts.stats()["evaluation_wait_s"], rollouts.state()
    with make_worker(environment=environment, state=state) as resumed:
        assert resumed.stats()["evaluation_wait_s"] == waited

    assert [result.reward for result in results] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert 0.0 < waited <= elapsed


def lines_of(function):
    """A pattern of the place and the text of a function's own ``raise``, at the end."""
    lines, start = inspect.getsourcelines(function)
    (number, line), *_ = [(start + n, one) for n, one in enumerate(lines) if "raise" in one]
    where = f"({__file__}, line {number}, in {function.__name__}: {line.strip()})"
    return re.escape(where) + "$"


def test_a_reward_that_raises_stops_the_run_and_names_itself_and_the_task():
    def broken(task, reply):
        raise KeyError("gold")

    environment = rollout.single_turn(CharacterCodes(), reward=broken)
    with make_worker(environment=environment) as rollouts:
        with pytest.raises(RuntimeError, match=lines_of(broken)) as error:
            rollouts.take(version=0)
    assert re.search("'broken' for the task .*task .*KeyError: 'gold' ", str(error.value))


def test_a_reward_that_fails_on_one_task_alone_stops_the_run_too():
    """Unlike an environment's failure, which is counted: other tasks would hide the mistake."""
    environment = rollout.single_turn(
        CharacterCodes(), reward=lambda task, reply: 1 / (int(task["id"]) - 3)
    )
    tasks = [{"id": "0", "prompt": "fine"}] * 5 + [{"id": "3", "prompt": "not fine"}]
    plan = {"tasks": tasks, "groups_per_step": 6, "max_staleness": 0}  # all six are needed
    with make_worker(environment=environment, **plan) as rollouts:
        with pytest.raises(RuntimeError, match="'id': '3'.*ZeroDivisionError"):
            rollouts.take(version=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "much"])
def test_a_reward_that_is_not_a_finite_number_stops_the_run(value):
    environment = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: value)
    with make_worker(environment=environment) as rollouts:
        with pytest.raises(RuntimeError, match="reward function"):
            rollouts.take(version=0)


def test_an_environment_that_fails_now_and_then_is_counted_and_training_continues():
    base = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)

    async def flaky(task, engine, params):
        if task["id"] == "2":
            raise ConnectionError("the sandbox went away")
        return await base(task, engine, params)

    engine = FakeEngine()
    with make_worker(engine, flaky) as rollouts:
        for step in range(5):
            rollouts.take(version=step)
            engine.version = step + 1
        stats = rollouts.stats()

    assert stats["dropped_by"]["failed"] > 0
    assert balanced(stats)


def test_an_environment_that_always_fails_stops_the_run_with_its_own_error():
    async def dead(task, engine, params):
        raise ConnectionError("no sandbox")

    with make_worker(environment=dead) as rollouts:
        with pytest.raises(RuntimeError, match="no sandbox") as caught:
            rollouts.take(version=0)

    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_filter_that_raises_stops_the_run():
    def broken(group):
        raise ZeroDivisionError("in a filter")

    with make_worker(keep=[broken]) as rollouts:
        with pytest.raises(RuntimeError, match=lines_of(broken)) as error:
            rollouts.take(version=0)
    assert "the filter 'broken' raised ZeroDivisionError: in a filter (" in str(error.value)


def test_waiting_has_a_deadline_that_names_what_it_waits_for():
    async def hangs(task, engine, params):
        await asyncio.sleep(3600)

    with make_worker(environment=hangs, timeout_s=1.0) as rollouts:
        with pytest.raises(
            RuntimeError, match="no usable group was kept for .* 6 groups are in flight"
        ):
            rollouts.take(version=0)
        with pytest.raises(RuntimeError, match="evaluation took longer"):
            rollouts.evaluate(TASKS, PARAMS, timeout_s=0.1)


def test_filters_that_refuse_everything_are_an_error_with_their_count():
    def impossible(group):
        return False

    engine = FakeEngine(delay_s=0)
    with make_worker(engine, keep=[impossible], timeout_s=1.0, max_refused=10**9) as rollouts:
        with pytest.raises(
            RuntimeError, match="no usable group was kept for .*'impossible': [0-9]+"
        ) as e:
            rollouts.take(version=0)
    assert re.search(r"'impossible' refused \d+; rewards: 3 \(\d+x\), 2", str(e.value))


def test_an_engine_that_samples_with_older_weights_than_it_says_is_named():
    class Behind(FakeEngine):
        async def generate(self, *args, **options):
            completion = await super().generate(*args, **options)
            return attrs.evolve(completion, versions=[0] * 3)

    engine = Behind(delay_s=0)
    engine.version = 5
    with make_worker(engine, timeout_s=30.0) as rollouts:
        with pytest.raises(RuntimeError, match="version 0, older than 5, which was already served"):
            rollouts.take(version=5)
        assert set(rollouts.stats()["errors"]) == {"BadCompletion"}


@pytest.mark.parametrize("ahead", [1, 50])
def test_a_step_for_weights_older_than_those_served_is_refused_at_once(ahead):
    engine = FakeEngine(delay_s=0)
    with make_worker(engine, timeout_s=600.0) as rollouts:
        rollouts.take(version=0)
        engine.version = 1 + ahead
        with pytest.raises(RuntimeError, match=rf"serves version {1 + ahead}, .* of version 1 "):
            [rollouts.take(version=1) for _ in range(9)]  # groups finished before are useful
        stats = rollouts.stats()
        if ahead == 1:
            assert len(rollouts.take(version=2)) == 3

    assert stats["started"] <= 3 * (2 + 1 + ahead) + stats["dropped"]
    assert balanced(stats)


def test_groups_of_a_state_are_trained_though_the_engine_is_ahead_of_them():
    engine = FakeEngine(delay_s=0)
    with make_worker(engine, max_staleness=2) as rollouts:
        rollouts.take(version=0)
        while rollouts.stats()["buffered"] < 6:
            time.sleep(0.01)
        state = rollouts.state()

    engine.version = 5  # a server that has outlived its trainer
    with make_worker(engine, max_staleness=2, state=state) as rollouts:
        for step in (1, 2):
            assert all((group.versions == 0).all() for group in rollouts.take(version=step))
        with pytest.raises(RuntimeError, match="serves version 5, newer than .* of version 3"):
            rollouts.take(version=3)
        assert all((group.versions == 5).all() for group in rollouts.take(version=5))
        assert balanced(rollouts.stats())


def test_more_steps_than_versions_are_refused_at_once():
    with make_worker(FakeEngine(delay_s=0), max_staleness=1, timeout_s=600.0) as rollouts:
        rollouts.take(version=0)
        rollouts.take(version=0)
        with pytest.raises(RuntimeError, match="6 groups were taken since version 0, .* one step"):
            rollouts.take(version=0)


WAITED = "no usable group was kept for .*"
WAITS = functools.partial(pytest.param, marks=pytest.mark.thorough)


class Unreliable(FakeEngine):
    """Samples with other versions than it says: older and newer ones, in turn."""

    def __init__(self, offsets):
        super().__init__(delay_s=0)
        self.version = 5
        self.offsets = itertools.cycle(offsets)

    async def generate(self, *args, **options):
        completion = await super().generate(*args, **options)
        await asyncio.sleep(0.002)
        return attrs.evolve(completion, versions=completion.versions + next(self.offsets))


@pytest.mark.parametrize(("change", "limit"), [({}, 512), ({"max_refused": 7}, 7)])
def test_rewards_that_never_differ_stop_the_run_and_are_named(change, limit):
    environment = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 0.5)
    engine = FakeEngine(delay_s=0)
    with make_worker(engine, environment, keep=[filters.has_signal], **change) as rollouts:
        with pytest.raises(RuntimeError) as error:
            rollouts.take(version=0)
        refused = rollouts.stats()["dropped_by"]["has_signal"]

    assert refused >= limit  # rollouts go on until the worker ends
    said = str(error.value)
    assert said.startswith("step 0 cannot be filled: filters refused ")
    assert "groups in a row ('has_signal' " in said
    assert "and kept none; rewards: 0.5 (" in said
    assert "If all rewards are low, check that the reward parses the replies correctly" in said
    assert f"raise max_refused ({limit})" in said


def test_a_kept_group_now_and_then_keeps_a_run_going():
    ended = itertools.count()
    keep = [lambda group: next(ended) % 5 == 4]
    with make_worker(FakeEngine(delay_s=0), keep=keep, max_refused=6) as rollouts:
        assert len(rollouts.take(version=0)) == 3
        assert rollouts.stats()["dropped"] >= 12


def test_a_limit_of_refused_groups_is_at_least_one():
    with pytest.raises(ValueError, match="max_refused is 0, expected at least 1"):
        make_worker(max_refused=0)


@pytest.mark.parametrize("on_stale", ["drop", "wait", "mask_tokens"])
@pytest.mark.parametrize(
    ("offsets", "fate", "reason"),
    [
        WAITS([0], "refused", f"{WAITED}'impossible': [0-9]+.*filters: 'impossible' refused"),
        ([-5], "fine", "version 0, older than 5, which was already served"),
        ([+3], "fine", "version 8, which was never published: 5 is served"),
        WAITS([0], "raises", f"{WAITED}'failed': [0-9]+.*ConnectionError"),
        WAITS([0], "empty", f"{WAITED}'empty': [0-9]+"),
        ([-5, +3, +1, -2], "mixed", "has version [0-9], "),
    ],
)
def test_no_mixture_of_useless_groups_keeps_a_trainer_waiting(on_stale, offsets, fate, reason):
    """They end all the time, in every way, but the step makes no progress."""
    played = itertools.count()

    def impossible(group):
        return fate != "refused" and (fate != "mixed" or int(group.task_id) % 2 == 0)

    async def environment(task, engine, params):
        reply = await scored()(task, engine, params)
        if fate == "raises" and next(played) % 7:  # the survivors are refused: see ``keep``
            raise ConnectionError("lost")
        if fate == "empty":
            masked = [attrs.evolve(one, loss_mask=one.loss_mask & False) for one in reply.samples]
            return attrs.evolve(reply, samples=masked)
        return reply

    keep = [impossible]
    if fate == "raises":
        keep = [lambda group: False]
    timeout_s = 3.0 if offsets == [0] else 30.0  # some groups must end in it, on a busy machine
    plan = {
        "on_stale": on_stale,
        "timeout_s": timeout_s,
        "group_size": 1,
        "quarantine_after": 10**6,
        "max_refused": 10**6,
    }
    tasks = [{"id": str(n)} | {"prompt": "a"} for n in range(100)]
    began = time.monotonic()
    engine = Unreliable(offsets)
    with make_worker(engine, environment, tasks, keep=keep, retries=0, **plan) as rollouts:
        with pytest.raises(RuntimeError, match=reason):
            rollouts.take(version=5)
        stats = rollouts.stats()

    assert time.monotonic() - began < 15
    assert stats["dropped"] > 5
    assert balanced(stats)


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_trainer_that_waits_says_for_what(caplog, isolation):
    async def slow(task, engine, params):
        await asyncio.sleep(0.1 if task["id"] == "0" else 3.0)
        return await rollout.single_turn(CharacterCodes(), reward=lambda t, r: 1.0)(
            task, engine, params
        )

    tasks = [{"id": str(n), "prompt": "a"} for n in range(3)]
    with make_worker(
        FakeEngine(), slow, tasks, keep=[], max_staleness=0, isolation=isolation
    ) as rollouts:
        with caplog.at_level(logging.INFO, "primerl.progress"):
            rollouts.take(version=0)
            rollouts.evaluate(tasks, SamplingParams(max_tokens=3, temperature=0))

    said = "\n".join(caplog.messages)
    assert re.search(r"^rollouts: [0-2]/3 groups, [1-3] in flight$", said, re.MULTILINE)
    assert re.search(r"^evaluating: [0-2]/3 rollouts$", said, re.MULTILINE)


def test_each_usable_group_is_progress_however_long_the_whole_step_takes():
    async def slow(task, engine, params):
        await asyncio.sleep(0.5 * (1 + int(task["id"])))
        return await scored()(task, engine, params)

    plan = {"timeout_s": 2.0, "groups_per_step": 5, "max_staleness": 0}
    with make_worker(environment=slow, **plan) as rollouts:
        assert len(rollouts.take(version=0)) == 5


def test_tasks_that_run_out_are_an_error():
    with make_worker(tasks=iter(TASKS[:2])) as rollouts:
        with pytest.raises(RuntimeError, match="tasks ran out"):
            rollouts.take(version=0)


def test_a_task_iterator_that_raises_is_raised_in_the_trainer():
    def broken():
        yield TASKS[0]
        yield TASKS[1]
        raise OSError("the dataset is gone")

    with make_worker(tasks=broken()) as rollouts:
        with pytest.raises(RuntimeError, match="the dataset is gone"):
            rollouts.take(version=0)


def test_closing_stops_every_rollout_and_the_thread():
    entered, cancelled = [], []

    async def hangs(task, engine, params):
        entered.append(task["id"])
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(task["id"])
            raise

    before = {*threading.enumerate()}
    with make_worker(environment=hangs) as rollouts:
        while len(entered) < 12:
            time.sleep(0.01)

    assert len(cancelled) == 12
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert left <= {"primerl-clock"}, "one thread of the process, for all workers"
    assert rollouts.stats()["dropped_by"] == {"cancelled": 6}


def test_an_error_in_the_trainer_is_not_hidden_by_closing():
    with pytest.raises(ZeroDivisionError), make_worker():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": []}, "no tasks"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"publish_every": 3}, "publish_every=3 with max_staleness=1"),
        ({"group_size": 0}, "group_size is 0"),
        ({"params": SamplingParams(max_tokens=1000)}, "max_tokens=1000 leaves no room"),
        ({"params": SamplingParams(max_tokens=3, temperature=0)}, "training needs temperature"),
        ({"params": SamplingParams(max_tokens=3, top_p=0.9)}, "full distribution"),
        ({"params": SamplingParams(max_tokens=3, top_k=5)}, "full distribution"),
        ({"isolation": "fork"}, "isolation='fork'; expected 'process' or 'thread'"),
        ({"on_stale": "keep"}, "on_stale='keep'; expected one of drop, wait, mask_tokens"),
        ({"min_group": 3}, "min_group is 3, expected 1 to 2"),
        ({"retries": -1}, "retries is -1"),
        ({"quarantine_after": 0}, "quarantine_after is 0"),
        ({"group_timeout_s": 0}, "group_timeout_s is 0"),
        ({"start_timeout_s": 0}, "start_timeout_s is 0"),
        ({"state": b"junk"}, "not that of a rollout worker"),
    ],
)
def test_invalid_arguments_are_refused_before_it_starts(change, message):
    with pytest.raises(ValueError, match=message):
        make_worker(**change)


def test_a_worker_that_was_not_entered_says_so():
    rollouts = make_worker()
    for call in (lambda: rollouts.take(0), lambda: rollouts.evaluate(TASKS, PARAMS)):
        with pytest.raises(RuntimeError, match="with rollout.worker"):
            call()


def test_an_evaluation_that_fails_raises_and_cancels_the_rest():
    cancelled = []

    async def environment(task, engine, params):
        if params.temperature > 0:
            await asyncio.sleep(3600)
        if task["id"] == "1":
            await asyncio.sleep(0.05)
            raise ConnectionError("lost")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(task["id"])
            raise

    with make_worker(environment=environment) as rollouts:
        with pytest.raises(ConnectionError, match="lost"):
            rollouts.evaluate(TASKS, SamplingParams(max_tokens=3, temperature=0))

        assert sorted(cancelled) == ["0", "2", "3", "4"]


def test_the_plays_of_an_evaluation_that_takes_too_long_clean_up():
    base = scored()
    cleaned = []

    async def environment(task, engine, params):
        if params.temperature > 0:
            return await base(task, engine, params)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.1 * int(task["id"]))  # the first has ended before the others
            cleaned.append(task["id"])

    with make_worker(environment=environment) as rollouts:
        with pytest.raises(RuntimeError, match="took longer than"):
            rollouts.evaluate(TASKS, SamplingParams(max_tokens=3, temperature=0), timeout_s=0.5)

    assert sorted(cleaned) == ["0", "1", "2", "3", "4"]


def scored(environment=None):
    return rollout.single_turn(CharacterCodes(), reward=lambda task, reply: len(set(reply)))


def test_failed_rollouts_are_retried_and_their_errors_counted_by_name():
    base, attempts = scored(), iter(range(10_000))

    async def flaky(task, engine, params):
        if next(attempts) % 3 == 0:
            raise ConnectionError("lost")
        return await base(task, engine, params)

    with make_worker(environment=flaky, retries=5, max_staleness=0) as rollouts:
        rollouts.take(version=0)
        stats = rollouts.stats()

    assert stats["retried"] == stats["errors"]["ConnectionError"] > 0
    assert stats["dropped"] == 0


def test_a_straggler_does_not_hold_up_a_step_and_its_group_is_replaced():
    base = scored()

    async def sometimes_hangs(task, engine, params):
        if task["id"] == "0":
            await asyncio.sleep(3600)
        return await base(task, engine, params)

    plan = {"group_timeout_s": 5.0, "max_staleness": 0}
    with make_worker(environment=sometimes_hangs, **plan) as rollouts:
        groups = rollouts.take(version=0)
        stats = rollouts.stats()

    assert "0" not in [group.task_id for group in groups]
    assert stats["dropped_by"] == {"timeout": 1}
    assert stats["started"] == 4
    assert balanced(stats)


def test_survivors_are_trained_if_enough_remain():
    base, attempts = scored(), iter(range(10_000))

    async def flaky(task, engine, params):
        if next(attempts) % 4 == 0:
            raise ConnectionError("lost")
        return await base(task, engine, params)

    plan = {"group_size": 4, "min_group": 2, "retries": 0, "max_staleness": 0}
    with make_worker(environment=flaky, **plan) as rollouts:
        groups = rollouts.take(version=0)

    assert [len(group.rollouts) for group in groups] == [3, 3, 3]


def test_a_task_that_keeps_failing_is_put_in_quarantine():
    base = scored()
    played = []

    async def poisoned(task, engine, params):
        played.append(task["id"])
        if task["id"] == "2":
            raise ConnectionError("lost")
        return await base(task, engine, params)

    engine = FakeEngine()
    with make_worker(engine, poisoned, quarantine_after=2, retries=0) as rollouts:
        for step in range(12):
            rollouts.take(version=step)
            engine.version = step + 1
        stats = rollouts.stats()
        state = rollouts.state()
    seen = len(played)
    with make_worker(engine, poisoned, quarantine_after=2, retries=0, state=state) as rollouts:
        rollouts.take(version=12)
        again = rollouts.stats()

    assert stats["quarantined"] == 1
    assert stats["dropped_by"]["failed"] == 2
    assert stats["skipped"] > 0
    assert "2" not in played[seen:]
    assert again["quarantined"] == 1
    assert balanced(again)


def test_when_every_task_is_in_quarantine_the_run_stops():
    async def dead(task, engine, params):
        raise ConnectionError("no sandbox")

    plan = {"quarantine_after": 1, "groups_per_step": 50, "max_staleness": 0}
    with make_worker(environment=dead, **plan) as rollouts:
        with pytest.raises(RuntimeError, match="every task is in quarantine"):
            rollouts.take(version=0)


def test_a_group_that_no_step_can_use_any_more_is_cancelled_at_once():
    base = scored()
    cancelled = []

    async def environment(task, engine, params):
        reply = await base(task, engine, params)
        if task["id"] == "0":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(engine.version)
                raise
        return reply

    engine = FakeEngine()
    tasks = [{"id": "0", "prompt": "slow"}] + [{"id": "1", "prompt": "fast"}] * 500
    with make_worker(engine, environment, tasks, group_size=1) as rollouts:
        for step in range(2):
            rollouts.take(version=step)
            assert not cancelled or step == 1
            engine.version = step + 1
        rollouts.take(version=2)
        stats = rollouts.stats()

    assert len(cancelled) == 1
    assert stats["dropped_by"] == {"cancelled": 1}
    assert stats["tokens_by"]["cancelled"] == 3  # what it had sampled
    assert balanced(stats)


def test_a_cancelled_group_cleans_up_though_its_worker_goes_on_and_is_closed():
    base = scored()
    opened, cleaned = [], []

    async def environment(task, engine, params):
        reply = await base(task, engine, params)
        if task["id"] == "0":
            opened.append(task)
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.3)
                cleaned.append(task)
        return reply

    engine = FakeEngine()
    tasks = [{"id": "0", "prompt": "slow"}] + [{"id": "1", "prompt": "fast"}] * 500
    with make_worker(engine, environment, tasks, groups_per_step=1) as rollouts:
        for step in range(4):  # from the third on, the slow group is too old
            rollouts.take(version=step)
            engine.version = step + 1

    assert len(opened) == 2
    assert len(cleaned) == 2


def test_versions_may_be_numpys():
    # Without the checks of types that these tests add.
    mark_version = inspect.unwrap(rollout.Worker.mark_version)
    take = inspect.unwrap(rollout.Worker.take)
    with make_worker(await_verification=True) as rollouts:
        mark_version(rollouts, np.int64(0), verified=True)
        take(rollouts, np.int64(0))
        state = rollouts.state()
    with make_worker(state=state) as resumed:
        assert resumed.stats()["trained"] == 3


@pytest.mark.parametrize("on_stale", ["wait", "mask_tokens"])
def test_other_values_of_on_stale_cancel_nothing(on_stale):
    base = scored()

    async def slow(task, engine, params):
        reply = await base(task, engine, params)
        if task["id"] == "0":
            await asyncio.sleep(0.2)
        return reply

    engine = FakeEngine()
    with make_worker(engine, slow, on_stale=on_stale, group_size=1) as rollouts:
        for step in range(8):
            for group in rollouts.take(version=step):
                assert (step - group.versions <= 1).all()
            engine.version = step + 1
        stats = rollouts.stats()

    assert "cancelled" not in stats["dropped_by"]
    if on_stale == "wait":
        assert stats["dropped"] == 0
    assert balanced(stats)


def test_collecting_resumes_from_a_state_without_skipping_a_task():
    """Groups trained, buffered and in flight, and tasks not yet drawn, are every task once."""
    tasks = [{"id": str(n), "prompt": f"task {n}"} for n in range(60)]
    engine, trained = FakeEngine(delay_s=0.01), []
    plan = {"max_staleness": 2, "on_stale": "wait"}
    with make_worker(engine, tasks=iter(tasks), **plan) as rollouts:
        for step in range(4):
            trained += rollouts.take(version=step)
            engine.version = step + 1
        state = rollouts.state()
        before = rollouts.stats()

    # An iterator of the same tasks: the state knows how far the first had come.
    with make_worker(engine, tasks=iter(tasks), state=state, **plan) as rollouts:
        for step in range(4, 20):
            groups = rollouts.take(version=step)
            assert all((step - group.versions <= 2).all() for group in groups)
            trained += groups
            engine.version = step + 1
        stats = rollouts.stats()

    assert sorted(int(group.task_id) for group in trained) == list(range(60))
    assert stats["started"] == stats["trained"] == 60
    assert stats["rollout_tokens"] >= before["rollout_tokens"]
    assert balanced(stats)


SAVED = {"group_size": 3, "min_group": 2, "groups_per_step": 2, "max_staleness": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 4}, "group_size=3, not 4: .* resume with group_size=3, or without"),
        ({"group_size": 2}, "group_size=3, not 2"),
        ({"groups_per_step": 3}, "groups_per_step=2, not 3"),
        ({"min_group": 3}, "min_group=2, not 3"),
        ({"await_verification": False}, "its unverified groups would be trained"),
        ({"tasks": [{"prompt": f"other {n}"} for n in range(5)]}, "taken after a different task"),
        ({"tasks": TASKS[:1]}, "but there are only 1"),
        ({"tasks": rollout.Shuffled(TASKS, seed=0)}, "the state does not fit"),
        ({"min_group": 1}, None),
        ({"max_staleness": 0}, None),
        ({"max_staleness": 5}, None),
        ({"on_stale": "mask_tokens"}, None),
        ({"on_stale": "wait", "max_staleness": 1}, None),
        ({"publish_every": 2}, None),
        ({"retries": 4, "quarantine_after": 1}, None),
        ({"params": SamplingParams(max_tokens=3, temperature=0.5)}, None),
        ({"tasks": [*TASKS, {"prompt": "a new one"}]}, None),
    ],
)
def test_a_state_is_restored_only_where_its_groups_are_what_the_worker_would_make(change, message):
    before = {"await_verification": True} if "await_verification" in change else {}
    engine = FakeEngine(delay_s=0)
    with make_worker(engine, **SAVED | before) as rollouts:
        for step in range(0 if before else 3):
            rollouts.take(version=step)
            engine.version = step + 1
        while rollouts.stats()["buffered"] < 4:
            time.sleep(0.01)
        state = rollouts.state()

    if message is not None:
        with pytest.raises(ValueError, match=message):
            make_worker(engine, state=state, **SAVED | change)
        return
    bound = (SAVED | change)["max_staleness"]
    with make_worker(engine, state=state, **SAVED | change) as rollouts:
        for step in range(3, 9):
            for group in rollouts.take(version=step):
                assert 0 <= step - group.versions.max()
                assert step - group.versions.min() <= bound
            engine.version = step + 1
            assert balanced(rollouts.stats())


def test_a_task_that_cannot_be_stored_is_an_error_that_loses_nothing():
    base, playing, released = scored(), threading.Event(), threading.Event()

    async def held(task, engine, params):
        playing.set()
        await asyncio.to_thread(released.wait, 20)
        return await base(task, engine, params)

    with make_worker(environment=held, tasks=[{"prompt": "a", "check": object()}]) as rollouts:
        assert playing.wait(timeout=20)
        with pytest.raises(
            ValueError, match=r"task '0'\['check'\] is a object, which can't be stored"
        ):
            rollouts.state()
        released.set()
        assert len(rollouts.take(version=0)) == 3


def test_an_evaluation_continues_with_its_version_while_training_publishes():
    training, pinned = FakeEngine(), FakeEngine(delay_s=0.02)
    pinned.version = 7
    with make_worker(training) as rollouts:
        evaluation = rollouts.start_evaluation(TASKS, PARAMS, engine=pinned)
        for step in range(5):
            rollouts.take(version=step)
            training.version = step + 1
        results = evaluation.result()

        assert evaluation.done()

    assert len(results) == 5
    for one in results:
        assert (one.samples[0].versions[one.samples[0].loss_mask] == 7).all()


def test_an_evaluation_under_which_weights_change_is_an_error_not_a_mixture():
    class Waits(FakeEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            while params.temperature == 0 and self.version == 0:
                await asyncio.sleep(0.01)
            return await super().generate(prompt_ids, params)

    engine = Waits()
    with make_worker(engine) as rollouts:
        greedy = SamplingParams(max_tokens=3, temperature=0)
        evaluation = rollouts.start_evaluation(TASKS, greedy, one_version=True)
        rollouts.take(version=0)
        engine.version = 1
        with pytest.raises(RuntimeError, match=r"weights \[0, 1\] were served during"):
            evaluation.result()


def test_an_evaluation_that_runs_when_the_worker_is_closed_is_cancelled_and_says_so():
    ended = []

    async def hangs(task, engine, params):
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(task["id"])

    with make_worker(environment=hangs) as rollouts:
        evaluation = rollouts.start_evaluation([{"id": "held out"}], PARAMS)
        rollouts.stats()

    with pytest.raises(RuntimeError, match="the worker was closed"):
        evaluation.result()
    assert "held out" in ended


def test_several_environments_are_mixed_by_weight_and_counted_by_name():
    one, two = (rollout.single_turn(CharacterCodes(), reward=lambda t, r, v=v: v) for v in (1, 2))
    tasks = rollout.Mixture(
        {"one": [{"prompt": "a"}], "two": [{"prompt": "b"}, {"prompt": "c"}]},
        weights={"one": 2.0, "two": 1.0},
    )
    environment = rollout.combine_environments({"one": one, "two": two})
    with make_worker(environment=environment, tasks=tasks, max_staleness=0) as rollouts:
        groups = rollouts.take(version=0)
        counts = rollouts.stats()["environments"]

    assert {group.environment for group in groups} == {"one", "two"}
    assert counts["one"]["groups"] == 2 * counts["two"]["groups"]
    assert counts["one"]["reward_sum"] == counts["one"]["rollouts"]
    assert counts["two"]["reward_sum"] == 2 * counts["two"]["rollouts"]


def test_blocking_work_shows_as_loop_lag():
    base = scored()

    async def blocks(task, engine, params):
        time.sleep(0.15)
        return await base(task, engine, params)

    with make_worker(environment=blocks) as rollouts:
        rollouts.take(version=0)
        stats = rollouts.stats()

    assert stats["loop_lag_max_s"] > 0.1
    assert stats["loop_lag_p99_s"] <= stats["loop_lag_max_s"]


@pytest.mark.parametrize(
    ("value", "message"),
    [({1, 2}, "a set"), (2**70, "more than 64 bits"), ({"deep": [1.0, complex(1)]}, "a complex")],
)
def test_a_state_never_changes_a_task_silently(value, message):
    playing = threading.Event()

    async def endless(task, engine, params):  # a state holds the tasks of groups in flight
        playing.set()
        await asyncio.Event().wait()

    with make_worker(environment=endless, tasks=[{"prompt": "a", "extra": value}]) as rollouts:
        assert playing.wait(timeout=20)
        with pytest.raises(ValueError, match=message):
            rollouts.state()


def test_a_curriculum_that_raises_stops_the_run():
    class Broken(rollout.InOrder):
        def report(self, task, group):
            raise ZeroDivisionError("in a curriculum")

    async def dead(task, engine, params):
        raise ConnectionError("lost")

    for environment in (scored(), dead):
        with make_worker(environment=environment, tasks=Broken(TASKS)) as rollouts:
            with pytest.raises(RuntimeError, match="in a curriculum"):
                rollouts.take(version=0)


def test_an_error_that_cannot_be_printed_is_a_failure_like_any_other():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    async def mute(task, engine, params):
        raise Mute

    with make_worker(environment=mute) as rollouts:
        with pytest.raises(RuntimeError, match="rollouts stopped"):
            rollouts.take(version=0)
        stats = rollouts.stats()

    assert stats["errors"]["Mute"] > 0
    assert balanced(stats)


def test_a_route_closes_its_environments():
    closed = []

    class Closes:
        async def __call__(self, task, engine, params):
            return await scored()(task, engine, params)

        async def aclose(self):
            closed.append(1)

        def members(self):
            return [{"name": "inner", "pid": 1, "alive": True}]

    environment = rollout.combine_environments({"": Closes()})
    with make_worker(environment=environment) as rollouts:
        rollouts.take(version=0)
        assert [member["name"] for member in rollouts.members()] == ["inner"]

    assert closed == [1]


def test_an_environment_that_cannot_be_closed_hides_no_error(caplog):
    class Clings:
        async def __call__(self, task, engine, params):
            return await scored()(task, engine, params)

        async def aclose(self):
            raise ValueError("it clings")

    with pytest.raises(ZeroDivisionError), make_worker(environment=Clings()):
        raise ZeroDivisionError

    assert "could not be closed" in caplog.text


def test_without_an_engine_the_worker_does_nothing():
    """As on ranks other than 0, so that a loop needs no test of its rank."""
    idle = rollout.worker(
        None,
        rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 0.0),
        [{"prompt": "a"}],
        params=SamplingParams(max_tokens=4),
        group_size=2,
        groups_per_step=1,
        max_staleness=0,
    )
    with idle as rollouts:
        assert rollouts.take(version=7) == []
        assert rollouts.evaluate([{"prompt": "a"}], SamplingParams(max_tokens=4)) == []
        evaluation = rollouts.start_evaluation([], SamplingParams(max_tokens=4))
        assert evaluation.result() == []
        assert rollouts.ended_evaluations(timeout_s=1) == []
        assert not rollouts.evaluation_due(0, every=1)
        rollouts.mark_version(0, verified=True)
        assert rollouts.stats() == {}
        assert rollouts.members() == []
        assert rollouts.state() is None


def test_a_state_whose_versions_await_verification_since_the_first_mark_is_not_resumed_without():
    engine = FakeEngine(delay_s=0)
    with make_worker(engine, **SAVED) as rollouts:
        rollouts.mark_version(0, verified=True)
        state = rollouts.state()

    with pytest.raises(ValueError, match="its unverified groups would be trained"):
        make_worker(engine, state=state, **SAVED, await_verification=False)
    assert make_worker(engine, state=state, **SAVED)
