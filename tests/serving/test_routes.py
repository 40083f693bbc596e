"""Expert routes out of responses: split from the JSON, decoded, given to a store."""

import asyncio
import base64
import io
import itertools
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import hostile_server
import numpy as np
import pytest
from character_codes import CharacterCodes
from recording_store import RecordingStore
from scripted_vllm import ScriptedVLLM, encode_routes, numbered_routes
from waiting import until

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from primerl import rollout, serving
from primerl.rollout.engines.contract import BadCompletion
from primerl.serving.client import expert_routes as client_routes
from primerl.serving.client.expert_routes import row_versions
from primerl.serving.protocol import expert_routes as routes_module
from primerl.serving.protocol.expert_routes import RoutesDecoder, RoutesSplitter, most_characters
from primerl.types import SamplingParams as P

# ---- splitting ----


def split(body, cuts=()):
    """The rest and the value of a body in chunks, and whether there was one."""
    splitter = RoutesSplitter()
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    parts = [splitter.feed(body[a:b]) for a, b in itertools.pairwise(edges)]
    rest, value = (b"".join(column) for column in zip(*parts, strict=True))
    return rest, value, splitter.found


def everywhere(body):
    """The same for one cut at each byte, and for single bytes."""
    results = [split(body, [cut]) for cut in range(len(body) + 1)]
    results.append(split(body, range(len(body))))
    assert all(one == results[0] for one in results)
    return results[0]


@pytest.mark.parametrize(
    ("body", "rest", "value"),
    [
        (b'{"routed_experts":"QUJD","a":1}', b'{"routed_experts":"","a":1}', b"QUJD"),
        (b'{"routed_experts" :\r\n\t "QQ=="}', b'{"routed_experts" :\r\n\t ""}', b"QQ=="),
        (b'{"routed_experts":""}', b'{"routed_experts":""}', b""),
        (b'[{"routed_experts":null},{"routed_experts":"Q"}]', None, b"Q"),
    ],
)
def test_the_value_is_taken_out_wherever_chunks_end(body, rest, value):
    found = everywhere(body)
    assert found[1:] == (value, True)
    assert rest is None or found[0] == rest


@pytest.mark.parametrize(
    "body",
    [
        b'{"routed_experts": null}',
        b'{"routed_experts":7}',
        b'["routed_experts","x"]',
        b'{"a":"routed_experts","b":"x"}',
        rb'{"a":"\"routed_experts\":\"QUJD\""}',
        rb'{"a":"\"routed_experts":"QUJD"}',  # a string that ends with the key
        rb'{"a":"x\"routed_experts":"\"routed_experts\":"}',
        b'{"xrouted_experts":"QUJD","routed_expertsx":"QUJD"}',
    ],
)
def test_what_is_not_the_value_stays(body):
    assert everywhere(body) == (body, b"", False)


names = st.sampled_from(["routed_experts", 'x"routed_experts', "a", "\\", '":"', "routed_expert"])
values = st.recursive(
    st.none() | st.integers() | names | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=20,
)


@given(
    document=values,
    ascii_only=st.booleans(),
    space=st.sampled_from(["", " ", "\n\t"]),
    data=st.data(),
)
def test_any_json_in_any_chunks_is_what_it_is_as_a_whole(document, ascii_only, space, data):
    body = json.dumps(
        document, ensure_ascii=ascii_only, separators=("," + space, space + ":" + space)
    ).encode()
    taken = []

    def take(pairs):
        """As the splitter does, where the whole is decoded."""
        for name, value in pairs:
            if name == "routed_experts" and isinstance(value, str):
                taken.append(json.dumps(value, ensure_ascii=ascii_only)[1:-1].encode())
        return [
            (n, "") if n == "routed_experts" and isinstance(v, str) else (n, v) for n, v in pairs
        ]

    expected = json.loads(body, object_pairs_hook=take)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    if len(taken) > 1 or any(b'\\"' in one for one in taken):
        return  # refused: see below
    rest, value, found = split(body, cuts)
    assert json.loads(rest, object_pairs_hook=list) == expected
    assert (value, found) == (b"".join(taken), bool(taken))


parts = st.sampled_from([b'"routed_experts"', b"routed_experts", b'"', b":", b"\\", b" ", b"Q"])


@given(body=st.lists(parts, max_size=12).map(b"".join), data=st.data())
def test_what_is_no_json_is_split_the_same_in_any_chunks(body, data):
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))

    def outcome(cuts):
        try:
            return split(body, cuts)
        except BadCompletion as error:
            return str(error)

    assert outcome(cuts) == outcome(())


def test_a_second_value_is_refused_as_it_begins():
    splitter = RoutesSplitter()
    splitter.feed(b'[{"routed_experts":"QUJD"},{"routed_experts":')
    with pytest.raises(BadCompletion, match="more than once"):
        splitter.feed(b'"')


def test_a_value_without_an_end_leaves_what_is_no_json():
    rest, value, found = split(b'{"routed_experts":"QUJD')
    assert (rest, value, found) == (b'{"routed_experts":"', b"QUJD", True)


def test_spaces_are_read_once():
    splitter = RoutesSplitter()
    splitter.feed(b'{"routed_experts"')
    for _ in range(20_000):  # to look at all of them again each time would take minutes
        assert splitter.feed(b" " * 1000) == (b" " * 1000, b"")
    assert splitter.feed(b':"QQ"}') == (b':""}', b"QQ")


# ---- decoding ----


def encoded(array, *, fortran=False):
    file = io.BytesIO()
    np.save(file, np.asfortranarray(array) if fortran else array)
    return base64.b64encode(file.getvalue())


def decoded(characters, *, most_rows=100, cuts=()):
    decoder = RoutesDecoder(most_rows=most_rows)
    edges = [0, *sorted(cut % (len(characters) + 1) for cut in cuts), len(characters)]
    for a, b in itertools.pairwise(edges):
        decoder.feed(characters[a:b])
    return decoder.finish()


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3)),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
    piece=st.sampled_from([4, 64, 1 << 16]),
)
def test_routes_in_any_parts(shape, dtype, cuts, piece):
    rows = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes_module, "PIECE", piece)
        patch.setattr(routes_module, "PAUSE_S", 0)
        found = decoded(encoded(rows), cuts=cuts)
    assert (found.dtype, found.shape) == (rows.dtype, rows.shape)
    assert (found == rows).all()
    assert len(encoded(rows)) <= most_characters(shape[0])


ROWS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
WHOLE = base64.b64decode(encoded(ROWS))


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        (b"$$$$", "not base64"),
        (b"QUJ", "not base64"),
        (b"\\/" + encoded(ROWS), "not base64"),
        (encoded(ROWS)[:-1], "not base64"),
        (encoded(ROWS) + b"QUJD", "not base64|more bytes"),
        (base64.b64encode(WHOLE[:-1]) + base64.b64encode(WHOLE[-1:]), "not base64"),
        (
            base64.b64encode(WHOLE[:-3]),
            r"have 9 bytes, which end within row 2.*\[3, 2, 2\]",
        ),
        (base64.b64encode(WHOLE + b"xxx"), r"more bytes than uint8\[3, 2, 2\]"),
        (base64.b64encode(WHOLE[:50]), "50 bytes end within the header"),
        (b"", "their 0 bytes end"),
        (base64.b64encode(b"PK" * 100), "not a .npy file"),
        (base64.b64encode(b"\x93NUMPY\x02\x00" + WHOLE[8:]), "not a .npy file of version 1.0"),
        (base64.b64encode(b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 900), "not a .npy file"),
        (base64.b64encode(b"\x93NUMPY\x01\x00\x40\x01" + b"(" * 900), r"header b'\(\(\(\("),
        (encoded(ROWS.astype(np.int32)), "<i4.*expected uint8 or uint16"),
        (encoded(ROWS.astype(">u2")), ">u2.*expected uint8 or uint16"),
        (encoded(ROWS.astype(np.float32)), "<f4.*expected uint8 or uint16"),
        (encoded(ROWS, fortran=True), "True.*expected uint8"),
        (encoded(ROWS[0]), r"tokens, layers, experts of a token"),
        (encoded(np.zeros((101, 1, 1), np.uint8)), "routes of at most 100 tokens"),
        (encoded(np.zeros((1, 128, 49), np.uint8)), "6144 bytes per token"),
        (encoded(np.zeros((1, 0, 2), np.uint8)), "expected 1 to"),
    ],
)
def test_what_is_not_routes_is_refused(characters, message):
    for cuts in ((), range(len(characters))):
        with pytest.raises(BadCompletion, match=message):
            decoded(characters, cuts=cuts)


def test_a_header_of_a_huge_array_takes_no_memory():
    import resource

    header = encoded(np.zeros((0, 128, 48), np.uint8))
    claimed = base64.b64decode(header).replace(b"(0, 128, 48), }      ", b"(262144, 128, 48), } ")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadCompletion, match="0 bytes, which end within row 0"):
        decoded(base64.b64encode(claimed), most_rows=1 << 18)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB"


def test_versions_of_rows():
    sampled = np.array([4, 4, 5], np.int32)  # tokens 3, 4 and 5
    assert row_versions(sampled, prompt_length=3, start=0).tolist() == [4, 4, 4, 4, 5]
    assert row_versions(sampled, prompt_length=3, start=2).tolist() == [4, 4, 5]
    assert row_versions(sampled, prompt_length=3, start=3).tolist() == [4, 5]
    assert row_versions(sampled[:1], prompt_length=3, start=3).tolist() == []
    assert row_versions(sampled, prompt_length=3, start=0).dtype == np.int32


# ---- the engine ----


@pytest.fixture
def server():
    with ScriptedVLLM() as one:
        one.routes = numbered_routes
        yield one


@pytest.fixture
def make(server):
    made = []

    def engine(store, **options):
        options = {"down_timeout_s": 5.0, **options}
        made.append(serving.VLLMEngine(server.url, routes=store, **options))
        made[-1].adopt(3)
        return made[-1]

    yield engine
    for one in made:
        one.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_a_completion_has_the_routes_of_its_request(server, make):
    store = RecordingStore()
    engine = make(store)

    one = run(engine.generate([3, 4, 5], P(max_tokens=2)))
    two = run(engine.generate([3, 4, 5, 1, 1, 9], P(max_tokens=1, routes_start=4)))

    assert one.routes == ("fake:0",)
    assert two.routes == ("fake:1",)
    (first, how_first), (second, how_second) = store.puts
    assert first.dtype == np.uint8
    assert first.tolist() == [[[i, i + 1], [i + 1, i]] for i in (0, 2, 4, 6)]
    assert how_first == {"start": 0, "versions": [3, 3, 3, 3], "shared": 2}
    assert second[:, 0, 0].tolist() == [8, 10]
    assert how_second == {"start": 4, "versions": [3, 3], "shared": 1}
    starts = [body["sampling_params"]["routed_experts_prompt_start"] for body in server.bodies]
    assert starts == [0, 4]


def test_routes_beyond_the_prompt(server, make):
    store = RecordingStore()
    engine = make(store)

    assert run(engine.generate([3, 4], P(max_tokens=1, routes_start=2))).routes == ()
    assert store.puts == []
    assert run(engine.generate([3, 4], P(max_tokens=2, routes_start=2))).routes == ("fake:0",)
    assert store.puts[0][1] == {"start": 2, "versions": [3], "shared": 0}
    server.routes = lambda *_: None
    assert run(engine.generate([3, 4], P(max_tokens=1, routes_start=2))).routes == ()
    with pytest.raises(ValueError, match="routes_start is 3, beyond the prompt of 2 tokens"):
        run(engine.generate([3, 4], P(max_tokens=1, routes_start=3)))


def test_without_a_store_no_routes_are_asked_for(server, make):
    engine = make(None)

    assert engine.routes is None
    assert run(engine.generate([3, 4], P(max_tokens=2, routes_start=1))).routes == ()
    assert "routed_experts_prompt_start" not in server.bodies[0]["sampling_params"]
    server.routes = lambda *_: "A" * 200_000
    with pytest.raises(BadCompletion, match=r"expert routes need VLLMEngine\(..., routes=\)"):
        run(engine.generate([3, 4], P(max_tokens=2)))


def test_scores_and_probes_leave_routes_out(server, make):
    store = RecordingStore()
    engine = make(store)

    run(engine.score([1, 2, 3]))
    run(engine.score_top_k([1, 2, 3], k=2))
    engine.probe([[1, 2, 3]], max_new_tokens=2)

    assert [b["sampling_params"]["routed_experts_prompt_start"] for b in server.bodies] == [3] * 4
    assert store.puts == []


def test_versions_of_rows_at_an_update_within_a_completion(server, make):
    store = RecordingStore()
    engine = make(store)
    before = server.label
    halfway = threading.Event()

    def hold(tokens):
        """Until the update, which begins once half of the tokens were sampled."""
        if len(tokens) < 30:
            return False
        halfway.set()
        return server.label == before

    server.hold = hold

    async def scenario():
        sampling = asyncio.create_task(engine.generate([3, 4, 5], P(max_tokens=60)))
        await asyncio.to_thread(halfway.wait, 30)
        await asyncio.to_thread(engine.load_weights, {}, version=4)
        return await sampling

    versions = run(scenario()).versions.tolist()

    assert versions == [3] * 30 + [4] * 30
    assert store.puts[0][1]["versions"] == [3, 3, *versions]


def test_an_attempt_that_is_sent_again_stores_nothing(server, make):
    store = RecordingStore()
    engine = make(store)
    server.abort_next = 1

    assert run(engine.generate([3, 4], P(max_tokens=3))).routes == ("fake:0",)

    assert len(server.bodies) == 2
    assert len(store.puts) == 1


def rows(count, dtype=np.uint8):
    return encode_routes(np.zeros((count, 2, 2), dtype))


def escaped(page):
    return page.replace(b"routed_experts", rb"routed\u005fexperts")


def outside(page):
    return page.replace(b'"routed_experts"', b'"x"').replace(b"{", b'{"routed_experts":"QUJD",', 1)


def twice(page):
    return page.replace(b"{", b'{"routed_experts":"QUJD",', 1)


@pytest.mark.parametrize(
    ("value", "edit", "message"),
    [
        (None, None, "sent no expert routes; start it with serve_vllm"),
        (rows(4), None, "of 4 tokens, expected 3: those of tokens 1 to 3"),
        (
            rows(2),
            None,
            "of 2 tokens, expected 3: those of tokens 1 to 3, for a prompt of 3 tokens",
        ),
        (rows(0), None, "of 0 tokens, expected 3"),
        (rows(40), None, "the request allows routes of at most 6 tokens"),
        (rows(3, np.float32), None, "expected uint8 or uint16"),
        (rows(3)[:-8], None, "end within row"),
        ("$$$", None, "not base64"),
        (7, None, "without vLLM's schema"),
        (rows(3), escaped, "outside its choice, or escaped"),
        (None, outside, "outside its choice"),
        (rows(3), twice, "routed_experts more than once"),
        (rows(3), lambda page: page[: page.index(b"AAAA")], "without vLLM's schema"),
    ],
)
def test_routes_that_are_not_of_the_request_are_a_bad_completion(
    server, make, value, edit, message
):
    store = RecordingStore()
    engine = make(store)
    server.routes = lambda *_: value
    server.edit = edit or server.edit

    params = P(max_tokens=5, temperature=0, stop_token_ids=[13], routes_start=1)  # samples 12, 13
    with pytest.raises(BadCompletion, match=message) as caught:
        run(engine.generate([3, 4, 5], params))

    assert server.url in str(caught.value)
    assert store.puts == []
    server.routes, server.edit = numbered_routes, lambda page: page
    assert run(engine.generate([3, 4, 5], P(max_tokens=2))).routes == ("fake:0",)


def test_what_the_store_refuses_is_a_bad_completion(server, make):
    engine = make(RecordingStore(fault="token 4, layer 3 has the expert 9, expected 0 to 7"))
    with pytest.raises(BadCompletion, match="can't be of this model: token 4, layer 3 has"):
        run(engine.generate([3], P(max_tokens=1)))


def test_routes_are_decoded_and_stored_in_threads(server, make):
    threads = []

    class Watches(RecordingStore):
        def put(self, *args, **options):
            threads.append(threading.current_thread())
            return super().put(*args, **options)

    engine = make(Watches())
    run(engine.generate([3], P(max_tokens=1)))

    assert threads[0] is not threading.main_thread()
    assert threads[0] is not engine._connected().loop._thread


def test_large_routes_of_many_requests_at_once(server, make, monkeypatch):
    monkeypatch.setattr(client_routes, "BATCH_BYTES", 1 << 16)
    store = RecordingStore()
    engine = make(store)

    def large(prompt, tokens, start):
        count = len(prompt) + len(tokens) - 1 - start
        return encode_routes(np.full((count, 75, 40), prompt[0], np.uint16))

    server.routes = large

    async def scenario():
        prompts = [[number] * 100 for number in range(6)]
        return await asyncio.gather(*(engine.generate(one, P(max_tokens=1)) for one in prompts))

    answers = run(scenario())

    for number, answer in enumerate(answers):  # 800 kB each: several batches
        found, _ = store.puts[int(answer.routes[0].removeprefix("fake:"))]
        assert found.shape == (100, 75, 40)
        assert (found == number).all()


def test_an_endless_value_is_refused_early():
    with hostile_server.HostileServer("endless_routes") as server:
        engine = serving.VLLMEngine(server.url, down_timeout_s=5.0, routes=RecordingStore())
        with engine:
            engine.adopt(3)
            with pytest.raises(BadCompletion, match=r"more bytes than uint8\[4, 2, 2\]"):
                run(engine.generate([1, 3], P(max_tokens=4)))
        assert server.sent_bytes < 16 << 20


def test_the_engine_and_its_store_can_be_pickled(make):
    engine = make(RecordingStore(fault="kept"))
    copy = pickle.loads(pickle.dumps(engine))
    copy.close()
    assert copy.routes.fault == "kept"
    with pytest.raises(
        ValueError, match=r"routes is a str, expected a store with put\(\) and check"
    ):
        serving.VLLMEngine("http://127.0.0.1:1", routes="folder")


def test_three_turns_of_a_conversation_record_each_token_once(server, make):
    server.vocabulary = 128
    store = RecordingStore()
    chat = rollout.Conversation(make(store), CharacterCodes(), P(max_tokens=5))

    async def converse():
        for turn in ("two?", "more?", "last?"):
            await chat.turn(turn)

    run(converse())

    sample = chat.sample()
    assert sample.routes == ("fake:0", "fake:1", "fake:2")
    # Replies may end early, by a stop token. The next turn records first the last token of one.
    sampled = sample.loss_mask
    last = np.flatnonzero(sampled[:-1] & ~sampled[1:])
    assert [how["start"] for _, how in store.puts] == [0, *last]
    # After the first, the prompt's own rows begin with that of the last token sampled before.
    assert [how["shared"] for _, how in store.puts] == [3, 5, 5]
    recorded = np.concatenate([rows for rows, _ in store.puts])
    assert recorded[:, 0, 0].tolist() == [2 * i for i in range(len(sample.token_ids) - 1)]


# ---- servers that load keys and values ----


def starts_of(server):
    return [body["sampling_params"]["routed_experts_prompt_start"] for body in server.bodies]


def test_a_server_with_a_connector_is_asked_for_what_it_computes_itself(server, make):
    """The routes of tokens that it loaded are not known to it, and asking would end it."""
    server.served_routes = {"loaded": True}
    store = RecordingStore()
    engine = make(store)

    run(engine.generate([3, 4, 5], P(max_tokens=2)))
    run(engine.generate([3, 4, 5, 1, 1, 9], P(max_tokens=1, routes_start=4)))
    run(engine.generate([3, 4], P(max_tokens=2, routes_start=2)))

    assert starts_of(server) == [2, 5, 2]
    assert [how["start"] for _, how in store.puts] == [2, 5, 2]
    assert [how["shared"] for _, how in store.puts] == [0, 0, 0]


@pytest.mark.parametrize("said", [{"prepared": True}, {"loaded": "no"}, None, "loaded"])
def test_a_server_that_does_not_say_is_asked_for_no_more(server, make, caplog, said):
    server.served_routes = said
    engine = make(RecordingStore())

    for _ in range(2):
        run(engine.generate([3, 4, 5], P(max_tokens=2)))

    assert starts_of(server) == [2, 2]
    assert caplog.text.count("does not report whether it has a KV connector") == 1


def test_a_server_that_is_busy_is_asked_again(server, make):
    engine = make(RecordingStore(), vocab_size=64)
    server.faults["/collective_rpc"] = [(503, "paused")]

    for _ in range(2):
        run(engine.generate([3, 4, 5], P(max_tokens=2)))

    assert starts_of(server) == [2, 0]


class Silent(ScriptedVLLM):
    """Does not say what it loads until it may."""

    def __init__(self):
        super().__init__()
        self.routes = numbered_routes
        self.asked = 0
        self.may_say = threading.Event()

    async def _update(self, method, path, query, body):
        if body and body.get("method") == "served_routes":
            self.asked += 1
            while not self.may_say.is_set():
                await asyncio.sleep(0.005)
        return await super()._update(method, path, query, body)


def test_a_server_that_does_not_answer_is_not_asked_before_each_request(monkeypatch):
    monkeypatch.setattr(client_routes, "ASK_S", 0.2)
    with Silent() as server, serving.VLLMEngine(server.url, routes=RecordingStore()) as engine:
        engine.adopt(3)
        for _ in range(3):
            run(engine.generate([3, 4, 5], P(max_tokens=2)))
        assert server.asked == 1
        assert starts_of(server) == [2, 2, 2]
        server.may_say.set()


def test_a_server_that_does_not_answer_holds_up_no_other(server):
    with (
        Silent() as silent,
        serving.VLLMEngine([silent.url, server.url], routes=RecordingStore()) as engine,
        ThreadPoolExecutor(24) as pool,
    ):
        engine.adopt(3)
        asked = [
            pool.submit(run, engine.generate([3, 4], P(max_tokens=2), session=f"session {number}"))
            for number in range(24)  # which are divided among the servers
        ]
        until(lambda: silent.asked and server.bodies)
        assert not silent.bodies
        silent.may_say.set()
        assert all(one.result(30) for one in asked)


def test_greedy_completions_are_checked_and_not_stored(server, make):
    store = RecordingStore()
    engine = make(store)

    assert run(engine.generate([3, 4, 5], P(max_tokens=2, temperature=0))).routes == ()
    assert store.puts == []
