"""What VLLMEngine does about servers that fail, stall or answer wrongly while others are well."""

import asyncio
import logging

import pytest
from chaos import ChaosServer
from scripted_vllm import DROP, GARBAGE, HANG, ScriptedVLLM
from waiting import until

from primerl import rollout, serving
from primerl.serving.client import circuit_breaker
from primerl.serving.client.circuit_breaker import CircuitBreaker
from primerl.types import SamplingParams

GENERATE = "/inference/v1/generate"
MANY = 10_000


@pytest.fixture
def servers():
    with ScriptedVLLM(token_s=0.002) as first, ScriptedVLLM(token_s=0.002) as second:
        yield first, second


@pytest.fixture
def make():
    made = []

    def engine(*servers, **keywords):
        made.append(serving.VLLMEngine([one.url for one in servers], **keywords))
        made[-1].adopt(0)
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.fixture
def limits(monkeypatch):
    """Return a function that sets time limits of the client's modules."""

    def set_limits(module, **values):
        for name, value in values.items():
            monkeypatch.setattr(f"primerl.serving.client.{module}.{name}", value)

    return set_limits


def generate(engine, requests, *, max_tokens=2):
    async def together():
        params = SamplingParams(max_tokens=max_tokens)
        return await asyncio.gather(*(engine.generate([3], params) for _ in range(requests)))

    return asyncio.run(asyncio.wait_for(together(), 60))


# ---- the circuit breaker ----


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(circuit_breaker, "running_time", lambda: now[0])
    return now


def test_a_breaker_opens_after_three_failures_in_a_row(clock):
    breaker = CircuitBreaker()
    assert breaker.add_failure("one") is None
    assert breaker.add_failure("two") is None
    breaker.close()
    assert breaker.add_failure("one") is None
    assert breaker.add_failure("two") is None
    assert breaker.allows(50)
    assert breaker.add_failure("three") == 5.0
    assert not breaker.allows(0)
    assert breaker.add_failure("sent before it opened") is None
    assert (breaker.failures, breaker.reason) == (6, "three")


def test_a_breaker_admits_requests_one_by_one_and_opens_for_longer(clock):
    breaker = CircuitBreaker()
    assert breaker.open("stalled") == 5.0
    clock[0] = 104.9
    assert not breaker.allows(0)
    clock[0] = 105.0
    assert breaker.allows(0)
    assert not breaker.allows(1)
    clock[0] = 110.0
    assert breaker.allows(1)
    assert not breaker.allows(2)
    assert breaker.add_failure("again") == 10.0
    clock[0] = 120.0
    assert breaker.add_failure("again") == 15.0
    clock[0] = 135.0
    assert breaker.add_failure("again") == 15.0
    breaker.close()
    assert breaker.allows(50)
    assert breaker.reason == ""


# ---- wrong answers ----


def test_a_server_that_answers_wrongly_is_avoided_and_named(servers, make, caplog):
    first, _ = servers
    first.faults[GENERATE] = [GARBAGE] * MANY
    engine = make(*servers)
    with caplog.at_level(logging.WARNING):
        assert len(generate(engine, 8)) == 8
    sent = MANY - len(first.faults[GENERATE])
    assert 1 <= sent <= 8, "each request goes there once at most"
    assert len(generate(engine, 8)) == 8
    assert MANY - len(first.faults[GENERATE]) <= max(sent, 3), "no more go there"
    row = engine.servers()[0]
    assert row["failures"] == sent
    assert "without vLLM's schema" in row["error"]
    assert f"{first.url} gets no requests for 5 s" in caplog.text
    assert "but is avoided" in engine._connected().fleet.servers.describe()


def test_an_answer_that_is_wrong_everywhere_is_an_error(servers, make):
    for one in servers:
        one.faults[GENERATE] = [GARBAGE] * MANY
    engine = make(*servers)
    with pytest.raises(rollout.BadCompletion, match="without vLLM's schema"):
        generate(engine, 1)
    assert [MANY - len(one.faults[GENERATE]) for one in servers] == [1, 1]


@pytest.mark.parametrize("fault", [DROP, (500, "busy")])
def test_a_wrong_answer_is_not_final_while_another_server_may_answer_rightly(servers, make, fault):
    """The other one was lost, or failed the request; neither is a wrong answer."""
    first, second = servers

    def first_one(request, places):
        chosen = min(places, key=lambda place: place.url != first.url)
        return chosen.url, chosen.rank

    engine = make(*servers, routing=first_one)
    generate(engine, 1)
    first.faults[GENERATE] = [fault]
    second.faults[GENERATE] = [GARBAGE]
    assert len(generate(engine, 1)) == 1
    assert first.faults[GENERATE] == second.faults[GENERATE] == []


def test_a_server_that_fails_fast_does_not_attract_requests(servers, make):
    """It has the fewest requests in flight, because it fails them at once."""
    first, _ = servers
    first.faults[GENERATE] = [(500, "broken gpu")] * MANY
    engine = make(*servers)
    for _ in range(12):
        generate(engine, 1)
    assert MANY - len(first.faults[GENERATE]) == 3


def test_a_server_that_recovers_is_used_again(servers, make, limits):
    limits("circuit_breaker", FIRST_OPEN_S=0.1)
    first, _ = servers
    first.faults[GENERATE] = [(500, "broken gpu")] * 3
    engine = make(*servers)
    for _ in range(3):
        generate(engine, 1)
    assert engine.servers()[0]["error"]
    until(lambda: generate(engine, 1) and first.bodies)
    assert engine.servers()[0]["error"] == ""
    assert engine.servers()[0]["failures"] == 3


# ---- lost servers ----


def test_a_request_survives_more_lost_servers_than_it_may_fail(servers, make):
    engine = make(servers[0], retries=0)
    servers[0].faults[GENERATE] = [DROP] * 8
    assert len(generate(engine, 1)) == 1
    servers[0].faults[GENERATE] = [DROP] * 9
    with pytest.raises(RuntimeError, match="a request failed 9 times"):
        generate(engine, 1)


# ---- stalls ----


def test_requests_leave_a_server_that_answers_polls_but_samples_nothing(
    servers, make, limits, caplog
):
    limits("servers", IDLE_S=0.2, STALLED_S=0.4)
    limits("stalls", LOOK_S=0.1)
    first, _ = servers
    for one in servers:
        one.gauges = lambda one=one: [f'vllm:generation_tokens_total{{engine="0"}} {one.peak}']
    first.hold = lambda tokens: True
    engine = make(*servers)
    with caplog.at_level(logging.WARNING):
        assert len(generate(engine, 8)) == 8
    assert f"{first.url} loses its requests to other servers" in caplog.text
    assert "works on none of its" in engine.servers()[0]["error"]
    first.hold = lambda tokens: False


@pytest.mark.parametrize(
    "gauges",
    [
        pytest.param(lambda: ["vllm:generation_tokens_total 1"], id="paused"),
        pytest.param(
            lambda: [
                "vllm:generation_tokens_total 1",
                "vllm:rl_weight_update_operations_in_flight 1",
            ],
            id="updating",
        ),
        pytest.param(list, id="without metrics"),
    ],
)
def test_a_server_that_may_not_work_keeps_its_requests(servers, make, limits, gauges, request):
    limits("servers", IDLE_S=0.5, STALLED_S=0.5)
    limits("stalls", LOOK_S=0.05)
    first, second = servers
    engine = make(first)
    engine.join(second.url)
    first.gauges = gauges
    if "paused" in request.node.callspec.id:
        first._loop.call_soon_threadsafe(first._gate.clear)
    else:
        first.hold = lambda tokens: True

    async def scenario():
        sent = asyncio.ensure_future(engine.generate([3], SamplingParams(max_tokens=2)))
        await asyncio.sleep(1.5)
        assert first.running == 1
        first.hold = lambda tokens: False
        first._loop.call_soon_threadsafe(first._gate.set)
        return await sent

    assert len(asyncio.run(scenario()).token_ids) == 2
    assert second.bodies == []
    assert engine.servers()[0]["failures"] == 0


def test_new_requests_avoid_a_server_that_answers_no_poll(servers, make, limits):
    limits("servers", QUIET_S=0.3)
    first, _ = servers
    engine = make(*servers)
    generate(engine, 2)
    first.faults["/weight_info"] = [HANG] * MANY
    known = engine._connected().fleet.servers
    until(lambda: not known.get(first.url).sound)
    before = len(first.bodies)
    generate(engine, 4)
    assert len(first.bodies) == before
    assert engine.servers()[0]["serving"], "its requests in flight stay: it may load weights"


def test_a_silent_server_is_left_out_of_an_update(servers, make, limits):
    limits("fleet", SILENT_S=0.4)
    first, second = servers
    engine = make(*servers)
    for path in ("/weight_info", "/health", "/collective_rpc"):
        first.faults[path] = [HANG] * MANY
    receipts = engine.load_weights({}, version=1, timeout_s=50.0)
    assert list(receipts) == [second.url]


# ---- overload ----


def test_requests_that_queue_on_a_busy_server_do_not_time_out(make):
    """Twenty requests of 0.16 s, one after the other, with 1.5 s for each."""
    with ChaosServer(slots=1, token_s=0.02, answers={}) as server:
        engine = make(server, request_timeout_s=1.5)
        assert len(generate(engine, 20, max_tokens=8)) == 20
        assert server.sampled == 160, "each is sampled once"


def test_a_request_that_is_never_answered_has_a_deadline_while_others_are(make):
    with ScriptedVLLM() as server:
        engine = make(server, request_timeout_s=0.5)
        server.faults[GENERATE] = [HANG]

        async def scenario():
            params = SamplingParams(max_tokens=1)
            first = asyncio.ensure_future(engine.generate([3], params))
            while not first.done():
                await engine.generate([3], params)
            return await first

        with pytest.raises(RuntimeError, match="a request took longer than 0.5 s"):
            asyncio.run(asyncio.wait_for(scenario(), 60))
