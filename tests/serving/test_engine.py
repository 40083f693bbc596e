"""VLLMEngine against scripted servers: what it sends, what it makes of answers and of faults."""

import asyncio
import errno
import json
import math
import threading
import time

import cloudpickle
import numpy as np
import pytest
from scripted_vllm import DROP, GARBAGE, HANG, ScriptedVLLM
from waiting import until

from primerl import rollout, serving, testing
from primerl.serving.client.http import Http, ServerFailed
from primerl.serving.protocol import responses
from primerl.serving.protocol.labels import Labels
from primerl.types import Rollout, Sample, SamplingParams

P = SamplingParams


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture
def server():
    with ScriptedVLLM() as one:
        yield one


@pytest.fixture
def servers():
    with ScriptedVLLM(token_s=0.002) as first, ScriptedVLLM(token_s=0.002) as second:
        yield first, second


@pytest.fixture
def make():
    made = []

    def engine(*servers, adopt=0, **keywords):
        keywords = {"down_timeout_s": 5.0, **keywords}
        made.append(serving.VLLMEngine([one.url for one in servers], **keywords))
        if adopt is not None:
            made[-1].adopt(adopt)
        return made[-1]

    yield engine
    for one in made:
        one.close()


# ---- requests ----


def test_request_body(server, make):
    engine = make(server, run="abc")
    params = P(max_tokens=3, temperature=0.7, top_p=0.9, top_k=5, seed=11, stop_token_ids=[9, 8])
    run(engine.generate(np.array([3, 4]), params))
    request_id = server.bodies[0].pop("request_id")
    assert len(request_id) == 32
    assert server.bodies == [
        {
            "token_ids": [3, 4],
            "sampling_params": {
                "max_tokens": 3,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 5,
                "seed": 11,
                "stop_token_ids": [9, 8],
                "logprobs": 0,
                "ignore_eos": True,
                "detokenize": False,
            },
            "cache_salt": "abc-0",
        }
    ]


def test_a_completion(server, make):
    engine = make(server, adopt=4)
    answer = run(engine.generate([3, 4], P(max_tokens=3, temperature=0)))
    assert answer.token_ids.tolist() == [7, 8, 9]
    assert answer.logprobs.tolist() == [-1.0, -1.0, -1.0]
    assert answer.versions.tolist() == [4, 4, 4]
    assert (answer.finish_reason, answer.routes) == ("length", ())
    answer = run(engine.generate([3, 4], P(max_tokens=3, temperature=0, stop_token_ids=[8])))
    assert (answer.token_ids.tolist(), answer.finish_reason) == ([7, 8], "stop")


def test_scores(server, make):
    scores = run(make(server).score([8, 16, 24]))
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.0, -2.0, -3.0]


def test_the_likeliest_tokens_of_each_place(server, make):
    scores, ids, logprobs = run(make(server).score_top_k([8, 16, 1], k=2))
    assert scores.tolist() == [0.0, -2.0, -0.125]
    assert ids.dtype == np.int32
    assert ids.tolist() == [[0, 0], [0, 1], [0, 1]]
    assert logprobs.dtype == np.float32
    assert logprobs.tolist() == [[0, 0], [0, -0.125], [0, -0.125]]
    assert server.bodies[-1]["sampling_params"]["prompt_logprobs"] == 2
    with pytest.raises(ValueError, match="k is 0"):
        run(make(server).score_top_k([8], k=0))


def test_runs_can_share_a_server_that_scores(server, make):
    first, second = (make(server, run="teacher") for _ in range(2))
    for engine in (first, second, first):
        assert run(engine.score([8, 16])).tolist() == [0.0, -2.0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([None, {"5": {"logprob": -1.0}}], "position 1 .* has 1 tokens"),
        ([None, {"5": {"logprob": -1.0}, "6": {"logprob": -9999.0}}], "expected 2 with finite"),
        ([None, {"6": {"logprob": -1.0}, "7": {"logprob": -1.0}}], "token 1 .* has no logprob"),
        ([None], "scored 1 of 2 tokens"),
    ],
)
def test_what_is_missing_of_the_likeliest_tokens_is_an_error(rows, words):
    answer = {"choices": [], "prompt_logprobs": rows}
    response = responses.completions.decode(json.dumps(answer))
    with pytest.raises(RuntimeError, match=words):
        responses.prompt_top_k(response, [5, 5], 2)


def test_a_server_of_another_tokenizer_is_refused(server, make):
    tokenizer = testing.character_tokenizer("abc")
    engine = make(server)
    server.decode = tokenizer.decode
    engine.refuse_other_tokenizer(tokenizer)
    with pytest.raises(ValueError, match=f"{server.url} has another tokenizer"):
        engine.refuse_other_tokenizer(testing.character_tokenizer("acb"))
    server.faults["/detokenize"] = [(404, "Not Found")]
    with pytest.raises(RuntimeError, match="detokenize failed"):
        engine.refuse_other_tokenizer(tokenizer)


def test_check_engine(server, make):
    server.token_s = 0.002
    engine = make(server)
    outcomes = testing.check_engine(
        engine, update=lambda version: engine.load_weights({"folder": "x"}, version=version)
    )
    assert set(outcomes.values()) == {"passed"}


@pytest.mark.parametrize("on_update", ["keep", "drain"])
def test_check_engine_with_other_policies(server, make, on_update):
    server.token_s = 0.002
    engine = make(server, on_update=on_update)
    testing.check_engine(engine, update=lambda version: engine.load_weights({}, version=version))


def test_refusals_of_the_client_send_nothing(server, make):
    engine = make(server)
    assert engine.context_length == 128
    for prompt, params, words in [
        ([], P(max_tokens=1), "empty"),
        ([-1], P(max_tokens=1), "token id -1"),
        (np.array([1.5]), P(max_tokens=1), "must be integers"),
        ([1 << 64], P(max_tokens=1), "must be integers"),
        ([1] * 100, P(max_tokens=29), "100 tokens and max_tokens=29 exceed the context of 128"),
        ([1], P(max_tokens=1, temperature=0.001), "temperature=0.001"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(engine.generate(prompt, params))
    with pytest.raises(ValueError, match="exceed"):
        run(engine.score([1] * 128))
    assert server.bodies == []


def test_a_refused_request_is_not_retried(server, make):
    engine = make(server)
    with pytest.raises(ValueError, match="400: token is out of vocabulary"):
        run(engine.generate([99], P(max_tokens=1)))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("fault", [(500, "oh"), (503, "oh"), (429, "oh"), (408, "oh"), DROP])
def test_a_failed_request_is_retried(server, make, fault):
    engine = make(server)
    server.faults["/inference/v1/generate"] = [fault] * 3
    answer = run(engine.generate([3], P(max_tokens=2, temperature=0)))
    assert answer.token_ids.tolist() == [3, 4]


def test_a_request_that_one_server_fails_goes_to_another(servers, make):
    engine = make(*servers, retries=1)
    servers[0].faults["/inference/v1/generate"] = [(500, "broken gpu")] * 100

    async def scenario():
        return await asyncio.gather(*(engine.generate([3], P(max_tokens=2)) for _ in range(8)))

    assert len(run(scenario())) == 8
    assert servers[0].faults["/inference/v1/generate"] != [(500, "broken gpu")] * 100


def test_retries_are_bounded(server, make):
    engine = make(server, retries=1)
    server.faults["/inference/v1/generate"] = [(500, "broken gpu")] * 3
    with pytest.raises(RuntimeError, match=r"failed 2 times: .* answered 500: broken gpu; .*500"):
        run(engine.generate([3], P(max_tokens=1)))
    assert len(server.faults["/inference/v1/generate"]) == 1


def test_an_aborted_request_is_retried(server, make):
    engine = make(server)
    server.abort_next = 2
    answer = run(engine.generate([3], P(max_tokens=4)))
    assert len(answer.token_ids) == 4
    assert len(server.bodies) == 3


def test_a_request_has_a_deadline(server, make):
    engine = make(server, request_timeout_s=0.3)
    server.faults["/inference/v1/generate"] = [HANG]
    with pytest.raises(RuntimeError, match=r"longer than 0.3 s: .* serves version 0"):
        run(engine.generate([3], P(max_tokens=1)))
    until(lambda: server.cancelled == 1)


def test_a_response_that_is_not_vllms(server, make):
    engine = make(server)
    server.faults["/inference/v1/generate"] = [GARBAGE]
    with pytest.raises(rollout.BadCompletion, match="sent a response without vLLM's schema"):
        run(engine.generate([3], P(max_tokens=1)))


def test_cancellation_reaches_the_server(server, make):
    server.token_s = 0.05
    engine = make(server)

    async def scenario():
        requests = [
            asyncio.ensure_future(engine.generate([3], P(max_tokens=100))) for _ in range(8)
        ]
        while server.running < 8:
            await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return all(request.cancelled() for request in requests)

    assert run(scenario())
    until(lambda: server.running == 0)
    assert server.cancelled == 8


def test_cancellation_before_any_server_was_reached_leaves_nothing_behind(server, make):
    engine = make(server, adopt=None, down_timeout_s=60.0)
    server.kill()
    began = time.monotonic()

    with pytest.raises(TimeoutError):  # asyncio.run waits for the threads of its loop, too
        asyncio.run(asyncio.wait_for(engine.generate([3], P(max_tokens=1)), 0.5))

    assert time.monotonic() - began < 30


def test_many_event_loops_and_threads(server, make):
    engine = make(server)
    answers = []

    def use():
        answers.append(run(engine.generate([3], P(max_tokens=2, temperature=0))))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for one in [*threads]:
        one.start()
    for one in threads:
        one.join(20)
    use()
    assert [one.token_ids.tolist() for one in answers] == [[3, 4]] * 5


# ---- keys ----


def test_the_key_is_sent_and_not_exposed():
    with ScriptedVLLM(key="s3cret") as server:
        with serving.VLLMEngine(server.url, api_key="s3cret") as engine:
            engine.adopt(0)
            run(engine.generate([3], P(max_tokens=1)))
            assert "s3cret" not in repr(engine) + str(engine.servers())
        with serving.VLLMEngine(server.url, api_key="wrong", down_timeout_s=0.3) as engine:
            with pytest.raises(RuntimeError, match=r"401: Unauthorized; pass the server's key"):
                run(engine.generate([3], P(max_tokens=1)))


def test_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("PRIMERL_API_KEY", "s3cret")
    with ScriptedVLLM(key="s3cret") as server, serving.VLLMEngine(server.url) as engine:
        engine.adopt(0)


def test_servers_in_place_of_urls():
    class Server:
        def __init__(self, url, key):
            self.url, self.api_key = url, key

    with ScriptedVLLM(key="k") as server:
        with serving.VLLMEngine(Server(server.url, "k")) as engine:
            engine.adopt(0)
    with pytest.raises(ValueError, match="different API keys"):
        serving.VLLMEngine([Server("http://a", "k"), Server("http://b", "l")])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"servers": "localhost:8000"}, "can't be read"),
        ({"servers": ["localhost:8000"]}, "not the url of a server"),
        ({"servers": []}, "list of servers is empty"),
        ({"servers": ["http://a", "http://a/"]}, "twice"),
        ({"servers": "http://a", "on_update": "abort"}, "on_update='abort'"),
        ({"servers": "http://a", "run": "a-b"}, "run is 'a-b'"),
        ({"servers": "http://a", "retries": -1}, "retries is -1"),
        ({"servers": "http://a", "down_timeout_s": 0}, "down_timeout_s is 0"),
        ({"servers": "http://a", "api_key": "a\nb"}, "api_key"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        serving.VLLMEngine(**arguments)


# ---- versions ----


def test_weights_of_an_unknown_origin_do_not_serve(server, make):
    server.label = "otherrun-57"
    engine = make(server, adopt=None, down_timeout_s=0.3, request_timeout_s=2.0)
    assert engine.version == 0
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"up, but its weights \('otherrun-57'\) are not this"):
        run(engine.generate([3], P(max_tokens=1)))
    assert time.monotonic() - began > 1.5, "the first publication may take long"
    engine.load_weights({}, version=0)
    assert run(engine.generate([3], P(max_tokens=1))).versions.tolist() == [0]


def test_version_is_current_without_requests(server, make):
    engine = make(server, run="abc")
    copy = cloudpickle.loads(cloudpickle.dumps(engine))
    try:
        assert copy.version == 0
        engine.load_weights({}, version=3)
        assert engine.version == 3
        until(lambda: copy.version == 3)
        assert run(copy.generate([3], P(max_tokens=1))).versions.tolist() == [3]
    finally:
        copy.close()


def test_a_copy_knows_what_the_original_knew(server, make):
    engine = make(server, adopt=7)
    content = cloudpickle.dumps(engine)
    server.faults["/weight_info"] = [HANG] * 20
    copy = cloudpickle.loads(content)
    try:
        assert copy.version == 7
        copy.learn(8)
        assert copy.version == 8
    finally:
        copy.close()


def test_versions_are_per_token(server, make):
    server.token_s = 0.02
    engine = make(server)

    async def scenario():
        request = asyncio.ensure_future(engine.generate([3], P(max_tokens=120)))
        for version in (1, 2):
            await asyncio.sleep(0.2)
            await asyncio.to_thread(engine.load_weights, {}, version=version)
        return await request

    versions = run(scenario()).versions
    assert set(versions.tolist()) == {0, 1, 2}
    assert (np.diff(versions) >= 0).all()


def test_keep_discards_completions_on_prefixes_of_older_weights(server, make):
    engine = make(server, on_update="keep", run="abc")
    server.call = None
    server._loop.call_soon_threadsafe(server._gate.clear)  # a request that can't begin yet

    async def scenario():
        request = asyncio.ensure_future(engine.generate([3], P(max_tokens=2)))
        while not server.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.load_weights, {}, version=1)
        return await request

    assert run(scenario()).versions.tolist() == [1, 1]
    assert [body["cache_salt"] for body in server.bodies] == ["abc-0", "abc-1"], (
        "a prefix that version 0 cached could have been used: the request was to be sent again"
    )


# ---- updates ----


def routes_of(server):
    return [
        (path, body.get("method")) if path == "/collective_rpc" else path
        for path, body in server.calls
    ]


@pytest.mark.parametrize(
    ("on_update", "pause"),
    [
        ("recompute", {"mode": "keep", "clear_cache": "true"}),
        ("keep", {"mode": "keep", "clear_cache": "false"}),
        ("drain", {"mode": "wait", "clear_cache": "true"}),
    ],
)
def test_the_order_of_an_update(server, make, on_update, pause):
    engine = make(server, on_update=on_update, run="abc")
    server.calls.clear()
    receipts = engine.load_weights({"folder": "f", "version": 2}, version=2)
    assert receipts == {server.url: [{"ok": True}]}
    update = {"folder": "f", "version": 2}
    ticket = server.calls[0][1]["kwargs"]["ticket"]
    assert len(ticket) == 16
    prepare = {"update": update, "ticket": ticket}
    last = prepare | {"timeout_s": 600.0}
    labelled = {"label": "abc-2", "place": server.calls[-3][1]["kwargs"]["place"]}
    assert server.calls == [
        ("/collective_rpc", {"method": "prepare_weights", "kwargs": prepare}),
        ("/collective_rpc", {"method": "prepare_weights", "kwargs": last}),
        ("/pause", pause),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": update}),
        ("/finish_weight_update", {"weight_version": "abc-2"}),
        ("/collective_rpc", {"method": "label_shared_keys", "kwargs": labelled}),
        ("/resume", {}),
        ("/collective_rpc", {"method": "weight_receipt", "kwargs": {}}),
    ]
    assert engine.version == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_republished_version_clears_prefixes_of_its_first_weights(server, make, fails):
    engine = make(server, on_update="keep")
    engine.load_weights({}, version=1)
    if fails:
        server.faults["/resume"] = [(500, "half way")]
        with pytest.raises(RuntimeError, match="half way"):
            engine.load_weights({}, version=2)
    engine.load_weights({}, version=2 if fails else 1)
    pauses = [query["clear_cache"] for path, query in server.calls if path == "/pause"]
    assert pauses == (["false", "false", "true"] if fails else ["false", "true"])


def test_an_update_is_polled_until_all_workers_have_prepared_it(server, make):
    engine = make(server)
    server.calls.clear()
    server.unprepared = 3
    engine.load_weights({}, version=1)
    asked = [body for _, body in server.calls if body.get("method") == "prepare_weights"]
    assert len(asked) == 5
    assert all(one == asked[0] for one in asked[:4])
    assert asked[4]["kwargs"] == asked[0]["kwargs"] | {"timeout_s": 600.0}
    engine.load_weights({}, version=1)
    again = [body for _, body in server.calls if body.get("method") == "prepare_weights"][-1]
    assert again["kwargs"]["ticket"] != asked[0]["kwargs"]["ticket"]
    server.unprepared = 1000
    with pytest.raises(RuntimeError, match="version 2 was not prepared.* answer within 0.[23] s"):
        engine.load_weights({}, version=2, timeout_s=0.3)
    assert engine.version == 1


def test_older_versions_are_refused(server, make):
    engine = make(server, adopt=5)
    server.calls.clear()
    with pytest.raises(ValueError, match="version 4 is older than version 5"):
        engine.load_weights({}, version=4)
    with pytest.raises(ValueError, match="version 4 is older than version 5"):
        engine.adopt(4)
    assert server.calls == []
    engine.load_weights({}, version=5)


def test_an_update_that_was_not_prepared_changes_nothing(servers, make):
    first, second = servers
    engine = make(*servers)
    first.calls.clear(), second.calls.clear()
    first.faults["/collective_rpc"] = [(500, "no such folder")]
    with pytest.raises(RuntimeError, match=f"no server was changed: {first.url}.* no such folder"):
        engine.load_weights({}, version=1)
    assert {*routes_of(first), *routes_of(second)} == {("/collective_rpc", "prepare_weights")}
    assert engine.version == 0
    run(engine.generate([3], P(max_tokens=1)))


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
)
def test_a_server_that_failed_to_load_is_not_used_until_the_next_update(servers, make, path):
    first, second = servers
    engine = make(*servers)
    copy = cloudpickle.loads(cloudpickle.dumps(engine))
    first.faults[path] = [(500, "half way")]
    with pytest.raises(RuntimeError, match=rf"not loaded everywhere: {first.url}{path}.* half way"):
        engine.load_weights({}, version=1)
    until(lambda: first.label == "failed")
    for one in (engine, copy):
        until(lambda one=one: one.version == 1)
        for _ in range(4):
            assert run(one.generate([3], P(max_tokens=1))).versions.tolist() == [1]
    assert first.bodies == []
    assert second.label == engine._settings.labels.name(1)
    time.sleep(0.4)
    assert first.label == "failed", "it is not seeded by itself either"
    engine.load_weights({}, version=2)
    until(lambda: [row["version"] for row in copy.servers()] == [2, 2])
    copy.close()


@pytest.fixture
def half_loaded(servers, make, monkeypatch):
    """Makes an engine whose first server failed to load version 1, and at first to be labelled."""

    def made(*, label_again_s, label_failures):
        path = "primerl.serving.client.updates.SEED_AGAIN_S"
        monkeypatch.setattr(path, label_again_s)
        engine = make(*servers)
        servers[0].faults["/update_weights"] = [(500, "half way")]
        servers[0].faults["/update_weight_version"] = [(500, "not now")] * label_failures
        with pytest.raises(RuntimeError, match="half way"):
            engine.load_weights({}, version=1)
        return engine

    return made


def test_a_failed_server_is_not_used_whatever_it_reports(servers, half_loaded):
    first, second = servers
    engine = half_loaded(label_again_s=0.3, label_failures=2)
    name = engine._settings.labels.name
    time.sleep(0.4)
    assert first.label == name(0), "it still says that it serves what it did"
    assert [row["serving"] for row in engine.servers()] == [False, True]
    until(lambda: first.label == "failed")
    with pytest.raises(RuntimeError, match=f"{first.url} failed to load weights"):
        engine.adopt(1)
    assert first.label == "failed"
    engine.load_weights({}, version=2)
    assert [row["version"] for row in engine.servers()] == [2, 2]
    time.sleep(0.5)
    assert (first.label, second.label) == (name(2),) * 2


def test_a_failed_server_that_is_restarted_is_seeded(servers, half_loaded):
    engine = half_loaded(label_again_s=0.1, label_failures=3)
    servers[0].restart()
    until(lambda: [row["version"] for row in engine.servers()] == [1, 1])


def test_an_update_does_not_wait_for_seeding(servers, make):
    first, _second = servers
    engine = make(*servers)
    engine.load_weights({}, version=1)
    first.kill()
    first.faults["/collective_rpc"] = [HANG]
    first.restart()
    until(lambda: not first.faults["/collective_rpc"])
    engine.load_weights({}, version=2, timeout_s=3)
    assert [row["version"] for row in engine.servers()] == [2, 2]


def test_requests_in_flight_on_a_failed_server_are_sent_elsewhere(servers, make):
    first, second = servers
    engine = make(*servers)
    first.token_s = second.token_s = 0.02

    async def scenario():
        requests = [asyncio.ensure_future(engine.generate([3], P(max_tokens=30))) for _ in range(6)]
        while first.running + second.running < 6:
            await asyncio.sleep(0.01)
        first.faults["/update_weights"] = [(500, "half way")]
        with pytest.raises(RuntimeError, match="half way"):
            await asyncio.to_thread(engine.load_weights, {}, version=1)
        return await asyncio.gather(*requests)

    assert [len(one.token_ids) for one in run(scenario())] == [30] * 6
    until(lambda: first.running == 0)


def test_a_pause_that_fails_leaves_the_weights_as_they_were(server, make):
    engine = make(server)
    server.faults["/pause"] = [(500, "not now")]
    with pytest.raises(RuntimeError, match="not now"):
        engine.load_weights({}, version=1)
    assert run(engine.generate([3], P(max_tokens=1))).versions.tolist() == [0]


def test_an_update_has_a_deadline(server, make):
    engine = make(server)
    server.load_s = 30.0
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer within 0.5 s"):
        engine.load_weights({}, version=1, timeout_s=0.5)
    assert time.monotonic() - began < 20
    until(lambda: server.label == "failed")


def test_sending_happens_while_all_receive(servers, make):
    engine = make(*servers)
    for one in servers:
        one.load_s = 0.2
    seen = []

    def send():
        until(lambda: all("/update_weights" in routes_of(one) for one in servers))
        seen.append(threading.current_thread())

    receipts = engine.load_weights({}, version=1, send=send)
    assert seen == [threading.current_thread()]
    assert set(receipts) == {one.url for one in servers}


def test_nothing_is_sent_if_one_server_cannot_receive(servers, make):
    engine = make(*servers)
    servers[0].faults["/start_weight_update"] = [(500, "no memory")]
    with pytest.raises(RuntimeError, match="no memory"):
        engine.load_weights({}, version=1, send=lambda: pytest.fail("it was sent"))
    assert "/update_weights" not in routes_of(servers[1])


def test_a_send_that_fails(server, make):
    engine = make(server)
    server.load_s = 30.0

    def send():
        raise RuntimeError("NCCL is gone")

    with pytest.raises(RuntimeError, match="NCCL is gone"):
        engine.load_weights({}, version=1, send=send)
    until(lambda: server.label == "failed")


def test_a_server_that_dies_during_an_update_is_left_out(servers, make, caplog):
    first, second = servers
    engine = make(*servers)
    second.faults["/update_weights"] = [DROP]
    assert set(engine.load_weights({}, version=1)) == {first.url}
    assert f"{second.url} is lost" in caplog.text
    assert engine.version == 1


def test_an_update_with_no_server_left(server, make):
    engine = make(server)
    server.kill()
    with pytest.raises(RuntimeError, match=f"{server.url} is down"):
        engine.load_weights({}, version=1)


# ---- servers that die and return ----


def test_a_dead_server_is_routed_around_and_nothing_is_lost(servers, make):
    first, second = servers
    engine = make(*servers)

    async def scenario():
        requests = [
            asyncio.ensure_future(engine.generate([3], P(max_tokens=100, temperature=0)))
            for _ in range(16)
        ]
        while not (first.running and second.running):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(first.kill)
        return await asyncio.gather(*requests)

    answers = run(scenario())
    assert [len(one.token_ids) for one in answers] == [100] * 16
    assert [row["alive"] for row in engine.servers()] == [False, True]


def test_a_server_that_returns_is_seeded_before_it_is_used(servers, make):
    first, _second = servers
    engine = make(*servers, run="abc")
    copy = cloudpickle.loads(cloudpickle.dumps(engine))
    engine.load_weights({"folder": "f"}, version=3)
    first.kill()
    until(lambda: not engine.servers()[0]["alive"])
    first.calls.clear()
    first.restart()
    until(lambda: engine.servers()[0]["serving"])
    assert first.label == "abc-3"
    assert routes_of(first)[0] == ("/collective_rpc", "prepare_weights")
    assert ("/update_weights", {"update_info": {"folder": "f"}}) in first.calls
    until(lambda: copy.servers()[0]["serving"])
    copy.close()


def test_a_checkpoint_that_was_adopted_is_adopted_again(server, make):
    engine = make(server, adopt=2)
    server.restart()
    until(lambda: engine.servers()[0]["serving"])
    assert run(engine.generate([3], P(max_tokens=1))).versions.tolist() == [2]


def test_weights_of_another_run_are_not_adopted_again(server, make):
    """They may be any: only the checkpoint that a server starts with is known to be the same."""
    first = make(server)
    of_first = server.label
    second = make(server)
    until(lambda: not first.servers()[0]["serving"])
    time.sleep(0.5)  # in which it would name them its own
    assert server.label != of_first
    assert not first.servers()[0]["serving"]
    assert run(second.generate([3], P(max_tokens=1))).versions.tolist() == [0]


def test_seeding_is_retried(servers, make, monkeypatch):
    monkeypatch.setattr("primerl.serving.client.updates.SEED_AGAIN_S", 0.1)
    engine = make(*servers)
    engine.load_weights({}, version=1)
    servers[0].faults["/collective_rpc"] = [(500, "not yet")]
    servers[0].restart()
    until(lambda: engine.servers()[0]["serving"])


def test_with_all_servers_down_requests_wait_and_then_fail(servers, make):
    engine = make(*servers, down_timeout_s=1.0)
    for one in servers:
        one.kill()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no server could be used for 1 s: .*Connect call"):
        run(engine.generate([3], P(max_tokens=1)))
    assert 0.9 < time.monotonic() - began < 20

    async def scenario():
        request = asyncio.ensure_future(engine.generate([3], P(max_tokens=1)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(servers[1].start)
        return await request

    servers[1].label = servers[1].first_label
    assert len(run(scenario()).token_ids) == 1


def test_a_server_that_falls_silent_is_lost(servers, make, monkeypatch):
    monkeypatch.setattr("primerl.serving.client.fleet.SILENT_S", 0.2)
    first, _second = servers
    engine = make(*servers)
    first.faults["/inference/v1/generate"] = [HANG] * 10
    first.faults["/weight_info"] = [HANG] * 1000
    first.faults["/health"] = [HANG] * 1000

    async def scenario():
        return await asyncio.gather(*(engine.generate([3], P(max_tokens=2)) for _ in range(8)))

    assert len(run(scenario())) == 8


def test_requests_on_a_host_that_vanished_are_sent_elsewhere(servers, make, monkeypatch):
    monkeypatch.setattr("primerl.serving.client.fleet.SILENT_S", 0.5)
    first, second = servers
    engine = make(*servers)
    first.token_s = second.token_s = 0.05

    async def scenario():
        requests = [asyncio.ensure_future(engine.generate([3], P(max_tokens=60))) for _ in range(6)]
        while not (first.running and second.running):
            await asyncio.sleep(0.01)
        first._loop.call_soon_threadsafe(first._gate.clear)  # no answer, and no new connection
        first._loop.call_soon_threadsafe(first._server.close)
        for path in ("/weight_info", "/health"):
            first.faults[path] = [DROP] * 100
        return await asyncio.gather(*requests)

    assert [len(one.token_ids) for one in run(scenario())] == [60] * 6


def test_ranks_that_briefly_differ_do_not_take_a_server_out(server, make):
    engine = make(server)
    server.faults["/weight_info"] = [(500, "Engines returned different results")] * 3
    until(lambda: not server.faults["/weight_info"])
    assert engine.servers()[0]["serving"]


def test_a_server_that_is_busy_loading_is_not_lost(server, make, monkeypatch):
    monkeypatch.setattr("primerl.serving.client.fleet.SILENT_S", 0.2)
    engine = make(server)
    server.faults["/weight_info"] = [HANG] * 5
    time.sleep(0.6)
    assert engine.servers()[0]["serving"]


# ---- members ----


def test_servers_join_and_leave_for_all_copies(servers, make):
    first, second = servers
    engine = make(first)
    copy = cloudpickle.loads(cloudpickle.dumps(engine))
    engine.join(second.url + "/")
    for one in (engine, copy):
        until(lambda one=one: [r["serving"] for r in one.servers()] == [True, True])
    engine.leave(first.url)
    for one in (engine, copy):
        until(lambda one=one: [r["url"] for r in one.servers()] == [second.url])
    first.bodies.clear()
    run(copy.generate([3], P(max_tokens=1)))
    assert first.bodies == []
    copy.close()


def test_the_private_file_is_removed_with_its_owner(server, make):
    engine = make(server)
    copy = cloudpickle.loads(cloudpickle.dumps(engine))
    path = engine._members._path
    assert path.read_text() == f"{server.url}\n"
    assert path.stat().st_mode & 0o077 == 0
    copy.close()
    assert path.exists()
    engine.close()
    assert not path.exists()


def test_an_unreadable_file_of_urls_changes_nothing(server, tmp_path, monkeypatch):
    file = tmp_path / "servers.txt"
    file.write_text(f"{server.url}\n")
    with serving.VLLMEngine(file) as engine:
        engine.adopt(0)

        def stale(*_, **__):
            raise OSError(errno.ESTALE, "Stale file handle")

        with monkeypatch.context() as patch:
            patch.setattr(type(engine._members._path), "stat", stale)
            time.sleep(0.4)
        file.write_text("http://127.0.0.1:9\n")
        until(lambda: [row["url"] for row in engine.servers()] == ["http://127.0.0.1:9"])


def test_a_file_of_urls(servers, tmp_path):
    first, second = servers
    file = tmp_path / "servers.txt"
    file.write_text(f"{first.url}\n")
    with serving.VLLMEngine(file) as engine:
        assert [row["url"] for row in engine.servers()] == [first.url]
        file.write_text(f"{first.url}\n{second.url}\n")
        until(lambda: len(engine.servers()) == 2)
        file.write_text("nonsense")
        time.sleep(0.4)
        assert len(engine.servers()) == 2
    assert file.exists()


# ---- data-parallel ranks ----


def ranks_of(server):
    return [headers.get("x-data-parallel-rank") for headers, _ in server.sent]


def test_the_turns_of_a_session_go_to_one_data_parallel_rank(make):
    async def play(engine, sessions):
        for turn in range(4):
            prompt = list(range(1, 4 + turn))
            calls = (engine.generate(prompt, P(max_tokens=1), session=one) for one in sessions)
            await asyncio.gather(*calls)

    with ScriptedVLLM(ranks=4) as server:
        engine = make(server)
        sessions = [f"rollout-{number}" for number in range(8)]
        run(play(engine, sessions))
        found = ranks_of(server)
        assert set(found) <= {"0", "1", "2", "3"}
        assert len(set(found)) > 1
        assert sorted(found[:8]) == sorted(found[8:16]) == sorted(found[24:])
        assert engine.servers()[0]["ranks"] == 4
        run(engine.generate([1], P(max_tokens=1)))
        assert ranks_of(server)[-1] is None, "the server balances requests without a session"

        server.kill()
        until(lambda: not engine.servers()[0]["alive"])
        server.ranks, server.label = 1, "default"
        server.restart()
        engine.adopt(1)
        until(lambda: engine.servers()[0]["serving"])
        run(engine.generate([1], P(max_tokens=1), session="rollout-0"))
        assert ranks_of(server)[-1] is None, "it has one rank now"


@pytest.mark.parametrize("fault", [(404, "Not Found"), GARBAGE])
def test_a_server_without_metrics_has_one_rank(make, fault):
    with ScriptedVLLM(ranks=4) as server:
        server.faults["/metrics"] = [fault] * 9
        engine = make(server)
        run(engine.generate([1], P(max_tokens=1), session="rollout-0"))
        assert ranks_of(server) == [None]


def test_workers_of_several_data_parallel_ranks_are_not_known(make):
    with ScriptedVLLM(ranks=2) as server:
        with pytest.raises(
            RuntimeError, match="has 2 data-parallel ranks, and vLLM does not report"
        ):
            make(server).workers()
        server.kill()
        server.ranks = 1
        server.restart()
        engine = make(server)
        assert engine.workers() == {server.url: 1}


def test_metrics(servers, make):
    servers[1].ranks = 2
    engine = make(*servers)
    name = "vllm:num_requests_running"
    assert engine.metrics() == {servers[0].url: {name: 0.0}, servers[1].url: {name: 1.0}}
    assert engine.rank_metrics() == {
        servers[0].url: {0: {name: 0.0}},
        servers[1].url: {0: {name: 0.0}, 1: {name: 1.0}},
    }


def test_the_dtype_of_all_servers(servers, make):
    engine = make(*servers)
    assert engine.dtype == "bfloat16"
    servers[1].dtype = "float32"
    with pytest.raises(RuntimeError, match="disagree on served_dtype: .*bfloat16.*float32"):
        _ = engine.dtype


def test_the_largest_cache_block_of_all_servers(servers, make):
    engine = make(*servers)
    servers[1].cache_block = {"tokens": 528}
    assert engine.cache_block == 528
    for answer in ({}, {"tokens": 0}, {"tokens": "32"}, "32"):
        servers[1].cache_block = answer
        with pytest.raises(RuntimeError, match=r"served_cache_block"):
            _ = engine.cache_block


def test_servers_that_can_not_be_sent_weights_are_refused_however_they_were_started(servers, make):
    engine = make(*servers)
    engine.check_reloads()
    servers[0].reload_refusal = servers[1].reload_refusal = "start it without enable_eplb"
    with pytest.raises(RuntimeError, match="start it without enable_eplb"):
        engine.check_reloads()
    servers[1].reload_refusal = ""
    with pytest.raises(RuntimeError, match="disagree on reload_refusal: .*without enable_eplb"):
        engine.check_reloads()


def test_a_call_after_one_that_failed_does_not_find_the_server_dead(server):
    async def calls():
        http = Http(None)
        try:
            with pytest.raises(ServerFailed, match="the method failed"):
                await http.post(server.url, "/collective_rpc", {})
            return await http.post(server.url, "/resume")
        finally:
            await http.close()

    server.faults["/collective_rpc"] = [(500, "the method failed")]
    assert run(calls()) == b'{"status": "done"}'


def test_probe(servers, make):
    engine = make(*servers)
    answers = engine.probe([[8, 16], [24, 32, 40]], max_new_tokens=2)
    assert set(answers) == {one.url for one in servers}
    for replies in answers.values():
        assert [one["scores"].tolist() for one in replies] == [[0, -2], [0, -4, -5]]
        assert [one["token_ids"].tolist() for one in replies] == [[24, 25], [32, 33]]
        assert [one["logprobs"].tolist() for one in replies] == [[-1, -1], [-1, -1]]
    assert {body["priority"] for one in servers for body in one.bodies} == {-1}
    with pytest.raises(ValueError, match="exceed the context"):
        engine.probe([[1] * 127], max_new_tokens=2)


def test_a_probe_samples_with_the_cache_of_its_scores(server, make):
    engine = make(server)
    engine.probe([[8, 16]], max_new_tokens=2)
    scored, continued = server.bodies
    assert "prompt_logprobs" in scored["sampling_params"]
    assert "prompt_logprobs" not in continued["sampling_params"]
    assert scored["cache_salt"] == continued["cache_salt"]


def test_a_server_without_the_route_raises(server, make):
    engine = make(server)
    server.faults["/inference/v1/generate"] = [(403, "Restart with --enable-scale-out")]
    with pytest.raises(RuntimeError, match="403: Restart with --enable-scale-out$"):
        run(engine.generate([3], P(max_tokens=1)))


def test_a_closed_engine_raises(server, make):
    engine = make(server)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(engine.generate([3], P(max_tokens=1)))
    assert not [t for t in threading.enumerate() if t.name == "primerl-vllm"]


# ---- under a worker ----


async def play(task, engine, params):
    answer = await engine.generate([3, 4], params, session=task["id"])
    sample = Sample(
        token_ids=[3, 4, *answer.token_ids],
        loss_mask=[False, False] + [True] * len(answer.token_ids),
        behavior_logprobs=[0, 0, *answer.logprobs],
        versions=[-1, -1, *answer.versions],
    )
    return Rollout(samples=[sample], reward=float(len(answer.token_ids)))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_synchronous_run_publishes_and_takes(servers, make, isolation):
    engine = make(*servers)
    tasks = [{"id": str(n)} for n in range(8)]
    with rollout.worker(
        engine,
        play,
        tasks,
        params=P(max_tokens=4),
        group_size=2,
        groups_per_step=2,
        max_staleness=0,
        isolation=isolation,
        timeout_s=30,
    ) as rollouts:
        for version in range(4):
            groups = rollouts.take(version)
            assert {int(v) for group in groups for v in group.versions} == {version}
            engine.load_weights({}, version=version + 1)
            played = rollouts.evaluate(tasks[:2], P(max_tokens=2, temperature=0))
            assert {int(v) for one in played for v in one.samples[0].versions[2:]} == {version + 1}
        other = make(*servers, run=engine._settings.labels.run, adopt=None)
        played = rollouts.evaluate(tasks[:2], P(max_tokens=2, temperature=0), engine=other)
        assert {int(v) for one in played for v in one.samples[0].versions[2:]} == {4}


# ---- the wire ----


def choice(**fields):
    return responses.Choice(finish_reason="stop", token_ids=[5, 6, 7], **fields)


def test_spans_become_versions():
    labels = Labels("abc")
    spans = [responses.VersionSpan("abc-1", 0, 1), responses.VersionSpan("abc-3", 1, 3)]
    assert responses.token_versions(choice(weight_versions=spans), labels.number) == [1, 3, 3]
    spans[0].version = "default"
    assert responses.token_versions(choice(weight_versions=spans), labels.number) == [None, 3, 3]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [("a-1", 0, 2)],
        [("a-1", 1, 3)],
        [("a-1", 0, 4)],
        [("a-1", 0, 2), ("a-1", 1, 3)],
        [("a-1", 0, -1)],
        [("a-1", 0, 2**31 - 1)],
    ],
)
def test_spans_that_do_not_cover_the_tokens(spans):
    made = None if spans is None else [responses.VersionSpan(*span) for span in spans]
    with pytest.raises(rollout.BadCompletion, match="weight_versions"):
        responses.token_versions(choice(weight_versions=made), Labels("a").number)


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("ab-0", 0),
        ("ab-12", 12),
        ("ab-2147483647", 2**31 - 1),
        ("ab-2147483648", None),
        ("ab-" + "9" * 5000, None),
        ("ab-012", None),
        ("ab-\u0663", None),
        ("ab-", None),
        ("12", None),
        ("default", None),
        (None, None),
        ("ab--1", None),
    ],
)
def test_labels(label, version):
    assert Labels("ab").number(label) == version


@pytest.mark.parametrize("value", [-9999.0, -math.inf, math.nan])
def test_damaged_weights_are_detected(value):
    logprobs = responses.Logprobs([responses.TokenLogprob(one) for one in (-1.0, value, -1.0)])
    with pytest.raises(rollout.BadCompletion, match="damaged"):
        responses.make_completion(choice(logprobs=logprobs), [0, 0, 0])


def test_logprobs_of_every_token():
    with pytest.raises(rollout.BadCompletion, match="0 logprobs for 3 tokens"):
        responses.make_completion(choice(), [0, 0, 0])
    logprobs = responses.Logprobs([responses.TokenLogprob(-1.0, token) for token in (5, 6, 8)])
    with pytest.raises(rollout.BadCompletion, match="the logprob of 8 with token 7"):
        responses.make_completion(choice(logprobs=logprobs), [0, 0, 0])
    logprobs = responses.Logprobs([responses.TokenLogprob(one) for one in (-1.0, 1e-6, 0.0)])
    made = responses.make_completion(choice(logprobs=logprobs), [0, 0, 0])
    assert made.logprobs.tolist() == [-1.0, np.float32(1e-6), 0.0], "rounding is let pass"
