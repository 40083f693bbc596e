"""An engine that fails or hangs for a while: rollouts wait, and no task pays for it."""

import asyncio
import time
import uuid

import pytest
from conftest import CharacterCodes, FakeEngine, make_sample

from primerl import rollout
from primerl.types import Rollout, SamplingParams

PARAMS = SamplingParams(max_tokens=3)
TASKS = [{"id": str(n), "prompt": f"task {n}"} for n in range(8)]


class Outages(FakeEngine):
    """Fails, or hangs, in stated spans of seconds after its first request."""

    def __init__(self, *spans, error=ConnectionError, hangs=False):
        super().__init__(delay_s=0.002)
        self.spans, self.error, self.hangs = spans, error, hangs
        self.began = None
        self.failures = 0
        self.failed_sessions = set()

    async def generate(self, prompt_ids, params, *, session=None):
        now = time.monotonic()
        self.began = self.began or now
        for start, end in self.spans:
            if start <= now - self.began < end:
                if self.hangs:
                    await asyncio.sleep(end - (now - self.began))
                else:
                    self.failures += 1
                    await asyncio.sleep(0.001)
                    self.failed_sessions.add(session)  # not before it has failed
                    raise self.error("nobody is there")
        return await super().generate(prompt_ids, params)


base = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)


async def wraps(task, engine, params):
    try:
        return await base(task, engine, params)
    except Exception as error:
        raise ValueError("no reply") from error


async def hides(task, engine, params):
    try:
        return await base(task, engine, params)
    except Exception:
        pass
    raise KeyError("reply")


async def impatient(task, engine, params):
    """Takes no answer for too long once its request has failed, however fast this machine is."""
    session = uuid.uuid4().hex
    request = asyncio.create_task(engine.generate([1, 2], params, session=session))
    while not request.done():
        if session in engine.failed_sessions:
            request.cancel()
            raise TimeoutError("the engine takes too long")
        await asyncio.wait([request], timeout=0.05)
    return await base(task, engine, params)


async def makes_do(task, engine, params):
    """Ends without the reply once its request has failed, as an agent does at its limit of time."""
    try:
        return await impatient(task, engine, params)
    except TimeoutError:
        return Rollout(samples=[make_sample(version=engine.version)], reward=0.0, stop="timeout")


async def several_turns(task, engine, params):
    chat = rollout.Conversation(engine, CharacterCodes(), params)
    for _ in range(4):
        await chat.turn("a")
    return chat.rollout(reward=1.0)


def make_worker(engine, environment=base, **change):
    plan = {
        "params": PARAMS,
        "group_size": 2,
        "groups_per_step": 16,
        "max_staleness": 1,
        "timeout_s": 20.0,
        "isolation": "thread",
    }
    return rollout.worker(engine, environment, TASKS, **plan | change)


def balanced(stats):
    ended = stats["trained"] + stats["dropped"] + stats["buffered"]
    return stats["started"] == ended + stats["in_flight"]


def train(rollouts, engine, *, seconds, steps=3):
    began, step = time.monotonic(), 0
    while step < steps or time.monotonic() - began < seconds:
        groups = rollouts.take(version=step)
        assert len(groups) == 16
        assert all((group.rewards == 1.0).all() for group in groups)
        step += 1
        engine.version = step
        time.sleep(0.02)
    return rollouts.stats()


class ServerError(Exception):
    """As of a library that derives from nothing in particular."""


CASES = [
    *[(base, kind) for kind in (ConnectionRefusedError, TimeoutError, RuntimeError, ServerError)],
    *[(environment, ServerError) for environment in (wraps, hides, several_turns)],
    *[(environment, ConnectionRefusedError) for environment in (impatient, makes_do)],
]


@pytest.mark.thorough
@pytest.mark.parametrize(("environment", "error"), CASES)
def test_an_outage_is_not_a_failure_of_any_task(environment, error):
    engine = Outages((0.05, 0.4), (0.5, 0.7), error=error)
    with make_worker(engine, environment, quarantine_after=1, retries=0) as rollouts:
        stats = train(rollouts, engine, seconds=0.7)

    assert stats["engine_errors"][error.__name__] > 0
    assert stats["quarantined"] == stats["retried"] == 0
    assert stats["errors"] == {}
    assert set(stats["dropped_by"]) <= {"cancelled", "stale"}  # where a step went without it
    assert balanced(stats)


def test_an_engine_that_hangs_is_what_times_out():
    engine = Outages((0.05, 2.5), hangs=True)
    plan = {"quarantine_after": 100, "retries": 0, "group_timeout_s": 1.0}
    with make_worker(engine, **plan) as rollouts:
        stats = train(rollouts, engine, seconds=2.6)

    lost = stats["dropped_by"]
    assert lost["engine"] > lost.get("timeout", 0)  # a loaded machine is slow to answer, too
    assert balanced(stats)


def test_environment_failures_during_an_outage_are_counted():
    async def poisoned(task, engine, params):
        reply = await base(task, engine, params)
        if task["id"] == "3":
            raise ConnectionError("the sandbox is gone")
        return reply

    engine = Outages((0.05, 0.4))
    with make_worker(engine, poisoned, quarantine_after=2, retries=1) as rollouts:
        stats = train(rollouts, engine, seconds=0.6)

    assert stats["quarantined"] == 1
    assert stats["dropped_by"]["failed"] >= 2
    assert stats["errors"]["ConnectionError"] >= 4
    assert balanced(stats)


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_engine_that_stays_down_raises_an_error_naming_it(isolation):
    engine = Outages((0.0, 3600.0))
    with make_worker(engine, timeout_s=4.0, isolation=isolation) as rollouts:
        with pytest.raises(RuntimeError, match=r"engine \(Outages\).*ConnectionError: nobody is"):
            rollouts.take(version=0)
        with pytest.raises(RuntimeError, match=r"engine \(Outages\).*ConnectionError: nobody is"):
            rollouts.evaluate(TASKS, PARAMS)
        stats = rollouts.stats()

    assert stats["quarantined"] == 0
    assert balanced(stats)


def test_a_request_that_fails_while_others_are_answered_is_dropped_by_name():
    class Poisoned(FakeEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            if prompt_ids[-1] == ord("3"):
                raise ConnectionError("the server died of it")
            return await super().generate(prompt_ids, params)

    engine = Poisoned(delay_s=0.002)
    with make_worker(engine) as rollouts:
        step, stats = 0, {"dropped_by": {}}
        while "engine" not in stats["dropped_by"]:
            rollouts.take(version=step)
            step += 1
            engine.version = step
            time.sleep(0.02)
            stats = rollouts.stats()

    assert stats["dropped_by"]["engine"] > 0
    assert stats["quarantined"] == 0
    assert "failed" not in stats["dropped_by"]
    assert balanced(stats)


def test_a_refusal_of_the_engine_fails_the_rollout():
    engine = Outages((0.0, 3600.0), error=ValueError)
    with make_worker(engine) as rollouts:
        with pytest.raises(RuntimeError, match="nobody is there"):
            rollouts.take(version=0)
        stats = rollouts.stats()

    assert stats["dropped_by"]["failed"] >= 12
    assert stats["engine_errors"] == {}


def test_an_evaluation_waits_for_its_engine():
    engine = Outages((0.0, 0.5))
    with make_worker(FakeEngine()) as rollouts:
        results = rollouts.evaluate(TASKS, PARAMS, engine=engine)

    assert len(results) == 8
    assert engine.failures > 0


def test_an_outage_with_an_isolated_environment():
    engine = Outages((0.0, 1.0))
    environment = rollout.isolated(wraps, processes=1)
    with make_worker(engine, environment, quarantine_after=1, retries=0) as rollouts:
        rollouts.take(version=0)
        stats = rollouts.stats()

    assert engine.failures > 0
    assert stats["errors"] == {}
    assert stats["dropped"] == stats["quarantined"] == 0
