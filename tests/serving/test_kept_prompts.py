"""Turns of a conversation that send only new tokens, and every way in which a server lost the rest.

The token that a scripted server samples first depends on the sum of the whole prompt, and the
client checks the length that the server reports, so each completion proves which prompt it had.
"""

import asyncio
import json

import numpy as np
import pytest
from scripted_vllm import DROP, ScriptedVLLM

from primerl import rollout, serving, testing
from primerl.rollout.conversations.history import History
from primerl.rollout.renderers.template import TemplateRenderer
from primerl.serving.client import session_prompts
from primerl.serving.client.session_prompts import SessionPrompts
from primerl.serving.protocol.kept_prompts import ADDED, HEADER, TOKENS
from primerl.serving.server import kept_prompts
from primerl.serving.server.kept_prompts import KeepPrompts, PromptTexts
from primerl.types import SamplingParams

GREEDY = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture
def server():
    with ScriptedVLLM(keeps_prompts=True, context=8192) as one:
        yield one


@pytest.fixture
def engine(server):
    with serving.VLLMEngine(server.url, run="abc", down_timeout_s=5.0) as one:
        one.adopt(0)
        yield one


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def sample(engine, prompt, session="one", params=GREEDY):
    """Sample; the tokens show that the server had the whole prompt."""
    answer = await engine.generate(prompt, params, session=session)
    first = sum(prompt) % 64
    assert answer.token_ids.tolist() == [first, (first + 1) % 64]
    return answer.token_ids.tolist()


def added(server):
    """Return what each request sent: the added tokens, or None for a whole prompt."""
    return [json.loads(content).get(ADDED) for _, content in server.sent]


# ---- turns ----


def test_a_turn_sends_what_is_new(server, engine):
    async def play():
        prompt = list(range(50)) * 20
        for turn in range(4):
            prompt += await sample(engine, prompt) + [turn, 5]

    run(play())
    whole, *turns = (len(content) for _, content in server.sent)
    assert whole > 3000
    assert max(turns) < 400
    assert [None if one is None else len(one) for one in added(server)] == [None, 4, 4, 4]
    assert [len(body[TOKENS]) for body in server.bodies] == [1000, 1004, 1008, 1012]
    assert [ADDED in body for body in server.bodies] == [False] * 4


def test_requests_without_a_session_are_whole(server, engine):
    run(sample(engine, [1, 2, 3], session=None))
    run(sample(engine, [1, 2, 3, 4], session=None))
    assert added(server) == [None, None]
    assert not any(HEADER.lower() in headers for headers, _ in server.sent)


def test_the_same_prompt_again_adds_nothing(server, engine):
    run(sample(engine, [1, 2, 3]))
    run(sample(engine, [1, 2, 3]))
    assert added(server) == [None, []]


def test_a_prompt_that_continues_no_other_is_whole(server, engine):
    for prompt in ([1, 2, 3], [1, 2, 4, 5], [1, 2], [9]):
        run(sample(engine, prompt))
    assert added(server) == [None] * 4
    run(sample(engine, [1, 2, 4, 5, 6]))  # the longest that it continues, not the latest
    assert added(server)[-1] == [6]


def test_conversations_of_a_session_are_continued_side_by_side(server, engine):
    async def play():
        for turn in range(3):
            await asyncio.gather(
                sample(engine, [1, *range(10, 12 + turn)]), sample(engine, [2, *range(11 + turn)])
            )

    run(play())
    assert added(server).count(None) == 2
    assert sorted(one for one in added(server) if one) == [[11], [12], [12], [13]]


def test_two_requests_that_continue_one_prompt_at_once(server, engine):
    async def play():
        await sample(engine, [1, 2, 3])
        await asyncio.gather(*(sample(engine, [1, 2, 3, turn]) for turn in range(4, 8)))

    run(play())
    assert added(server).count(None) == 4  # the first one, and three of the four
    assert len(server.sent) == 5


def test_agents_send_what_is_new(server, engine):
    """Through History, with a cancelled turn and a fork."""
    tokenizer = testing.character_tokenizer("ab")
    renderer = TemplateRenderer(tokenizer)
    history = History(engine, renderer, GREEDY, session="agent")

    async def play():
        messages = [{"role": "user", "content": "ab" * 300}]
        for _ in range(4):
            reply = await history.reply(messages)
            messages += [reply.message, {"role": "user", "content": "b"}]
        server.hold = lambda tokens: True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(history.reply(messages), 0.2)
        server.hold = lambda tokens: False
        await history.reply(messages)
        await history.reply([*messages[:-1], {"role": "user", "content": "a"}])

    run(play())
    sizes = [len(content) for _, content in server.sent]
    assert max(sizes[1:4]) < 500 < sizes[0]
    assert history.origins == {"start": 1, "extends": 4, "fork": 1}
    for call, body in zip(history.calls[:4], server.bodies, strict=False):
        assert call.prompt_ids.tolist() == body[TOKENS]
    assert history.calls[4].prompt_ids.tolist() == server.bodies[5][TOKENS]


# ---- servers that lost a prompt ----


def test_a_server_that_was_restarted_gets_the_whole_prompt(server, engine):
    run(sample(engine, [1, 2, 3]))
    server.restart()
    engine.adopt(0)
    run(sample(engine, [1, 2, 3, 4]))
    run(sample(engine, [1, 2, 3, 4, 5]))
    assert added(server) == [None, [4], None, [5]]
    assert len(server.bodies) == 3  # the second never reached the engine


def test_a_server_that_dropped_the_prompt_gets_all_of_it(server, engine, monkeypatch):
    run(sample(engine, [1, 2, 3], session="one"))
    monkeypatch.setattr(server._keeper, "_texts", PromptTexts())
    run(sample(engine, [1, 2, 3, 4], session="one"))
    assert added(server) == [None, [4], None]


def test_a_server_that_holds_another_prompt_gets_the_whole(server, engine):
    run(sample(engine, [1, 2, 3]))
    ((name, text),) = server._keeper._texts._texts.items()
    text[:1] = b"7"
    run(sample(engine, [1, 2, 3, 4]))
    assert added(server) == [None, [4], None]
    assert bytes(server._keeper._texts._texts[name]) == b"1,2,3,4"


def test_a_server_that_stops_keeping_prompts_gets_the_whole(server, engine):
    """For example, a plain vLLM is started at the same address, or stands behind a router."""
    run(sample(engine, [1, 2, 3]))
    server._keeper = None
    run(sample(engine, [1, 2, 3, 4]))
    run(sample(engine, [1, 2, 3, 4, 5]))
    assert added(server) == [None, [4], None, None]


def test_a_plain_server_is_sent_whole_prompts():
    with (
        ScriptedVLLM() as server,
        serving.VLLMEngine(server.url, down_timeout_s=5.0) as engine,
    ):
        engine.adopt(0)
        run(sample(engine, [1, 2, 3]))
        run(sample(engine, [1, 2, 3, 4]))
        assert added(server) == [None, None]


@pytest.mark.parametrize("fault", [(500, "x"), (503, "busy"), DROP])
def test_a_retry_sends_the_whole_prompt(server, engine, fault):
    run(sample(engine, [1, 2, 3]))
    server.faults["/inference/v1/generate"] = [fault]
    run(sample(engine, [1, 2, 3, 4]))
    run(sample(engine, [1, 2, 3, 4, 5]))
    assert added(server) == [None, None, [5]]  # a faulty attempt is not recorded


def test_another_server_gets_the_whole_prompt():
    with (
        ScriptedVLLM(keeps_prompts=True) as first,
        ScriptedVLLM(keeps_prompts=True) as second,
        serving.VLLMEngine([first.url, second.url], down_timeout_s=5.0) as engine,
    ):
        engine.adopt(0)
        run(sample(engine, [1, 2, 3]))
        home, other = (first, second) if first.sent else (second, first)
        home.kill()
        run(sample(engine, [1, 2, 3, 4]))
        run(sample(engine, [1, 2, 3, 4, 5]))
        assert added(home) == [None]
        assert added(other) == [None, [5]]


def test_a_cancelled_request_is_sent_whole_afterwards(server, engine):
    async def play():
        await sample(engine, [1, 2, 3])
        server.hold = lambda tokens: True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sample(engine, [1, 2, 3, 4]), 0.2)
        server.hold = lambda tokens: False
        await sample(engine, [1, 2, 3, 4, 5])

    run(play())
    assert added(server) == [None, [4], None]


def test_a_refusal_of_an_added_token_is_raised(server, engine):
    run(sample(engine, [1, 2, 3]))
    with pytest.raises(ValueError, match="out of vocabulary"):
        run(engine.generate([1, 2, 3, 99], GREEDY, session="one"))
    run(sample(engine, [1, 2, 3, 5]))


def test_copies_of_an_engine_have_prompts_of_their_own(server, engine):
    import pickle

    run(sample(engine, [1, 2, 3]))
    with pickle.loads(pickle.dumps(engine)) as copy:
        run(sample(copy, [1, 2, 3, 4]))
    run(sample(engine, [1, 2, 3, 4]))
    assert added(server) == [None, None, [4]]


# ---- bounds ----


def test_a_server_drops_the_least_recently_used_prompts():
    texts = PromptTexts(most_bytes=10)
    texts.put("a", b"1,2")
    texts.put("b", b"3,4")
    digest = kept_prompts.digest_of(b"1,2")
    assert texts.extend("a", digest, b"5") == b"1,2,5"
    texts.put("c", b"6,7")
    assert texts.extend("b", kept_prompts.digest_of(b"3,4"), b"") is None
    assert texts.size == 8
    texts.put("d", b"1" * 11)
    assert texts.size == 0


def test_a_client_drops_the_prompts_of_the_least_recent_sessions(monkeypatch):
    monkeypatch.setattr(session_prompts, "KNOWN_BYTES", 3000)
    prompts = SessionPrompts()
    for session in "abcab":
        with prompts.sent(session, np.arange(5, dtype=np.int32)) as sent:
            sent.confirm("url")
    assert list(prompts._known) == ["a", "b"]
    assert prompts.size == sum(one.size for known in prompts._known.values() for one in known)


def test_a_client_knows_a_few_prompts_of_a_session():
    prompts = SessionPrompts()
    for token in range(20):
        with prompts.sent("a", np.array([token], np.int32)):
            pass
    assert [one.text for one in prompts._known["a"]] == [b"%d" % n for n in range(12, 20)]
    assert prompts.size == sum(one.size for one in prompts._known["a"])


# ---- the middleware with requests that no client of ours sends ----


@pytest.mark.parametrize(
    ("header", "body", "passed"),
    [
        (b"name", b"{", b"{"),
        (b"name", b'{"token_ids":5}', b'{"token_ids":5}'),
        (b"name", b"[" * 20_000, b"[" * 20_000),
        (b"name digest", b'{"added_token_ids":[1]}', None),
        (b"name", b'{"added_token_ids":5}', None),
        (b"x" * 100, b'{"token_ids":[1]}', b'{"token_ids":[1]}'),
        (b"", b'{"token_ids":[1]}', b'{"token_ids":[1]}'),
    ],
)
def test_odd_requests(header, body, passed):
    received, sent = [], []

    async def application(scope, receive, send):
        received.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "path": "/inference/v1/generate",
        "headers": [(HEADER.encode(), header)],
    }
    asyncio.run(KeepPrompts(application)(scope, receive, send))
    assert received == ([] if passed is None else [passed])
    assert sent[0]["status"] == (409 if passed is None else 200)
    assert sent[0]["headers"][-1:] != [(HEADER.lower().encode(), b"kept")]


def test_bodies_in_pieces_and_other_routes():
    received = []

    async def application(scope, receive, send):
        if scope["type"] == "http":
            received.append((await receive())["body"])

    pieces = [b'{"token_ids"', b":[1]}"]
    waiting = [
        {"type": "http.request", "body": piece, "more_body": piece == pieces[0]} for piece in pieces
    ]

    async def receive():
        return waiting.pop(0)

    app = KeepPrompts(application)
    headers = [(HEADER.lower().encode(), b"name")]
    generate = {"type": "http", "path": "/inference/v1/generate", "headers": headers}
    asyncio.run(app(generate, receive, None))
    waiting.append({"type": "http.disconnect"})
    asyncio.run(app(generate, receive, None))
    asyncio.run(app({"type": "lifespan"}, receive, None))
    assert received == [b'{"token_ids":[1]}']


def test_a_worker_with_long_conversations(server):
    """The whole path: worker, environment, conversations, engine."""
    tokenizer = testing.character_tokenizer("ab")

    async def environment(task, engine, params):
        chat = rollout.Conversation(engine, tokenizer, params, session=task["id"])
        for _ in range(3):
            await chat.turn("ab" * 100)
        return chat.rollout(reward=1.0)

    with serving.VLLMEngine(server.url, down_timeout_s=5.0) as engine:
        engine.adopt(0)
        with rollout.worker(
            engine,
            environment,
            [{"id": "a"}, {"id": "b"}],
            params=SamplingParams(max_tokens=2),
            group_size=1,
            groups_per_step=2,
            max_staleness=0,
            isolation="thread",
        ) as rollouts:
            groups = rollouts.take(version=0)
    assert len(groups) == 2
    sent = [one for one in added(server) if one is not None]
    assert len(sent) >= 4
    prompts = [body[TOKENS] for body in server.bodies]
    for group in groups:
        tokens = group.rollouts[0].samples[0].token_ids.tolist()
        assert any(tokens[: len(prompt)] == prompt for prompt in prompts if len(prompt) > 600)
