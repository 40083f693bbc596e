"""Whatever an engine, a server or an environment returns: it fails its rollout by name, nothing of
it is trained, and the run continues with the others.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time

import attrs
import hostile
import hostile_server
import numpy as np
import pytest
from waiting import until

from primerl import rollout, serving, testing
from primerl.rollout.conversations.calls import shared_tokens
from primerl.rollout.engines.contract import BadCompletion, EngineLimits, check_completion
from primerl.serving.server import readiness as vllm_readiness
from primerl.types import LOGPROB_ROUNDING, Completion, Rollout, Sample, SamplingParams

VOCABULARY, CONTEXT = 64, 128
PARAMS = SamplingParams(max_tokens=4, stop_token_ids=[9])
MOST_MEGABYTES = 150  # that an answer may cost, whatever it says and however long it is


async def play(task, engine, params):
    prompt = [int(task["id"]) % 5 + 1, 3]
    answer = await engine.generate(prompt, params, session=task["id"])
    count = len(answer.token_ids)
    sample = Sample(
        token_ids=[*prompt, *answer.token_ids],
        loss_mask=[False, False] + [True] * count,
        behavior_logprobs=[0, 0, *answer.logprobs],
        versions=[-1, -1, *answer.versions],
    )
    return Rollout(samples=[sample], reward=float(count))


def scripted(version=3):
    engine = testing.ScriptedEngine(
        [[2, 5, 4, 3, 6], [7, 8, 9], [2, 9]],
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        latency=0.001,
    )
    engine.update_weights({}, version=version)
    return engine


def collect(engine, environment, *, steps=3, first=3, isolation="thread", publish=None, **options):
    """The groups of a few steps, and the stats at their end."""
    groups = []
    plan = {"params": PARAMS, "group_size": 2, "groups_per_step": 4, "max_staleness": 1}
    plan |= {"retries": 2, "quarantine_after": 100, "timeout_s": 30.0, "isolation": isolation}
    tasks = [{"id": str(n)} for n in range(40)]
    with rollout.worker(engine, environment, tasks, **plan | options) as rollouts:
        for step in range(first, first + steps):
            groups += rollouts.take(step)
            if publish is None:
                engine.update_weights({}, version=step + 1)
            else:
                publish(step + 1)
        return groups, rollouts.stats()


def require_clean(groups, *, newest):
    """What was delivered could have come from the engine."""
    samples = [sample for group in groups for sample in group.samples]
    assert samples
    for sample in samples:
        trained = sample.loss_mask
        assert 2 < len(sample.token_ids) <= 2 + PARAMS.max_tokens
        assert 0 <= sample.token_ids.min() <= sample.token_ids.max() < VOCABULARY
        assert np.isfinite(sample.behavior_logprobs[trained]).all()
        assert sample.behavior_logprobs[trained].max() <= LOGPROB_ROUNDING
        assert 0 <= sample.versions[trained].min() <= sample.versions[trained].max() <= newest
        assert 9 not in sample.token_ids[trained][:-1]
        ended = sample.token_ids[-1] == 9 or trained.sum() == PARAMS.max_tokens
        assert ended


# ---- engines ----


@pytest.mark.parametrize("fault", hostile.engine_faults())
def test_an_engine_that_breaks_the_contract(fault):
    engine = hostile.HostileEngine(fault, scripted(), every=3)

    groups, stats = collect(engine, play)

    assert len(groups) == 12
    require_clean(groups, newest=6)
    assert set(stats["errors"]) == {"BadCompletion"}
    assert 0 < stats["errors"]["BadCompletion"] <= engine.broken


@pytest.mark.parametrize("fault", ["unpublished_version", "token_id_beyond_vocabulary", "empty"])
def test_an_engine_in_the_trainers_process(fault):
    engine = hostile.HostileEngine(fault, scripted(), every=3)

    groups, stats = collect(engine, play, isolation="process")

    require_clean(groups, newest=6)
    assert set(stats["errors"]) == {"BadCompletion"}


def test_an_environment_that_catches_a_bad_completion_is_not_trusted():
    engine = hostile.HostileEngine("empty", scripted(), every=4)

    async def careless(task, engine, params):
        try:
            return await play(task, engine, params)
        except RuntimeError:
            return await play(task, engine, params)

    _, stats = collect(engine, careless)

    assert stats["errors"]["BadCompletion"] > 0


def test_an_isolated_environment():
    engine = hostile.HostileEngine("positive_logprob", scripted(), every=3)

    groups, stats = collect(engine, rollout.isolated(play, processes=1), steps=1)

    require_clean(groups, newest=3)
    assert set(stats["errors"]) == {"BadCompletion"}


@pytest.mark.parametrize("fault", hostile.engine_faults())
def test_check_engine_finds_the_fault(fault):
    within = scripted(version=3)
    engine = hostile.HostileEngine(fault, within)

    with pytest.raises(AssertionError, match="HostileEngine fails"):
        testing.check_engine(
            engine,
            max_tokens=4,
            concurrency=2,
            update=lambda version: within.update_weights({}, version=version),
        )


def test_check_engine_finds_intermittent_faults():
    engine = hostile.HostileEngine("slightly_positive_logprob", scripted(), every=11)

    with pytest.raises(AssertionError, match="every_answer failed: [0-9]+ completions break it"):
        testing.check_engine(engine, max_tokens=4, concurrency=4)


def test_check_engine_finds_answers_of_other_requests():
    class Mixes(testing.ScriptedEngine):
        last = None

        async def generate(self, prompt_ids, params, *, session=None):
            answer = await super().generate(prompt_ids, params)
            answer, self.last = self.last if self.in_flight and self.last else answer, answer
            return answer

    engine = Mixes(lambda prompt, _: [prompt[0] + 10] * 4, latency=0.002)

    with pytest.raises(AssertionError, match="own_answers failed: .* another prompt"):
        testing.check_engine(engine, max_tokens=4, concurrency=4)


def test_rounding_is_accepted():
    completion = Completion(
        token_ids=[1, 2], logprobs=[5e-6, -1], versions=[0, 0], finish_reason="length"
    )
    limits = EngineLimits(context_length=9, vocab_size=3, oldest=0, newest=0)
    params = SamplingParams(max_tokens=2)

    check_completion(completion, 7, params, limits)
    with pytest.raises(BadCompletion, match="beyond the context of 9"):
        check_completion(completion, 8, params, limits)
    with pytest.raises(BadCompletion, match="outside the vocabulary of 2"):
        check_completion(completion, 7, params, attrs.evolve(limits, vocab_size=2))


def test_no_fault_is_found_without_faults():
    groups, stats = collect(scripted(), play)
    require_clean(groups, newest=6)
    assert stats["errors"] == {}
    with pytest.raises(ValueError, match="no fault 'x', only too_many_tokens"):
        hostile.HostileEngine("x", scripted())
    with pytest.raises(ValueError, match="no fault 'x'"):
        hostile.HostileEnvironment("x", play)
    with pytest.raises(ValueError, match="no fault 'x'"):
        hostile_server.HostileServer("x")


class Hesitates(testing.ScriptedEngine):
    """Fails to report its version for a while."""

    asked = 0

    @property
    def version(self):
        self.asked += 1
        if 20 < self.asked < 60:
            raise OSError("the version can't be read")
        return self._updates[-1][1]


def test_an_engine_that_cannot_report_its_version_is_logged_and_asked_again(caplog):
    from primerl.rollout.engines.remote import EngineHost

    engine, host, told = Hesitates(), EngineHost(), []
    host.add(engine, lambda *news: told.append(news))

    async def scenario():
        reports = asyncio.create_task(host.keep_reporting())
        while engine.asked < 50:
            await asyncio.sleep(0.01)
        engine._updates.append((time.monotonic(), 7))
        while ("serves", 0, 7, 7) not in told:
            assert not reports.done()
            await asyncio.sleep(0.01)
        reports.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(scenario(), 30))

    assert caplog.text.count("can't report its version: OSError: the version can't be read") == 1


# ---- environments ----


@pytest.mark.thorough
@pytest.mark.parametrize("fault", hostile.environment_faults())
def test_an_environment_that_returns_an_impossible_sample(fault):
    environment = hostile.HostileEnvironment(fault, play, every=3)

    groups, stats = collect(scripted(), environment)

    assert len(groups) == 12
    require_clean(groups, newest=6)
    # What no Sample can hold is refused where the environment makes one.
    expected = {"BadSample", "ValueError"}
    expected |= {"TypeCheckError"} if fault == "no_sample" else set()  # of these tests' own checks
    assert set(stats["errors"]) <= expected
    assert sum(stats["errors"].values()) > 0


@pytest.mark.parametrize("values", [[2**31], [-(2**31) - 1], [0.5], [np.nan], ["a"], [None]])
def test_numbers_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="32-bit integers"):
        Sample(token_ids=values, loss_mask=[0], behavior_logprobs=[0], versions=[-1])
    with pytest.raises(ValueError, match="32-bit integers"):
        Completion(token_ids=[1], logprobs=[0], versions=values, finish_reason="stop")


# ---- servers ----


def engine_of(server, **options):
    engine = serving.VLLMEngine(server.url, down_timeout_s=5.0, request_timeout_s=20.0, **options)
    engine.adopt(3)
    return engine


def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.thorough
@pytest.mark.parametrize("fault", hostile_server.server_faults())
def test_a_server_with_invalid_responses(fault):
    hostile_server._gzip_bomb()
    with hostile_server.HostileServer(fault, every=3) as server, engine_of(server) as engine:
        before = megabytes()
        groups, stats = collect(engine, play, publish=lambda v: engine.load_weights({}, version=v))

        require_clean(groups, newest=6)
        assert server.broken > 0
        # Refused (400) or sent again (unknown weights) is what an honest server may ask for too.
        expected = {"BadCompletion"}
        expected |= {"Refused"} if fault == "endless_error" else set()
        expected |= {"RuntimeError"} if fault in ("long_label", "label_beyond_int32") else set()
        assert set(stats["errors"]) <= expected
        if fault not in ("long_label", "label_beyond_int32", "unpublished_version"):
            assert stats["errors"], "it is counted"
        assert server.sent_bytes < server.broken * (16 << 20), "no more than sockets buffer"
        assert megabytes() - before < MOST_MEGABYTES
        engine.load_weights({}, version=7)
        assert engine.version == 7


def test_a_version_that_was_never_published_does_not_block_publishing():
    with (
        hostile_server.HostileServer("unpublished_version") as server,
        engine_of(server, retries=0) as engine,
    ):
        follower = serving.VLLMEngine(server.url, run=engine._settings.labels.run)
        with follower:
            for one in (engine, follower):
                with pytest.raises(RuntimeError, match="never published|did not publish"):
                    asyncio.run(one.generate([1, 3], PARAMS))
                assert one.version == 3
                assert one.newest_version == 3
        engine.load_weights({}, version=4)
        assert engine.version == 4


CONTROL_ROUTES = ["/weight_info", "/v1/models", "/collective_rpc", "/metrics", "/health"]


@pytest.mark.parametrize("fault", hostile_server.BODY_FAULTS)
def test_responses_of_other_routes_are_bounded(fault):
    hostile_server._gzip_bomb()
    before = megabytes()
    for route in ("/collective_rpc", "/metrics"):
        with hostile_server.HostileServer(None) as server, engine_of(server) as engine:
            server.fault, server.route = fault, route
            began = time.monotonic()
            try:
                if route == "/metrics":
                    engine.metrics(timeout_s=3.0)
                else:
                    engine.load_weights({}, version=4, timeout_s=3.0)
            except (RuntimeError, ValueError):
                pass
            assert time.monotonic() - began < 15
            assert server.broken
            assert server.sent_bytes < 64 << 20
    assert megabytes() - before < MOST_MEGABYTES


@pytest.mark.parametrize("fault", ["long_label", *hostile_server.BODY_FAULTS])
def test_a_server_whose_state_cannot_be_read_is_not_used(fault, caplog):
    hostile_server._gzip_bomb()
    with hostile_server.HostileServer(None) as server, engine_of(server) as engine:
        assert [row["serving"] for row in engine.servers()] == [True]
        server.fault, server.route = fault, "/weight_info"
        until(lambda: [row["serving"] for row in engine.servers()] == [False])
        server.fault = None
        until(lambda: [row["serving"] for row in engine.servers()] == [True])


def test_a_watcher_that_fails_takes_its_server_out_of_service(monkeypatch, caplog):
    with hostile_server.HostileServer(None) as server, engine_of(server) as engine:
        fleet = engine._connected().fleet
        number = fleet.labels.number
        broken = True

        def fails(label):
            if broken:
                raise ZeroDivisionError("nobody foresaw this")
            return number(label)

        monkeypatch.setattr(fleet.labels, "number", fails)
        until(lambda: not engine.servers()[0]["serving"])
        assert "could not be polled: ZeroDivisionError" in engine.servers()[0]["error"]
        broken = False
        until(lambda: engine.servers()[0]["serving"])


def test_check_engine_passes_without_a_fault():
    with hostile_server.HostileServer(None) as server, engine_of(server) as engine:
        assert engine.vocab_size is None
        outcomes = testing.check_engine(
            engine, update=lambda version: engine.load_weights({}, version=version)
        )
        assert set(outcomes.values()) == {"passed"}
        assert engine.vocab_size == VOCABULARY


def test_faults_have_distinct_names():
    names = [*hostile_server.server_faults(), *(f"sample {one}" for one in hostile.SAMPLE_FAULTS)]
    assert len(set(names)) == len(names)


# ---- other clients ----


def serve_raw(chunks, pause_s):
    """A port that sends ``chunks`` to each client, and its thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                for chunk in chunks:
                    connection.sendall(chunk)
                    time.sleep(pause_s)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        ([b"HTTP/1.1 200 OK\r\n", b"Content-Length: 9999999999\r\n\r\n"], 200),
        ([b"HTTP/1.1 4", b"01 No\r\n\r\n"], 401),
        ([b"H"] * 1000, None),
        ([b"x" * 100_000] * 100, None),
        ([b"HTTP/1.1 " + b"9" * 500 + b" OK\r\n"], None),
        ([b"SSH-2.0-OpenSSH\r\n"], None),
        ([], None),
    ],
)
def test_a_readiness_probe_reads_one_line_within_its_timeout(monkeypatch, chunks, status):
    monkeypatch.setattr(vllm_readiness, "PROBE_S", 0.5)
    port, thread = serve_raw(chunks, pause_s=0.01)
    began = time.monotonic()

    assert vllm_readiness.status_of("127.0.0.1", port, "/health") == status

    assert time.monotonic() - began < 5
    thread.join(20)


@pytest.mark.parametrize("fault", ["endless_body", "gzip_bomb"])
def test_responses_of_tool_servers_are_bounded(fault):
    pytest.importorskip("verifiers")
    from primerl.rollout.environments.verifiers_adapter import tools

    hostile_server._gzip_bomb()

    async def ask(url):
        async with tools.connections() as http:
            await http.get(url)

    before = megabytes()
    with hostile_server.HostileServer(fault, route="/mcp") as server:
        with pytest.raises(Exception, match="a tool server answered") as caught:
            asyncio.run(ask(f"{server.url}/mcp"))
    assert type(caught.value).__name__ == "ReadError"
    assert megabytes() - before < MOST_MEGABYTES


def test_a_tool_call_nested_too_deeply_is_an_error_of_the_policy():
    pytest.importorskip("verifiers")
    from primerl.rollout.environments.verifiers_adapter.tools import ServedTools

    toolbox = ServedTools([], {"look": (None, "look")}, timeout_s=1.0)
    answer = asyncio.run(toolbox.call("look", "[" * 100_000))
    assert answer.startswith("error: the arguments are not JSON")
    answer = asyncio.run(toolbox.call("look", '{"at": 1e999}'))
    assert answer == "error: the arguments are not JSON: the number 1e999 is too large"


def test_an_id_beyond_every_vocabulary_allocates_nothing():
    before = megabytes()
    assert shared_tokens(np.array([5, 2**31 - 1], np.int32)) == [5, 2**31 - 1]
    assert megabytes() - before < MOST_MEGABYTES
