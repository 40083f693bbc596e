"""Environments in processes of their own, which hang, die and are replaced."""

import asyncio
import contextlib
import os
import random
import signal
import time

import psutil
import pytest
from conftest import CharacterCodes

from primerl import rollout, testing
from primerl.types import NOT_SAMPLED, Rollout, Sample, SamplingParams

PARAMS = SamplingParams(max_tokens=4)


async def plain(task, engine, params):
    """One turn; metrics say where it was played."""
    reply = await engine.generate([2, 3], params)
    return Rollout(
        samples=[
            Sample(
                token_ids=[2, 3, *reply.token_ids],
                loss_mask=[False, False, *[True] * len(reply.token_ids)],
                behavior_logprobs=[0, 0, *reply.logprobs],
                versions=[NOT_SAMPLED] * 2 + reply.versions.tolist(),
            )
        ],
        reward=float(task["reward"]),
        metrics={"pid": os.getpid(), "version": engine.version},
    )


def played(environment, tasks, *, engine=None):
    """Every task once; errors as they are."""

    async def run():
        engine_ = engine or testing.ScriptedEngine()
        try:
            return await asyncio.gather(
                *(environment(task, engine_, PARAMS) for task in tasks), return_exceptions=True
            )
        finally:
            await environment.aclose()

    return asyncio.run(run())


def test_rollouts_are_those_of_the_environment_spread_over_processes():
    engine = testing.ScriptedEngine([[7, 8, 9, 10]], latency=0.01)
    engine.update_weights({}, version=3)
    environment = rollout.isolated(plain, processes=2)

    results = played(environment, [{"reward": n} for n in range(40)], engine=engine)

    assert [one.reward for one in results] == list(range(40))
    assert results[0].samples[0].token_ids.tolist() == [2, 3, 7, 8, 9, 10]
    assert results[0].samples[0].versions.tolist() == [-1, -1, 3, 3, 3, 3]
    assert {one.metrics["version"] for one in results} == {3}
    pids = {one.metrics["pid"] for one in results}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(map(psutil.pid_exists, map(int, pids)))
    assert environment.members() == [] or not any(m["alive"] for m in environment.members())
    assert engine.calls == 40


def test_an_error_is_the_environments_own():
    async def broken(task, engine, params):
        raise KeyError(task["name"])

    (error,) = played(rollout.isolated(broken, processes=1), [{"name": "x"}])

    assert isinstance(error, KeyError)
    assert "in broken" in "".join(error.__notes__)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exit", "SystemExit"),
        ("die", "environment process 0 .* killed by SIGKILL"),
        ("hang", "did not end within 5 s"),
    ],
)
def test_what_exits_dies_or_hangs_fails_alone_and_the_next_rollout_is_played(kind, message):
    async def environment(task, engine, params):
        if task["kind"] == "exit":
            raise SystemExit(1)
        if task["kind"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task["kind"] == "hang":
            await asyncio.sleep(3600)
        return Rollout(samples=[], reward=1.0)

    timeout_s = 5.0 if kind == "hang" else 60.0
    isolated = rollout.isolated(environment, processes=1, timeout_s=timeout_s)

    async def run():
        try:
            engine = testing.ScriptedEngine()
            await isolated({"kind": ""}, engine, PARAMS)  # the process is up
            with pytest.raises((RuntimeError, TimeoutError), match=message):
                await isolated({"kind": kind}, engine, PARAMS)
            return await isolated({"kind": ""}, engine, PARAMS)
        finally:
            await isolated.aclose()

    assert asyncio.run(run()).reward == 1.0


@pytest.mark.thorough
def test_a_process_that_is_blocked_is_killed_and_replaced(monkeypatch):
    monkeypatch.setattr("primerl.rollout.environments.process_pool.ANSWER_S", 0.5)

    async def environment(task, engine, params):
        if task["blocks"]:
            time.sleep(3600)
        return Rollout(samples=[], reward=1.0, metrics={"pid": os.getpid()})

    isolated = rollout.isolated(environment, processes=1, timeout_s=5.0)

    async def run():
        try:
            engine = testing.ScriptedEngine()
            before = await isolated({"blocks": False}, engine, PARAMS)
            with pytest.raises(TimeoutError, match="did not end within 5 s"):
                await isolated({"blocks": True}, engine, PARAMS)
            after = await isolated({"blocks": False}, engine, PARAMS)
            return before.metrics["pid"], after.metrics["pid"], isolated.restarts
        finally:
            await isolated.aclose()

    before, after, restarts = asyncio.run(run())
    assert before != after
    assert restarts == 1


def test_a_blocked_process_whose_callers_gave_up_is_replaced_too(monkeypatch):
    monkeypatch.setattr("primerl.rollout.environments.process_pool.ANSWER_S", 0.5)

    async def environment(task, engine, params):
        if task["blocks"]:
            time.sleep(3600)
        return Rollout(samples=[], reward=1.0)

    isolated = rollout.isolated(environment, processes=1, timeout_s=60.0)

    async def run():
        try:
            engine = testing.ScriptedEngine()
            await isolated({"blocks": False}, engine, PARAMS)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(isolated({"blocks": True}, engine, PARAMS), 0.2)
            return await isolated({"blocks": False}, engine, PARAMS)
        finally:
            await isolated.aclose()

    with contextlib.suppress(RuntimeError):  # it had reached the process before it was killed
        assert asyncio.run(run()).reward == 1.0
    assert isolated.restarts == 1


@pytest.mark.thorough
def test_a_task_that_kills_its_process_fails_alone():
    async def environment(task, engine, params):
        await asyncio.sleep(0.1)
        if task["reward"] == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        return await plain(task, engine, params)

    with rollout.worker(
        testing.ScriptedEngine(),
        rollout.isolated(environment, processes=2),
        [{"id": str(n), "reward": n} for n in range(16)],
        params=PARAMS,
        group_size=2,
        groups_per_step=15,
        max_staleness=0,
        quarantine_after=1,
    ) as rollouts:
        groups = rollouts.take(version=0)
        stats = rollouts.stats()

    assert sorted(int(group.task_id) for group in groups) == [n for n in range(16) if n != 3]
    assert stats["dropped_by"] == {"failed": 1}
    assert stats["quarantined"] == 1


def test_an_environments_own_deadline_is_its_own_error():
    async def gives_up(task, engine, params):
        raise TimeoutError("the sandbox did not answer")

    (error,) = played(rollout.isolated(gives_up, processes=1), [{}])

    assert isinstance(error, TimeoutError)
    assert str(error) == "the sandbox did not answer"


def test_one_process_that_cannot_start_leaves_the_work_to_the_others(tmp_path):
    class OnlyOne:
        def __reduce__(self):
            return exclusive, (str(tmp_path / "taken"),)

        async def __call__(self, task, engine, params):
            raise AssertionError

    results = played(rollout.isolated(OnlyOne(), processes=2), [{}] * 6)

    assert [one.reward for one in results] == [1.0] * 6


def exclusive(path):
    """An environment that only one process can have, as one that binds a port."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))

    async def environment(task, engine, params):
        return Rollout(samples=[], reward=1.0)

    return environment


def test_it_can_be_used_again_after_it_was_closed():
    environment = rollout.isolated(plain, processes=1)

    for _ in range(2):
        (one,) = played(environment, [{"reward": 1}])
        assert one.reward == 1.0


def test_what_is_cancelled_when_it_is_closed_cleans_up(tmp_path):
    box = tmp_path / "box"

    async def environment(task, engine, params):
        box.touch()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.3)
            box.unlink()

    async def run():
        isolated = rollout.isolated(environment, processes=1)
        playing = asyncio.create_task(isolated({}, testing.ScriptedEngine(), PARAMS))
        deadline = time.monotonic() + 60
        while not box.exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait([playing])
        await isolated.aclose()

    asyncio.run(run())
    assert not box.exists()


def test_an_environment_that_cannot_be_built_is_an_error_not_an_endless_restart():
    class Breaks:
        def __reduce__(self):
            return int, ("no number",)

        async def __call__(self, task, engine, params):
            raise AssertionError

    isolated = rollout.isolated(Breaks(), processes=1, timeout_s=60.0)

    (error,) = played(isolated, [{}])

    assert isinstance(error, RuntimeError)
    assert "'environment' can't be rebuilt" in str(error)


def test_a_reply_that_is_too_large_or_cannot_be_pickled_fails_alone(monkeypatch):
    async def environment(task, engine, params):
        if task["kind"] == "lock":
            import threading

            return threading.Lock()
        return Rollout(samples=[], reward=1.0)

    lock, fine = played(
        rollout.isolated(environment, processes=1), [{"kind": "lock"}, {"kind": ""}]
    )

    assert "lock" in str(lock)
    assert fine.reward == 1.0


@pytest.mark.thorough
def test_killing_processes_at_random_loses_no_rollout():
    """Over 200 rollouts, each is trained, or counted among the failures."""

    async def slow(task, engine, params):
        await asyncio.sleep(0.02)
        return await plain(task, engine, params)

    engine = testing.ScriptedEngine(latency=0.005)
    draw, killed = random.Random(0), 0
    with rollout.worker(
        engine,
        rollout.isolated(slow, processes=3),
        [{"reward": n % 5} for n in range(100)],
        params=PARAMS,
        group_size=4,
        groups_per_step=5,
        max_staleness=1,
        retries=2,
        timeout_s=60.0,
    ) as rollouts:
        trained = []
        for step in range(10):
            trained += rollouts.take(version=step)
            engine.update_weights({}, version=step + 1)
            heavy = [one for one in rollouts.members()[1:] if one["alive"]]
            if heavy and step % 2 == 0:
                os.kill(draw.choice(heavy)["pid"], signal.SIGKILL)
                killed += 1
        stats = rollouts.stats()

    assert killed >= 3
    assert sum(len(group.rollouts) for group in trained) == 200
    assert stats["started"] == stats["trained"] + stats["dropped"] + (
        stats["in_flight"] + stats["buffered"]
    )


@pytest.mark.parametrize(
    ("change", "message"), [({"processes": 0}, "processes is 0"), ({"timeout_s": 0}, "timeout_s")]
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rollout.isolated(plain, **change)


def test_an_environment_that_cannot_be_pickled_is_named_where_it_is_wrapped():
    codes, lock = CharacterCodes(), __import__("threading").Lock()

    async def environment(task, engine, params):
        return lock, codes

    with pytest.raises(ValueError, match="the argument 'environment' .*can't be sent"):
        rollout.isolated(environment)
