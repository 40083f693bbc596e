"""VLLMEngine that samples under an adapter, against scripted servers."""

import asyncio
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from recording_store import RecordingStore
from scripted_vllm import DROP, ScriptedVLLM, numbered_routes
from waiting import until

from primerl import serving
from primerl.rollout import BadCompletion
from primerl.serving.protocol.labels import Labels
from primerl.types import SamplingParams

P = SamplingParams(max_tokens=2, temperature=0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def update(path="/adapters/a", *, rank=4, digest="d"):
    return {"adapter": path, "layers": ["layer"], "rank": rank, "digest": digest}


@pytest.fixture
def server():
    with ScriptedVLLM() as one:
        one.most_rank = 8
        yield one


@pytest.fixture
def make():
    made = []

    def engine(*servers, adapter="policy", **keywords):
        keywords = {"down_timeout_s": 2.0, "run": "abc", **keywords}
        urls = [one.url for one in servers]
        made.append(serving.VLLMEngine(urls, adapter=adapter, **keywords))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def test_each_version_has_a_name_of_its_own_and_nothing_pauses(server, make):
    engine = make(server)
    receipts = engine.load_weights(update("/adapters/3"), version=3)
    assert receipts[server.url][0]["digest"] == "d"
    assert engine.version == 3

    answer = run(engine.generate([3, 4], P))
    assert answer.versions.tolist() == [3, 3]
    assert run(engine.score([8, 16])).tolist() == [0.0, -2.0]
    assert [body["model"] for body in server.bodies] == ["policy-abc-3"] * 2
    engine.load_weights(update("/adapters/4"), version=4)
    assert run(engine.generate([3, 4], P)).versions.tolist() == [4, 4]
    assert list(server.adapters) == ["policy-abc-4"]
    assert server.adapters["policy-abc-4"][1] == "/adapters/4"
    assert {path for path, _ in server.calls} == {
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
    assert server.label == "default"


def test_a_version_that_is_published_again_replaces_itself(server, make):
    engine = make(server)
    engine.load_weights(update("/adapters/3"), version=3)
    engine.load_weights(update("/adapters/3-again"), version=3)
    assert server.adapters["policy-abc-3"][1] == "/adapters/3-again"
    with pytest.raises(ValueError, match="version 2 is older than version 3"):
        engine.load_weights(update(), version=2)


def test_engines_of_several_adapters_share_a_server(server, make):
    policy, other = make(server), make(server, adapter="other")
    policy.load_weights(update(), version=5)
    other.load_weights(update(), version=1)
    policy.load_weights(update(), version=6)

    assert sorted(server.adapters) == ["other-abc-1", "policy-abc-6"]
    assert (policy.version, other.version) == (6, 1)
    assert run(other.generate([3], P)).versions.tolist() == [1, 1]
    assert server.bodies[-1]["model"] == "other-abc-1"


def test_a_copy_follows_the_versions(server, make):
    engine = make(server)
    with pickle.loads(pickle.dumps(engine)) as copied:
        engine.load_weights(update(), version=1)
        assert run(copied.generate([3], P)).versions.tolist() == [1, 1]
        engine.load_weights(update(), version=2)  # sooner than the copy looks again
        assert run(copied.generate([3], P)).versions.tolist() == [2, 2]


def test_what_arrived_otherwise_is_unloaded_and_the_old_version_stays(server, make):
    engine = make(server)
    engine.load_weights(update("/adapters/1"), version=1)
    server.read_s = 0.5  # the engine asks meanwhile what is served, and is not to believe it
    server.digests["/adapters/2"] = "of something else"

    receipts = engine.load_weights(update("/adapters/2"), version=2)

    assert receipts[server.url][0]["digest"] == "of something else"
    assert list(server.adapters) == ["policy-abc-1"]
    assert engine.version == 1
    assert run(engine.generate([3], P)).versions.tolist() == [1, 1]


def test_an_adapter_that_never_arrived_leaves_a_receipt_of_nothing(server, make, monkeypatch):
    monkeypatch.setitem(server.faults, "/v1/load_lora_adapter", [(200, "Success")])
    receipts = make(server).load_weights(update(), version=1)
    assert receipts[server.url][0]["tensors"] == 0


def test_a_dropped_adapter_is_given_back_by_the_engine_that_published(server, make, caplog):
    caplog.set_level(logging.INFO)
    engine = make(server)
    engine.load_weights(update(), version=1)
    server.adapters.clear()

    assert run(engine.generate([3], P)).versions.tolist() == [1, 1]
    assert list(server.adapters) == ["policy-abc-1"]
    until(lambda: "has loaded version 1, which it was missing" in caplog.text)


def test_without_that_engine_requests_fail_and_none_is_served_by_the_base(server, make):
    engine = make(server)
    engine.load_weights(update(), version=1)
    with pickle.loads(pickle.dumps(engine)) as copied:
        run(copied.generate([3], P))
        engine.close()
        server.adapters.clear()
        with pytest.raises(RuntimeError, match="policy"):
            run(copied.generate([3], P))
    assert {body["model"] for body in server.bodies} == {"policy-abc-1"}


class SlowToSay(ScriptedVLLM):
    """Says what it loads only when it may."""

    def __init__(self):
        super().__init__()
        self.most_rank = 8
        self.routes = numbered_routes
        self.asked, self.may_say = threading.Event(), threading.Event()

    async def _update(self, method, path, query, body):
        if body and body.get("method") == "served_routes":
            self.asked.set()
            while not self.may_say.is_set():
                await asyncio.sleep(0.005)
        return await super()._update(method, path, query, body)


def test_a_version_that_comes_while_a_request_waits_to_be_sent_is_its_version(make):
    with SlowToSay() as server:
        engine = make(server, routes=RecordingStore())
        engine.load_weights(update("/adapters/1"), version=1)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(run, engine.generate([3, 4], P))
            assert server.asked.wait(60)
            engine.load_weights(update("/adapters/2"), version=2)
            server.may_say.set()
            assert asked.result(30).versions.tolist() == [2, 2]
        assert [body["model"] for body in server.bodies] == ["policy-abc-2"]


def test_a_server_that_is_lost_while_a_request_waits_does_not_sample_with_its_base(make):
    with SlowToSay() as server:
        engine = make(server, routes=RecordingStore())
        engine.load_weights(update(), version=1)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(run, engine.generate([3, 4], P))
            assert server.asked.wait(60)
            server.faults["/v1/models"] = [DROP] * 5
            until(lambda: not engine._connection.fleet.servers.live())
            server.may_say.set()
            assert asked.result(30).versions.tolist() == [1, 1]
        assert [body["model"] for body in server.bodies] == ["policy-abc-1"]


def test_a_restarted_server_gets_the_latest_version(server, make):
    engine = make(server)
    engine.load_weights(update("/adapters/1"), version=1)
    server.restart()
    until(lambda: "policy-abc-1" in server.adapters)
    assert run(engine.generate([3], P)).versions.tolist() == [1, 1]


def test_an_answer_by_the_base_is_a_fault(server, make):
    engine = make(server)
    engine.load_weights(update(), version=1)
    server.answers_as = "scripted"
    with pytest.raises(BadCompletion, match="answered under 'scripted', expected the adapter"):
        run(engine.generate([3], P))


def test_servers_that_cannot_take_it_are_named(server, make):
    engine = make(server)
    with pytest.raises(RuntimeError, match=r"no server was changed: .* takes up to rank 8, and"):
        engine.load_weights(update(rank=16), version=1)
    server.most_rank = 0
    with pytest.raises(RuntimeError, match=r"takes no adapters.*enable_lora=True, max_lora_rank=8"):
        engine.load_weights(update(), version=1)
    server.most_rank = 8
    server.faults["/v1/load_lora_adapter"] = [(404, "Not Found")]
    with pytest.raises(RuntimeError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        engine.load_weights(update(), version=1)
    assert not server.adapters


def test_updates_of_the_other_kind_are_refused(server, make):
    with pytest.raises(ValueError, match="samples under the adapter 'policy', and the update"):
        make(server).load_weights({"folder": "x"}, version=1)
    with pytest.raises(ValueError, match="samples under the servers' own weights"):
        make(server, adapter=None).load_weights(update(), version=1)
    with pytest.raises(ValueError, match="can't be adopted"):
        make(server).adopt(0)


def test_names():
    labels = Labels("abc", "my-policy")
    assert labels.name(3) == "my-policy-abc-3"
    assert labels.number("my-policy-abc-3") == 3
    for other in ("abc-3", "policy-abc-3", "my-policy-abd-3", "my-policy-abc", "scripted", None):
        assert labels.number(other) is None
    assert Labels("abc").number("policy-abc-3") is None
    with pytest.raises(ValueError, match="adapter is 'a b', expected letters, digits"):
        Labels("abc", "a b")
