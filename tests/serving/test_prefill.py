"""Prompts that one server computes for another: which ones, their routes, versions and faults."""

import asyncio
import contextlib
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from recording_store import RecordingStore
from scripted_vllm import DROP, ScriptedVLLM, encode_routes, numbered_routes
from waiting import until

from primerl import serving
from primerl.rollout.engines.contract import BadCompletion
from primerl.types import SamplingParams as P

STORE = {"connector": "FolderConnector", "folder": "/store"}
PREFILL = {"loaded": False, "role": "kv_producer", **STORE}
DECODE = {"loaded": True, "role": "kv_consumer", **STORE}
PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def decode():
    with ScriptedVLLM(keeps_prompts=True) as one:
        one.served_routes = DECODE
        yield one


@pytest.fixture
def prefill():
    with ScriptedVLLM(keeps_prompts=True) as one:
        one.served_routes = PREFILL
        yield one


@pytest.fixture
def make(decode, prefill):
    with contextlib.ExitStack() as stack:

        def engine(*, adopt=True, **keywords):
            keywords = {"down_timeout_s": 5.0, "prefill_from": 4, **keywords}
            one = stack.enter_context(
                serving.VLLMEngine(decode.url, prefill=[prefill.url], **keywords)
            )
            if adopt:
                one.adopt(0)
            return one

        yield engine


def generate(engine, prompt=PROMPT, *, session=None, max_tokens=2, **params):
    params = P(max_tokens=max_tokens, **{"temperature": 0.0, **params})
    return asyncio.run(engine.generate(prompt, params, session=session))


def prompts(server):
    return [body["token_ids"] for body in server.bodies]


def test_a_long_prompt_is_computed_by_one_server_and_continued_by_another(decode, prefill, make):
    transfer = prefill.transfer = {"remote_block_ids": [7, 8], "remote_host": "there"}

    completion = generate(make())

    assert completion.token_ids.tolist() == [21, 22]
    (asked,), (sampled,) = prefill.bodies, decode.bodies
    assert asked["token_ids"] == sampled["token_ids"] == PROMPT
    assert asked["sampling_params"]["max_tokens"] == 1
    assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert sampled["kv_transfer_params"] == transfer
    assert asked["cache_salt"] == sampled["cache_salt"] == decode.label


def test_only_tokens_that_are_new_to_the_server_count(decode, prefill, make):
    engine = make(prefill_from=4)
    turns = [PROMPT[:3], PROMPT, [*PROMPT, 7, 8, 9], [*PROMPT, 7, 8, 9, 10, 11, 12, 13]]
    for turn in turns:
        generate(engine, turn, session="a")
    assert prompts(decode) == turns
    assert prompts(prefill) == [turns[-1]]
    generate(engine, turns[-1], session="another")
    assert prompts(prefill) == [turns[-1]] * 2


def test_of_a_store_nothing_is_passed_on(decode, make):
    generate(make())
    assert "kv_transfer_params" not in decode.bodies[0]


# ---- routes ----


def routed(decode, prefill):
    decode.routes = prefill.routes = numbered_routes
    return RecordingStore()


def test_routes_of_both_servers_are_joined(decode, prefill, make):
    store = routed(decode, prefill)
    # Short prompts, too, since only the server that computes a token knows its routes.
    engine = make(routes=store, prefill_from=100)
    generate(engine, temperature=1.0, routes_start=2, max_tokens=3)

    starts = [
        body["sampling_params"]["routed_experts_prompt_start"]
        for body in (*prefill.bodies, *decode.bodies)
    ]
    assert starts == [2, 5]
    ((rows, how),) = store.puts
    assert (how["start"], how["shared"]) == (2, 3)
    assert how["versions"] == [0] * 6
    assert rows[:, 0, 0].tolist() == [4, 6, 8, 10, 12, 14], "of tokens 2 to 7"


def test_a_prompt_of_one_new_token_has_no_row_to_join(decode, prefill, make):
    store = routed(decode, prefill)
    generate(make(routes=store), temperature=1.0, routes_start=5)
    ((rows, how),) = store.puts
    assert how["start"] == 5
    assert rows[:, 0, 0].tolist() == [10, 12]


@pytest.mark.parametrize("cut", [0, 2])
def test_a_prefill_server_that_does_not_send_all_routes_is_avoided(decode, prefill, make, cut):
    store = routed(decode, prefill)
    prefill.routes = lambda prompt, tokens, start: (
        numbered_routes(prompt, tokens, start + cut) if cut else None
    )
    engine = make(routes=store)
    generate(engine, temperature=1.0)
    assert [how["start"] for _, how in store.puts] == [len(PROMPT) - 1], "no row is made up"
    failures = {row["url"]: (row["failures"], row["error"]) for row in engine.servers()}
    assert failures[decode.url] == (0, "")
    assert failures[prefill.url][0] == 3
    assert "sent expert routes of" in failures[prefill.url][1]


def test_routes_of_another_model_are_not_joined(decode, prefill, make):
    store = routed(decode, prefill)
    prefill.routes = lambda prompt, *_: encode_routes(np.zeros((len(prompt), 3, 2), np.uint8))
    with pytest.raises(BadCompletion, match=r"uint8\[2, 2, 2\].*computed the prompt sent uint8\[5"):
        generate(make(routes=store), temperature=1.0)


def test_without_a_prefill_server_rows_before_the_last_token_are_missing(decode, prefill, make):
    store = routed(decode, prefill)
    engine = make(routes=store)
    prefill.kill()
    until(lambda: not engine.servers()[1]["alive"])
    generate(engine, temperature=1.0)
    ((rows, how),) = store.puts
    assert how["start"] == len(PROMPT) - 1
    assert len(rows) == 2


def test_routes_that_the_second_server_sends_itself_are_not_joined(decode, prefill, make):
    """It loads nothing, and does not say of which connector."""
    store = routed(decode, prefill)
    decode.served_routes = {"loaded": False}
    generate(make(routes=store), temperature=1.0, routes_start=2)
    ((rows, how),) = store.puts
    assert how["start"] == 2
    assert rows[:, 0, 0].tolist() == [4, 6, 8, 10, 12]


@pytest.mark.parametrize("sends", [True, False])
def test_routes_of_a_prompt_of_which_none_are_wanted(decode, prefill, make, sends):
    store = routed(decode, prefill)
    prefill.routes = lambda *_: encode_routes(np.zeros((0, 1, 1), np.uint8)) if sends else None
    generate(make(routes=store), temperature=1.0, routes_start=len(PROMPT))
    ((rows, how),) = store.puts
    assert how["start"] == len(PROMPT)
    assert rows[:, 0, 0].tolist() == [12]


# ---- versions ----


def test_weights_of_both_servers_are_the_same_or_the_prompt_stays_whole(decode, prefill, make):
    decode.label, prefill.label = "abc-0", "abc-1"  # as another copy of the engine published
    completion = generate(make(run="abc", adopt=False))
    assert completion.versions.tolist() == [0, 0]
    assert prefill.bodies == []


def test_an_update_while_the_prompt_is_computed(decode, prefill, make):
    """The answer is of other weights than the server that is to continue: it is not used."""
    engine = make(run="abc")

    def updated(_):
        prefill.label = "abc-1"
        return False

    prefill.transfer = {"of": "version 1"}
    prefill.refuse = updated
    completion = generate(engine)
    assert completion.versions.tolist() == [0, 0]
    assert len(prefill.bodies) == 1
    assert "kv_transfer_params" not in decode.bodies[0]


def test_an_update_before_the_prompt_is_continued(decode, prefill, make):
    """Its keys and values may have been loaded under other weights: it is sent again."""
    decode.label = prefill.label = "abc-0"
    engine = make(run="abc", adopt=False)

    def updated(_):
        if len(decode.bodies) == 1:
            decode.label = prefill.label = "abc-1"
        return False

    decode.refuse = updated
    completion = generate(engine)
    assert completion.versions.tolist() == [1, 1]
    assert len(decode.bodies) == 2
    until(lambda: [row["version"] for row in engine.servers()] == [1, 1])
    generate(engine)
    assert prefill.bodies[-1]["cache_salt"] == "abc-1"


def test_both_roles_are_updated(decode, prefill, make):
    engine = make(run="abc")
    receipts = engine.load_weights({"folder": "f"}, version=3)
    assert receipts.keys() == {decode.url, prefill.url}
    assert [row["role"] for row in engine.servers()] == ["decode", "prefill"]
    places = [
        call["kwargs"]["place"]
        for server in (decode, prefill)
        for path, call in server.calls
        if call.get("method") == "label_shared_keys"
    ]
    assert [place.rpartition("-")[2] for place in places] == ["0", "3"] * 2
    assert len({place.rpartition("-")[0] for place in places}) == 1, "one place for all"


def test_a_version_that_is_published_again_has_another_place(decode, make):
    engine = make()
    for version in (1, 1, 2):
        engine.load_weights({"folder": "f"}, version=version)
    calls = [call for _, call in decode.calls if call.get("method") == "label_shared_keys"]
    first, again, later = [call["kwargs"]["place"] for call in calls][-3:]
    assert first != again
    assert first[-2:] == again[-2:] == "-1"
    assert again[:8] == later[:8]


def test_with_routes_a_request_waits_until_both_servers_are_updated(decode, prefill, make):
    store = routed(decode, prefill)
    decode.label, prefill.label = "abc-1", "abc-0"
    engine = make(run="abc", adopt=False, routes=store)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(generate, engine, temperature=1.0)
        time.sleep(0.3)
        assert prefill.bodies == decode.bodies == []
        prefill.label = "abc-1"
        request.result(30)
    assert prompts(prefill) == [PROMPT]
    assert [how["start"] for _, how in store.puts] == [0]


def test_with_routes_a_prompt_is_computed_again_after_an_update(decode, prefill, make):
    store = routed(decode, prefill)
    decode.label = prefill.label = "abc-0"
    engine = make(run="abc", adopt=False, routes=store)

    def updated(_):
        decode.label = prefill.label = "abc-1"
        return False

    prefill.refuse = updated
    completion = generate(engine, temperature=1.0)
    assert completion.versions.tolist() == [1, 1]
    assert len(prefill.bodies) == 2
    assert [how["start"] for _, how in store.puts] == [0]


def test_servers_that_keep_different_weights(decode, prefill, make, monkeypatch):
    monkeypatch.setattr("primerl.serving.client.prefill.SKEW_S", 0.2)
    store = routed(decode, prefill)
    decode.label, prefill.label = "abc-1", "abc-0"
    generate(make(run="abc", adopt=False, routes=store), temperature=1.0)
    assert prefill.bodies == []
    assert [how["start"] for _, how in store.puts] == [len(PROMPT) - 1]


# ---- faults ----


@pytest.mark.parametrize("fault", [(503, "busy"), (500, "broken")])
def test_a_prefill_server_that_fails_is_done_without(decode, prefill, make, fault):
    engine = make()
    prefill.faults["/inference/v1/generate"] = [fault]
    assert generate(engine).token_ids.tolist() == [21, 22]
    assert "kv_transfer_params" not in decode.bodies[0]


def test_a_prefill_server_that_forgot_a_prompt_is_sent_it_again(decode, prefill, make):
    engine = make()
    generate(engine, session="a")
    prefill._keeper._kept.clear() if hasattr(prefill._keeper, "_kept") else prefill.restart()
    until(lambda: engine.servers()[1]["alive"])
    generate(engine, [*PROMPT, *PROMPT], session="a")
    assert prompts(decode)[-1] == [*PROMPT, *PROMPT]


def test_a_prefill_server_that_dies_in_a_request_and_returns(decode, prefill, make):
    engine = make(run="abc")
    engine.load_weights({"folder": "f"}, version=1)
    prefill.hold = lambda tokens: True
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(generate, engine)
        until(lambda: prefill.bodies)
        prefill.kill()
        assert request.result(60).token_ids.tolist() == [21, 22]
    prefill.hold = lambda tokens: False
    prefill.restart()
    until(lambda: engine.servers()[1]["version"] == 1)
    generate(engine)
    assert prompts(prefill) == [PROMPT, PROMPT]


def test_a_server_that_dies_before_it_says_how_it_shares(decode, prefill, make):
    engine = make()
    prefill.faults["/collective_rpc"] = [DROP]
    assert generate(engine).token_ids.tolist() == [21, 22]
    until(lambda: engine.servers()[1]["serving"])
    decode.faults["/collective_rpc"] = [DROP]
    assert generate(engine).token_ids.tolist() == [21, 22]


@contextlib.contextmanager
def with_another(engine):
    """A second server that samples."""
    with ScriptedVLLM() as other:
        other.served_routes = DECODE
        engine.join(other.url)
        until(lambda: len([row for row in engine.servers() if row["alive"]]) == 3)
        engine.adopt(0)
        yield engine, other


def test_a_server_that_dies_while_its_prompt_is_computed_elsewhere(decode, prefill, make):
    with with_another(make()) as (engine, other):
        prefill.hold = lambda tokens: True
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(generate, engine, session="a")
            until(lambda: prefill.bodies)
            by_url = {row["url"]: row for row in engine.servers()}
            chosen, spare = (decode, other) if by_url[decode.url]["in_flight"] else (other, decode)
            assert by_url[chosen.url]["in_flight"] == 1
            chosen.kill()
            chosen.restart()  # with its checkpoint's weights
            until(lambda: prefill.cancelled)
            prefill.hold = lambda tokens: False
            request.result(30)
        assert len(spare.bodies) == 1


def test_requests_whose_prompts_are_being_computed_count_for_their_server(decode, prefill, make):
    with with_another(make()) as (engine, other):
        prefill.hold = lambda tokens: True
        with ThreadPoolExecutor(6) as pool:
            requests = [pool.submit(generate, engine) for _ in range(6)]
            until(lambda: len(prefill.bodies) == 6)
            prefill.hold = lambda tokens: False
            for request in requests:
                request.result(30)
        assert len(decode.bodies) == len(other.bodies) == 3


def test_a_prefill_server_that_answers_wrongly_is_avoided(decode, prefill, make):
    engine = make()
    prefill.edit = lambda page: page.replace(b"generate-tokens", b"generate-tokens-x")[:-9]
    assert generate(engine).token_ids.tolist() == [21, 22]
    assert [row["failures"] for row in engine.servers()] == [0, 3]


def test_a_prefill_server_that_aborts_is_done_without(decode, prefill, make):
    store = routed(decode, prefill)
    engine = make(routes=store)
    prefill.abort_next = 1
    generate(engine, temperature=1.0)
    assert len(prefill.bodies) == 1
    assert [how["start"] for _, how in store.puts] == [len(PROMPT) - 1]


def test_a_prefill_server_that_samples_more_than_it_was_asked(decode, prefill, make):
    def longer(page):
        answer = json.loads(page)
        (choice,) = answer["choices"]
        choice["token_ids"] *= 2
        choice["logprobs"]["content"] *= 2
        choice["weight_versions"][0]["end"] = 2
        answer["usage"]["completion_tokens"] = 2
        return json.dumps(answer).encode()

    prefill.edit = longer
    engine = make(retries=0)
    with pytest.raises(BadCompletion, match=f"{prefill.url}: it sampled 2 tokens"):
        generate(engine)


def test_without_retries_a_wrong_answer_to_a_prompt_is_an_error(prefill, make):
    engine = make(retries=0)
    prefill.edit = lambda page: page.replace(b"generate-tokens", b"generate-tokens-x")[:-9]
    with pytest.raises(BadCompletion, match=prefill.url):
        generate(engine)


@pytest.mark.parametrize(
    ("stored", "loaded", "what"),
    [
        ({**PREFILL, "connector": ""}, DECODE, "the latter no KV connector"),
        (PREFILL, {**DECODE, "connector": ""}, "the former has no KV connector"),
        (PREFILL, {**DECODE, "connector": "NixlConnector"}, "NixlConnector"),
        (PREFILL, {**DECODE, "folder": "/other"}, "/other"),
        ({**PREFILL, "role": "kv_consumer"}, DECODE, "kv_consumer"),
        (PREFILL, {**DECODE, "role": "kv_producer", "loaded": False}, "kv_producer"),
    ],
)
def test_servers_that_can_not_share_are_refused(decode, prefill, make, stored, loaded, what):
    prefill.served_routes, decode.served_routes = stored, loaded
    engine = make()
    with pytest.raises(RuntimeError, match=rf"{decode.url} can't load what .*{what}.*kv_folder"):
        generate(engine)


@pytest.mark.parametrize("both", ["prefill", "decode"])
def test_a_server_of_both_roles_shares_with_either(decode, prefill, make, both):
    server = prefill if both == "prefill" else decode
    server.served_routes = {"loaded": True, "role": "kv_both", **STORE}
    generate(make())
    assert len(prefill.bodies) == len(decode.bodies) == 1


def test_servers_that_say_nothing_are_trusted(decode, prefill, make):
    prefill.served_routes = decode.served_routes = {"loaded": True}
    generate(make())
    assert len(prefill.bodies) == 1


# ---- lists ----


def test_a_server_has_one_role(decode, prefill, make):
    with pytest.raises(ValueError, match="listed twice"):
        serving.VLLMEngine(decode.url, prefill=[decode.url])
    engine = make()
    with pytest.raises(ValueError, match="has another role already"):
        engine.join(prefill.url)
    with serving.VLLMEngine(decode.url) as alone, pytest.raises(ValueError, match="prefill="):
        alone.join(prefill.url, role="prefill")
    with pytest.raises(ValueError, match="prefill_from is 0"):
        serving.VLLMEngine(decode.url, prefill=[prefill.url], prefill_from=0)


def test_a_server_may_leave_and_join_in_the_other_role(prefill, make):
    engine = make()
    engine.leave(prefill.url)
    engine.join(prefill.url)  # before the departure was noticed
    until(lambda: [row["role"] for row in engine.servers()] == ["decode", "decode"])
    engine.leave(prefill.url)
    engine.join(prefill.url, role="prefill")
    until(lambda: [row["role"] for row in engine.servers()] == ["decode", "prefill"])


def test_the_context_is_that_of_the_servers_that_sample(decode, prefill, make):
    prefill.context = decode.context // 2
    decode.faults["/v1/models"] = [(503, "starting")]  # so that the other one answers first
    assert make(adopt=False).context_length == decode.context


def test_copies_know_who_joins_and_leaves(decode, prefill, make):
    engine = make()
    with ScriptedVLLM() as other, pickle.loads(pickle.dumps(engine)) as copy:
        other.served_routes = PREFILL
        engine.join(other.url, role="prefill")
        until(lambda: [row["role"] for row in copy.servers()].count("prefill") == 2)
        engine.leave(prefill.url)
        until(lambda: len(copy.servers()) == 2)
        assert {row["url"]: row["role"] for row in copy.servers()} == {
            decode.url: "decode",
            other.url: "prefill",
        }


# ---- kv_folder ----


def test_the_configuration_of_a_folder():
    found = serving.kv_folder("/store", role="prefill", chunk_tokens=64)
    assert found["kv_role"] == "kv_producer"
    assert found["kv_connector_extra_config"] == {"folder": "/store", "chunk_tokens": 64}
    assert serving.kv_folder("/store")["kv_role"] == "kv_both"
    assert serving.kv_folder("/store", role="decode")["kv_role"] == "kv_consumer"


@pytest.mark.parametrize(
    ("folder", "how", "what"),
    [("store", {}, "relative"), ("/store", {"chunk_tokens": 0}, "chunk_tokens is 0")],
)
def test_a_configuration_that_is_refused(folder, how, what):
    with pytest.raises(ValueError, match=what):
        serving.kv_folder(folder, **how)
