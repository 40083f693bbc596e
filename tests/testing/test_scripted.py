"""The engine without a model: what it says, when, and under which version."""

import asyncio
import pickle
import random
import re
import statistics
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
from conftest import CharacterCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import rollout, testing, weights
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=6, stop_token_ids=[1])


def say(engine, *, prompt=(5, 6), params=PARAMS):
    return asyncio.run(engine.generate(list(prompt), params))


def tokens(engine, **request):
    return say(engine, **request).token_ids.tolist()


def test_it_is_an_engine_and_a_receiver():
    engine = testing.ScriptedEngine()

    assert isinstance(engine, rollout.Engine)
    assert isinstance(engine, weights.Receiver)


def test_replies_are_used_in_turn_and_stop():
    engine = testing.ScriptedEngine([[7, 8], [9]])

    assert [tokens(engine) for _ in range(3)] == [[7, 8, 1], [9, 1], [7, 8, 1]]
    assert say(engine).finish_reason == "stop"
    assert say(engine).logprobs.tolist() == [-1.0] * 3
    assert engine.calls == 5


def test_text_is_encoded():
    engine = testing.ScriptedEngine(["AB"], tokenizer=CharacterCodes())

    assert tokens(engine) == [65, 66, 1]


def test_a_function_sees_the_prompt_and_the_number_of_the_call():
    engine = testing.ScriptedEngine(
        lambda prompt_ids, number: [prompt_ids[0], number + 10] if number else "C",
        tokenizer=CharacterCodes(),
    )

    assert tokens(engine) == [67, 1]
    assert tokens(engine) == [5, 11, 1]


@pytest.mark.parametrize(
    ("max_tokens", "stops", "expected", "reason"),
    [
        (2, (1,), [7, 8], "length"),
        (3, (1,), [7, 8, 9], "length"),
        (4, (1,), [7, 8, 9, 1], "stop"),
        (4, (9, 8), [7, 8], "stop"),
        (2, (8,), [7, 8], "stop"),
        (4, (6, 1), [7, 8, 9, 6], "stop"),
        (7, (), [7, 8, 9, 7, 8, 9, 7], "length"),
    ],
)
def test_where_a_completion_ends(max_tokens, stops, expected, reason):
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
    completion = say(testing.ScriptedEngine([[7, 8, 9]]), params=params)

    assert completion.token_ids.tolist() == expected
    assert completion.finish_reason == reason


def test_the_prompt_selects_a_greedy_reply():
    engine = testing.ScriptedEngine([[n] for n in range(2, 60)])
    greedy = SamplingParams(max_tokens=1, temperature=0)

    first = [tokens(engine, prompt=[n], params=greedy) for n in range(20)]

    assert first == [tokens(engine, prompt=[n], params=greedy) for n in range(20)]
    assert len({token for (token,) in first}) > 5


def test_the_lognormal_has_its_median_and_its_tail():
    draw = testing.lognormal(median_s=2.0, p99_over_median=10)
    rng = random.Random(0)
    values = sorted(draw(rng) for _ in range(100_000))

    assert statistics.median(values) == pytest.approx(2.0, rel=0.02)
    assert values[99_000] == pytest.approx(20.0, rel=0.05)
    assert testing.lognormal(median_s=3.0, p99_over_median=1)(rng) == pytest.approx(3.0)


def test_latencies_are_slept_once_and_repeat_with_the_seed(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for seed in (3, 3, 4):
        engine = testing.ScriptedEngine(latency=testing.lognormal(median_s=1.0), seed=seed)
        for _ in range(5):
            say(engine)

    assert len(slept) == 15
    assert slept[:5] == slept[5:10] != slept[10:]


def test_failures_by_number_are_raised_after_a_part_of_the_latency(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    engine = testing.ScriptedEngine(
        latency=10.0, failures=lambda number: ConnectionError("gone") if number == 1 else None
    )

    say(engine)
    with pytest.raises(ConnectionError, match="gone"):
        say(engine)
    say(engine)

    assert slept[0] == slept[2] == 10.0
    assert 0 < slept[1] < 10
    assert (engine.calls, engine.in_flight) == (3, 0)


def test_failures_by_fraction():
    def failed(seed):
        engine = testing.ScriptedEngine(failures=0.25, seed=seed)
        numbers = []
        for _ in range(400):
            try:
                say(engine)
            except RuntimeError as error:
                numbers.append(int(re.match(r"call (\d+) was scripted to fail", str(error))[1]))
        return numbers

    assert failed(0) == failed(0) != failed(1)
    assert 70 < len(failed(0)) < 130


class Clock:
    """Time that passes only where a test lets it."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_an_update_in_flight_splits_a_completion_at_its_moment(monkeypatch):
    clock = Clock(monkeypatch)
    engine = testing.ScriptedEngine([range(2, 12)], latency=1.0)

    async def sleep(seconds):
        for step in (0.35, 0.5):  # tokens are sampled after 0.1, 0.2, ..., 1.0 s
            clock.now = 100.0 + step
            engine.update_weights({}, version=engine.version + 2)
        clock.now = 100.0 + seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    params = SamplingParams(max_tokens=10)

    assert say(engine, params=params).versions.tolist() == [0] * 3 + [2] + [4] * 6
    clock.now = 101.0  # the second call begins at 101 and is over, by the clock, before that
    monkeypatch.undo()
    assert say(engine, params=params).versions.tolist() == [4] * 10


@given(
    moments=st.lists(st.floats(0.0, 2.0), max_size=6),
    count=st.integers(1, 30),
)
@settings(deadline=None)
def test_versions_never_decrease_and_are_those_served(moments, count):
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        engine = testing.ScriptedEngine([range(2, 2 + count)])

        async def sleep(seconds):
            for moment in sorted(moments):
                clock.now = 100.0 + moment
                engine.update_weights({}, version=engine.version + 1)
            clock.now = 102.0

        monkeypatch.setattr(asyncio, "sleep", sleep)
        versions = say(engine, params=SamplingParams(max_tokens=count)).versions

    sampled = 2.0 * np.arange(1, count + 1) / count
    expected = [sum(moment <= at + 1e-9 for moment in moments) for at in sampled]
    differ = [v for v, e, at in zip(versions, expected, sampled, strict=True) if v != e]
    assert not [v for v in differ if min(abs(m - at) for m in moments for at in sampled) > 1e-6]
    assert (np.diff(versions) >= 0).all()
    assert engine.version == len(moments)


def test_weights_are_published_to_it_from_another_thread():
    engine = testing.ScriptedEngine(latency=0.05)
    transport = weights.SharedMemory(testing.tiny_model("llama"), engine)

    async def main():
        running = asyncio.create_task(engine.generate([5], SamplingParams(max_tokens=50)))
        await asyncio.to_thread(transport.publish, 1)
        return await running, await engine.generate([5], SamplingParams(max_tokens=5))

    during, after = asyncio.run(main())

    assert engine.version == 1
    assert (np.diff(during.versions) >= 0).all()
    assert after.versions.tolist() == [1] * 5
    with pytest.raises(ValueError, match="version 0 is older than 1"):
        transport.publish(0)
    assert engine.version == 1


def test_concurrent_calls_are_counted_and_cancelled():
    engine = testing.ScriptedEngine(latency=60.0)

    async def main():
        running = [asyncio.create_task(engine.generate([5], PARAMS)) for _ in range(200)]
        await asyncio.sleep(0)
        assert (engine.calls, engine.in_flight, engine.peak_in_flight) == (200, 200, 200)
        for task in running[:50]:
            task.cancel()
        await asyncio.wait(running[:50])
        assert (engine.cancelled, engine.in_flight) == (50, 150)
        for task in running:
            task.cancel()
        await asyncio.wait(running)

    asyncio.run(main())

    assert (engine.cancelled, engine.in_flight, engine.peak_in_flight) == (200, 0, 200)


def test_counters_hold_on_several_event_loops_at_once():
    engine = testing.ScriptedEngine()

    async def many():
        for _ in range(20):
            await asyncio.gather(*(engine.generate([5], PARAMS) for _ in range(10)))

    threads = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert (engine.calls, engine.in_flight) == (800, 0)


def test_it_crosses_to_another_process_without_torch(tmp_path):
    engine = testing.ScriptedEngine(["AB"], tokenizer=CharacterCodes(), latency=0.0)
    assert tokens(pickle.loads(pickle.dumps(engine))) == [65, 66, 1]
    latency = testing.lognormal(median_s=0.001)
    engine = testing.ScriptedEngine(lambda prompt, number: prompt, latency=latency)
    engine.update_weights({}, version=4)
    (tmp_path / "engine").write_bytes(cloudpickle.dumps(engine))
    code = f"""
import asyncio, cloudpickle, sys
from primerl.types import SamplingParams
engine = cloudpickle.loads(open({str(tmp_path / "engine")!r}, "rb").read())
completion = asyncio.run(engine.generate([7, 8], SamplingParams(max_tokens=2)))
print(completion.token_ids, completion.versions, 'torch' in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60
    )

    assert done.stdout.strip() == "[7 8] [4 4] False", done.stderr


def test_a_worker_plays_with_it():
    engine = testing.ScriptedEngine(
        lambda prompt, number: "ab"[number % 2],
        tokenizer=CharacterCodes(),
        latency=testing.lognormal(median_s=0.002),
        failures=0.05,
    )
    environment = rollout.single_turn(
        CharacterCodes(), reward=lambda task, reply: float(reply.startswith("a"))
    )
    with rollout.worker(
        engine,
        environment,
        [{"prompt": "x"}],
        params=SamplingParams(max_tokens=4),
        group_size=2,
        groups_per_step=3,
        max_staleness=1,
        timeout_s=20.0,
    ) as rollouts:
        for step in range(8):
            groups = rollouts.take(version=step)
            assert all(step - group.versions.min() <= 1 for group in groups)
            engine.update_weights({}, version=step + 1)

    assert engine.in_flight == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replies": []}, "no replies"),
        ({"replies": "four"}, "the string 'four'; expected a list"),
        ({"replies": ["four"]}, r"replies\[0\] is text, 'four'; pass tokenizer="),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"failures": 1.5}, "failures is 1.5"),
        ({"context_length": 1}, "context_length is 1"),
    ],
)
def test_invalid_scripts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        testing.ScriptedEngine(**arguments)


def test_a_function_that_returns_no_reply_is_named():
    with pytest.raises(ValueError, match=r"the reply to call 0 is None \(NoneType\)"):
        say(testing.ScriptedEngine(lambda prompt, number: None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"median_s": 0.0}, "median_s is 0.0"),
        ({"median_s": 1.0, "p99_over_median": 0.5}, "p99_over_median is 0.5"),
    ],
)
def test_invalid_latencies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        testing.lognormal(**arguments)


def test_requests_that_do_not_fit_are_refused_and_not_counted():
    engine = testing.ScriptedEngine(context_length=8)

    with pytest.raises(ValueError, match="prompt is empty"):
        say(engine, prompt=[])
    with pytest.raises(ValueError, match="exceed the context of 8"):
        say(engine, prompt=[5] * 3)
    assert say(engine, prompt=[5] * 2).finish_reason == "stop"
    assert engine.calls == 1


def test_an_empty_reply_needs_a_stop_token():
    engine = testing.ScriptedEngine([[]])

    assert tokens(engine) == [1]
    with pytest.raises(ValueError, match="call 1 is empty"):
        say(engine, params=SamplingParams(max_tokens=3))


def test_thousands_of_calls_without_latency_are_fast():
    engine = testing.ScriptedEngine()

    async def main():
        await asyncio.gather(*(engine.generate([5], PARAMS) for _ in range(5_000)))

    began = time.perf_counter()
    asyncio.run(main())

    assert time.perf_counter() - began < 10  # tens of milliseconds; loose, for a busy computer
