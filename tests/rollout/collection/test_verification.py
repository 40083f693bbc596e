"""Provisional versions: their groups wait, and are never trained if the version is rejected."""

import asyncio
import functools
import random
import threading
import time

import attrs
import numpy as np
import pytest
from conftest import CharacterCodes, FakeEngine, make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from primerl import rollout, testing
from primerl.types import Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=3)
TASKS = [{"id": str(n), "prompt": f"task {n}"} for n in range(5)]


def buffer(**change):
    return rollout.Buffer(
        **{"groups_per_step": 1, "max_staleness": 2, "await_verification": True} | change
    )


def stored(buffer, *versions):
    for version in versions:
        buffer.start()
        buffer.put(version if not isinstance(version, int) else make_group(version=version))


def mixed(*versions, trained_from=0):
    """A group whose tokens were sampled by these versions, in order."""
    group = make_group()
    sample = group.rollouts[0].samples[0]
    found = np.full(len(sample.token_ids), -1, np.int32)
    found[3 : 3 + len(versions)] = versions
    mask = found >= trained_from
    one = attrs.evolve(sample, versions=found, loss_mask=mask)
    return attrs.evolve(group, rollouts=[attrs.evolve(group.rollouts[0], samples=[one])])


# ---- the buffer, by hand ----


def test_a_group_waits_until_its_version_is_verified():
    held = buffer()
    stored(held, 0)

    assert held.take(0) is None
    assert held.awaiting_verification == {0: 1}
    held.mark_version(0, verified=True)
    assert len(held.take(0)) == 1
    assert held.awaiting_verification == {}


def test_verified_groups_pass_those_that_wait_and_keep_their_order():
    held = buffer()
    stored(held, 0, 1, 2)
    held.mark_version(1, verified=True)
    held.mark_version(2, verified=True)

    assert held.take(2)[0].versions.max() == 1
    assert held.take(2)[0].versions.max() == 2
    assert held.take(2) is None
    held.mark_version(0, verified=True)
    assert held.take(2)[0].versions.max() == 0


def test_groups_of_a_rejected_version_are_dropped_even_if_they_end_later():
    held = buffer()
    stored(held, 0, 1)
    held.mark_version(0, verified=True)
    held.mark_version(1, verified=False)

    assert held.dropped == {"unverified": 1}
    assert held.tokens["unverified"] == 8
    held.start()
    assert not held.put(make_group(version=1))
    assert held.dropped == {"unverified": 2}
    assert held.take(1)[0].versions.max() == 0
    assert held.in_flight == held.buffered == 0


def test_every_version_of_a_group_counts_also_of_tokens_that_are_not_trained():
    held = buffer()
    stored(held, mixed(0, 1, 2, trained_from=2))
    held.mark_version(2, verified=True)
    held.mark_version(0, verified=True)
    assert held.take(2) is None
    held.mark_version(1, verified=False)
    assert held.dropped == {"unverified": 1}


def test_masked_tokens_still_need_a_verified_version():
    held = buffer(on_stale="mask_tokens", max_staleness=1)
    old, new = mixed(0).rollouts[0].samples[0], mixed(3).rollouts[0].samples[0]
    both = attrs.evolve(make_group().rollouts[0], samples=[old, new])
    stored(held, attrs.evolve(make_group(), rollouts=[both]))  # the first sample will leave
    held.mark_version(3, verified=True)
    assert held.take(4) is None
    assert held.awaiting_verification == {0: 1}
    held.mark_version(0, verified=True)
    (group,) = held.take(4)
    assert set(group.versions) == {3}


def test_a_verified_version_may_be_rejected_later_and_a_repaired_one_verified():
    held = buffer()
    stored(held, 0)
    held.mark_version(0, verified=True)
    held.mark_version(0, verified=False)
    assert held.dropped == {"unverified": 1}
    assert held.verification.newest_rejected
    held.mark_version(0, verified=True)
    assert not held.verification.newest_rejected
    stored(held, 0)
    assert len(held.take(0)) == 1


def test_without_await_verification_nothing_waits_and_nothing_is_marked():
    held = buffer(await_verification=False)
    stored(held, 0)
    with pytest.raises(ValueError, match="await_verification=False"):
        held.mark_version(0, verified=True)
    assert len(held.take(0)) == 1


def test_waiting_steps_wait_for_verification_before_a_group_goes_stale():
    held = buffer(on_stale="wait", max_staleness=1)
    stored(held, 0, 1)
    held.mark_version(1, verified=True)

    assert held.take(1) is None, "the group of version 0 would be left behind, too old for step 2"
    held.mark_version(0, verified=True)
    assert held.take(1)[0].versions.max() == 0
    assert held.take(2)[0].versions.max() == 1


def test_state_keeps_the_marked_versions_and_a_resumed_buffer_drops_what_was_provisional():
    held = buffer()
    stored(held, 0, 1, 2)
    held.mark_version(0, verified=True)
    held.mark_version(1, verified=False)
    other = buffer()
    other.restore(held.state())

    assert other.awaiting_verification == {}
    assert other.dropped["unverified"] == 2, "version 2 was published again, not verified"
    other.mark_version(2, verified=True)
    assert other.take(2)[0].versions.max() == 0
    assert other.take(2) is None
    assert other.verification.any_rejected([1])
    assert other.started == 3


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_unverified_token_is_taken_whenever_versions_are_marked(data):
    bound = data.draw(st.integers(0, 3))
    on_stale = data.draw(st.sampled_from(["drop", "wait", "mask_tokens"]))
    held = buffer(groups_per_step=2, max_staleness=bound, on_stale=on_stale)
    marked, version, flying = {}, 0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["start", "put", "mark", "take", "publish", "resume"]))
        if action == "start":
            held.start()
            flying += 1
        elif action == "put" and flying:
            flying -= 1
            versions = data.draw(st.lists(st.integers(0, version), min_size=1, max_size=4))
            group = mixed(*sorted(versions))
            kept = held.put(group)
            assert kept != any(marked.get(v) is False for v in versions)
        elif action == "mark":
            one, verified = data.draw(st.integers(0, version)), data.draw(st.booleans())
            marked[one] = verified
            held.mark_version(one, verified=verified)
        elif action == "take":
            before = held.state()
            fills = held.would_fill(version)
            assert held.state() == before, "a question changes nothing"
            taken = held.take(version)
            assert fills == (taken is not None)
            for group in taken or ():
                everything = group.samples[0].versions
                assert all(marked.get(int(v)) for v in everything if v >= 0)
                assert version - group.versions.min() <= bound
            version += taken is not None
        elif action == "publish":
            version += 1
        elif action == "resume":
            state, flying = held.state(), 0
            held = buffer(groups_per_step=2, max_staleness=bound, on_stale=on_stale)
            held.restore(state)
        ended = held.trained + held.dropped.total() + held.buffered
        assert held.started == ended + held.in_flight
        assert held.in_flight == flying


# ---- the worker ----


def make_worker(engine, *, isolation="thread", environment=None, **change):
    plan = {
        "params": PARAMS,
        "group_size": 2,
        "groups_per_step": 3,
        "max_staleness": 1,
        "timeout_s": 20.0,
        "await_verification": True,
        "isolation": isolation,
    } | change
    environment = environment or rollout.single_turn(
        CharacterCodes(), reward=lambda task, reply: len(set(reply))
    )
    return rollout.worker(engine, environment, TASKS, **plan)


def balanced(stats):
    ended = stats["trained"] + stats["dropped"] + stats["buffered"]
    return stats["started"] == ended + stats["in_flight"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_versions_that_are_verified_are_trained_and_a_rejected_one_is_not(isolation):
    engine = testing.ScriptedEngine(latency=0.002)
    with make_worker(engine, isolation=isolation, max_staleness=2) as rollouts:
        rollouts.mark_version(0, verified=True)
        trained = set()
        for step in range(12):
            groups = rollouts.take(version=step)
            trained |= {int(v) for group in groups for v in group.versions}
            engine.update_weights({}, version=step + 1)
            if step + 1 == 5:
                time.sleep(0.1)  # it samples
                rollouts.mark_version(5, verified=False)
                assert rollouts.stats()["dropped_by"]["unverified"] > 0
                time.sleep(0.05)
                assert rollouts.stats()["in_flight"] == 0, "nothing is sampled that can't be used"
                # Repaired and published again, under the same number.
            rollouts.mark_version(step + 1, verified=True)
            assert balanced(rollouts.stats())
        stats = rollouts.stats()

    assert stats["trained"] == 36
    assert max(trained) >= 9
    assert stats["dropped_by"]["unverified"] >= 1


def test_a_question_about_a_step_expires_and_reserves_nothing():
    held = buffer(groups_per_step=2, max_staleness=1)
    stored(held, 0, 0)
    held.mark_version(0, verified=True)
    assert held.would_fill(0)
    assert not held.would_fill(2), "too old"
    assert not held.would_fill(-1), "of the future"
    assert held.first_version is None
    reserved = held.reserve(0)
    assert not held.would_fill(0), "reserved groups are on their way"
    held.deliver()
    assert len(reserved) == held.trained == 2


def test_ready_says_whether_take_would_wait_and_changes_nothing():
    engine = testing.ScriptedEngine()
    with make_worker(engine, max_staleness=0) as rollouts:
        assert not rollouts.ready(0)
        until(lambda: rollouts.stats()["buffered"] == 3)
        assert not rollouts.ready(0), "the version is provisional"
        rollouts.mark_version(0, verified=True)
        before = rollouts.stats()
        assert rollouts.ready(0)
        assert rollouts.ready(np.int64(0))
        assert rollouts.stats()["buffered"] == before["buffered"] == 3
        assert len(rollouts.take(0)) == 3
        assert not rollouts.ready(1)
        assert balanced(rollouts.stats())


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize(("step_s", "publish_s"), [(0.0, 0.02), (0.02, 0.0), (0.03, 0.01)])
def test_versions_that_arrive_during_the_next_step_never_stall_it(max_staleness, step_s, publish_s):
    """As in glm_swe.py: fast rollouts and slow ones, a version on its way at each take."""
    engine = testing.ScriptedEngine(latency=0.002)
    with make_worker(engine, max_staleness=max_staleness) as rollouts:

        def start(version):
            def arrive():
                time.sleep(publish_s)
                engine.update_weights({}, version=version)

            thread = threading.Thread(target=arrive)
            thread.start()

            def wait():
                thread.join()
                rollouts.mark_version(version, verified=True)

            return functools.cache(wait)

        wait = start(0)
        for step in range(10):
            if not rollouts.ready(step):
                wait()
            groups = rollouts.take(step)
            stale = [step - int(v) for group in groups for v in group.versions]
            assert 0 <= min(stale) <= max(stale) <= max_staleness
            time.sleep(step_s)
            wait()
            wait = start(step + 1)
        wait()


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_take_that_waits_for_verification_says_so_at_its_deadline(isolation):
    with make_worker(testing.ScriptedEngine(), isolation=isolation, timeout_s=8.0) as rollouts:
        with pytest.raises(
            RuntimeError, match=r"wait for verification: 6 for version 0: call mark_version"
        ):
            rollouts.take(version=0)
        assert rollouts.stats()["awaiting_verification"] == {0: 6}
        rollouts.mark_version(0, verified=True)
        assert len(rollouts.take(version=0)) == 3


def test_a_take_is_answered_as_soon_as_another_thread_marks_the_version():
    with make_worker(FakeEngine()) as rollouts:
        later = threading.Timer(0.3, rollouts.mark_version, args=(0,), kwargs={"verified": True})
        later.start()
        assert len(rollouts.take(version=0)) == 3
        later.join()


def test_a_take_after_a_rejection_says_what_to_do():
    with make_worker(FakeEngine(), timeout_s=0.4) as rollouts:
        rollouts.mark_version(0, verified=False)
        with pytest.raises(RuntimeError, match="newest version was rejected: publish it again"):
            rollouts.take(version=0)


def test_groups_in_flight_with_a_rejected_version_are_cancelled_at_once():
    async def hangs(task, engine, params):
        await engine.generate([1], params)
        await asyncio.sleep(3600)

    engine = FakeEngine()
    with make_worker(engine, environment=hangs) as rollouts:
        until(lambda: rollouts.stats()["in_flight"] == 6)
        rollouts.mark_version(0, verified=False)
        until(lambda: rollouts.stats()["in_flight"] == 0)
        stats = rollouts.stats()

    assert stats["dropped_by"] == {"unverified": stats["started"]}
    assert balanced(stats)


def test_a_group_that_began_after_the_rejected_version_continues():
    release = threading.Event()

    async def patient(task, engine, params):
        chat = rollout.Conversation(engine, CharacterCodes(), params)
        await chat.turn("go")
        while not release.is_set():
            await asyncio.sleep(0.01)
        return chat.rollout(reward=1.0)

    engine = FakeEngine()
    engine.version = 1
    with make_worker(engine, environment=patient) as rollouts:
        until(lambda: rollouts.stats()["in_flight"] == 6)
        time.sleep(0.1)
        rollouts.mark_version(0, verified=False)  # a late outcome of an older one
        rollouts.mark_version(1, verified=True)
        release.set()
        assert len(rollouts.take(version=1)) == 3
        assert rollouts.stats()["dropped_by"] == {}


def test_marking_a_version_without_await_verification_is_a_mistake():
    with make_worker(FakeEngine(), await_verification=False) as rollouts:
        with pytest.raises(ValueError, match="await_verification=False"):
            rollouts.mark_version(0, verified=True)


class Poisoned:
    """An engine of which some publications are bad: their tokens are 7 until a repair."""

    context_length = 1000

    def __init__(self, draw):
        self.version = 0
        self.bad = False
        self._draw = draw

    async def generate(self, prompt_ids, params, *, session=None):
        tokens, versions = [], []
        for _ in range(3):
            await asyncio.sleep(self._draw.random() * 0.003)
            versions.append(self.version)
            tokens.append(7 if self.bad else 5)
        return Completion(
            token_ids=tokens, logprobs=[-1.0] * 3, versions=versions, finish_reason="length"
        )


@pytest.mark.thorough
@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 3),
    on_stale=st.sampled_from(["drop", "wait", "mask_tokens"]),
    interrupted=st.sets(st.integers(1, 7), max_size=2),
)
@settings(max_examples=25, deadline=None)
def test_no_token_of_bad_weights_is_ever_trained(seed, bound, on_stale, interrupted):
    """Publications fail at random and are repaired under the same number; runs are resumed."""
    draw = random.Random(seed)
    engine = Poisoned(draw)

    async def turns(task, engine_, params):
        chat = rollout.Conversation(engine_, CharacterCodes(), params)
        for _ in range(draw.randint(1, 3)):
            await chat.turn("go on")
        return chat.rollout(reward=1.0)

    def publish(rollouts, version):
        engine.bad = draw.random() < 0.4
        engine.version = version
        while engine.bad:
            time.sleep(0.01 * draw.random())
            rollouts.mark_version(version, verified=False)
            time.sleep(0.01 * draw.random())
            engine.bad = draw.random() < 0.3
        time.sleep(0.005 * draw.random())
        rollouts.mark_version(version, verified=True)

    plan = {"environment": turns, "max_staleness": bound, "on_stale": on_stale}
    state, step = None, 0
    while step < 8:
        with make_worker(engine, state=state, **plan) as rollouts:
            if step == 0:
                rollouts.mark_version(0, verified=True)
            while step < 8:
                for group in rollouts.take(version=step):
                    for sample in group.samples:
                        assert 7 not in sample.token_ids[sample.versions >= 0]
                    assert step - group.versions.min() <= bound
                step += 1
                publish(rollouts, step)
                stats = rollouts.stats()
                assert balanced(stats)
                assert stats["trained"] == 3 * step
                if step in interrupted:
                    interrupted = interrupted - {step}
                    break
            state = rollouts.state()
    assert balanced(rollouts.stats())


def test_the_first_mark_makes_every_other_version_provisional_also_what_came_before():
    held = buffer(await_verification=None)
    stored(held, 0, 1)
    assert held.awaiting_verification == {}
    held.mark_version(0, verified=True)

    assert held.awaiting_verification == {1: 1}


def test_without_a_mark_nothing_waits_and_a_resumed_buffer_remembers_the_first():
    held = buffer(await_verification=None)
    stored(held, 0)
    held.mark_version(5, verified=True)

    resumed = buffer(await_verification=None)
    resumed.restore(held.state())

    assert resumed.dropped == {"unverified": 1}
