"""The gateway, driven by the clients of OpenAI and Anthropic."""

import asyncio
import contextlib
import io
import json

import aiohttp
import hypothesis.strategies as st
import pytest
from api_clients import (
    CLIENTS,
    Chat,
    Continued,
    Messages,
    Responses,
    anthropic,
    connections,
    httpx,
    httpx2,
    openai,
)
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call, trained
from hypothesis import given, settings

from primerl import rollout
from primerl.rollout import AgentLimits
from primerl.rollout.gateways import server
from primerl.rollout.gateways.chat_completions import ChatCompletions
from primerl.rollout.gateways.server import APIS
from primerl.types import SamplingParams

TOKENIZER = chat_tokenizer()
PARAMS = SamplingParams(max_tokens=256)
WAIT_S = 60.0


@contextlib.asynccontextmanager
async def gateway_of(engine, **options):
    async with asyncio.timeout(WAIT_S):
        async with rollout.gateway(engine, TOKENIZER, params=PARAMS, **options) as gateway:
            async with connections():
                yield gateway


def run(scenario, engine, *, limits=None, **options):
    """Play ``scenario(session)`` at a gateway; returns the session and what it returned."""

    async def play():
        async with gateway_of(engine, **options) as gateway:
            async with gateway.open(limits=limits) as session:
                found = await scenario(session)
            return session, found

    return asyncio.run(play())


def script(prompt, number):
    return [
        f'Let me see: "ö" {"." * 40}{tool_call("look", at="döor", n=1)}{tool_call("look")}',
        "It is open.",
        "Bye \U0001f600",
    ][number % 3]


CALLS = [("look", {"at": "döor", "n": 1}), ("look", {})]


async def three_turns(chat):
    chat.say("Is the door open?")
    said = [await chat.reply()]
    for call in said[0][1]:
        chat.result(call, f"result of {call[1]}")
    said.append(await chat.reply())
    chat.say("Bye")
    said.append(await chat.reply())
    return [(text, [call[1:] for call in calls], reason) for text, calls, reason in said]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", [*CLIENTS, Continued], ids=lambda one: one.name)
def test_what_was_sampled_is_fed_back_token_for_token(client, stream):
    engine = RecordingEngine(TOKENIZER, script)

    session, said = run(lambda session: three_turns(client(session, stream=stream)), engine)

    assert said == [
        (f'Let me see: "ö" {"." * 40}', CALLS, "tool_calls"),
        ("It is open.", [], "stop"),
        ("Bye \U0001f600", [], "stop"),
    ]
    played = session.rollout(reward=1.0, keep_conversation=True)
    (sample,) = played.samples
    assert trained([sample]) == engine.sampled
    last, completion = engine.requests[-1]
    assert sample.token_ids.tolist() == [*last, *completion.token_ids]
    assert played.metrics["requests_answered"] == played.metrics["turns"] == 3
    roles = [message["role"] for message in played.conversation["messages"]]
    opening = ["system"] if client is Continued else []
    assert roles == [*opening, "user", "assistant", *["tool"] * 2, "assistant", "user", "assistant"]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_bytes_that_are_no_text_are_one_sample_too(client):
    engine = RecordingEngine(TOKENIZER)

    async def talk(session):
        chat = client(session)
        for turn in range(8):
            chat.say(f"Turn {turn}")
            await chat.reply()

    session, _ = run(talk, engine)
    assert trained(session.rollout(reward=0.0).samples) == engine.sampled
    assert session.history.origins == {"start": 1, "extends": 7}


def test_history_that_a_client_alters_is_a_counted_branch():
    engine = RecordingEngine(TOKENIZER, lambda _, number: f"Reply {number}.")

    async def talk(session):
        chat = Chat(session)
        for turn in range(3):
            chat.say(f"Turn {turn}")
            await chat.reply()
        chat.messages[1] = {"role": "assistant", "content": "Something else."}
        chat.say("And now?")
        await chat.reply()

    session, _ = run(talk, engine)
    played = session.rollout(reward=0.0)
    assert (played.metrics["edited"], len(played.samples)) == (1, 2)
    assert trained(played.samples) == engine.sampled


def test_agents_of_one_rollout_have_keys_and_conversations_of_their_own():
    engine = RecordingEngine(TOKENIZER, lambda _, number: f"Reply {number}.")

    async def talk(session):
        both = Chat(session), Messages(session, key=session.key_for("reviewer"))
        for chat in both * 2:
            chat.say("Hello")
            await chat.reply()

    session, _ = run(talk, engine)
    played = session.rollout(reward=0.0)
    assert (played.metrics["agents"], len(played.samples)) == (2, 2)
    reviewer = session.rollout(reward=0.0, agents=["reviewer"])
    assert len(reviewer.samples) == 1
    assert reviewer.samples[0].versions.max() == 4


async def refused(chat, **options):
    """The error that a client raises: its status, and what it says."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        await chat.reply(**options)
    error = caught.value
    body = error.body.get("error", error.body)
    return error.status_code, body["type"], f"{body.get('code')} {body['message']}"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_wrong_key_is_refused(client):
    engine = RecordingEngine(TOKENIZER)

    async def talk(session):
        answers = []
        for key in ("wrong", f"{session.name}.wrong", f"{session.name}.", session.key[:-1]):
            chat = client(session, key=key)
            chat.say("Hello")
            answers.append(await refused(chat))
        return answers

    _, answers = run(talk, engine)
    assert {(status, kind) for status, kind, _ in answers} == {(401, "authentication_error")}
    assert engine.requests == []


LIMITS = {
    "max_turns": AgentLimits(max_turns=2),
    "max_tokens": AgentLimits(max_tokens=24),
    "timeout": AgentLimits(timeout_s=3.0),
}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
@pytest.mark.parametrize("reason", LIMITS)
def test_limits_are_answered_as_the_api_answers_errors(client, reason):
    async def pause(number):
        if reason == "timeout" and number == 2:
            await asyncio.sleep(WAIT_S)

    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello there.", pause=pause)

    async def talk(session):
        chat = client(session)
        for _ in range(2):
            chat.say("Hello")
            await chat.reply()
        chat.say("Hello")
        return await refused(chat)

    session, (status, kind, said) = run(talk, engine, limits=LIMITS[reason])
    assert (status, kind) == (400, "invalid_request_error")
    assert reason in said
    played = session.rollout(reward=0.0)
    assert (played.stop, played.metrics["requests_limited"]) == (reason, 1)
    assert trained(played.samples) == engine.sampled


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_full_context_and_an_engine_that_fails_are_errors_of_the_api(client):
    async def fail(number):
        raise ConnectionError("the engine is gone")

    engine = RecordingEngine(TOKENIZER, pause=fail)

    async def talk(session):
        chat = client(session)
        chat.say("Hello")
        failed = await refused(chat)
        with pytest.raises(ConnectionError):
            session.rollout(reward=0.0)
        engine.context_length = 10
        return failed, await refused(chat)

    session, (failed, full) = run(talk, engine)
    assert failed[0] == 500
    assert "the engine is gone" in failed[2]
    assert full[0] == 400
    assert "context_length_exceeded" in full[2]
    assert session.outcomes["failed"] == session.outcomes["context"] == 1
    assert session.stop == "context"


def test_what_a_reply_can_not_have_is_refused():
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.")

    async def talk(session):
        chat, other, third = Chat(session), Messages(session), Responses(session)
        for one in (chat, other, third):
            one.say("Hello")
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        return [
            await refused(chat, n=2),
            await refused(chat, logit_bias={"3": -100}),
            await refused(chat, messages=[image]),
            await refused(chat, tool_choice="required"),
            await refused(other, tool_choice={"type": "any"}),
            await refused(third, previous_response_id="resp_0"),
        ]

    session, answers = run(talk, engine)
    assert {answer[0] for answer in answers} == {400}
    named = ["n=2", "logit_bias=", "'image_url'", "tool_choice=", "tool_choice=", "not a response"]
    assert all(part in answer[2] for part, answer in zip(named, answers, strict=True))
    assert session.outcomes["refused"] == 6
    assert engine.requests == []


@contextlib.asynccontextmanager
async def asked(session, body, path="/chat/completions", **options):
    headers = {"Authorization": f"Bearer {session.key}"}
    async with aiohttp.ClientSession() as http:
        url = f"{session.base_url}{path}"
        async with http.post(url, data=body, headers=headers, **options) as answer:
            yield answer


async def post(session, body, path="/chat/completions"):
    async with asked(session, body, path) as answer:
        return answer.status, await answer.json()


HOSTILE = {
    "no JSON": b"{",
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "deep": b"[" * 200_000,
    "no object": b"[]",
    "no messages": b"{}",
    "no role": b'{"messages": [{"content": "a"}], "input": [{"type": "x"}]}',
    "a number": b'{"messages": [{"role": "user", "content": 3}], "input": [{"content": 3}]}',
}
PATHS = ["/chat/completions", "/responses", "/messages"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_is_no_request_is_refused(name, path):
    session, (status, answer) = run(
        lambda session: post(session, HOSTILE[name], path), RecordingEngine(TOKENIZER)
    )
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert session.outcomes["refused"] == 1


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
    },
}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_odd_numbers_images_and_unknown_fields(client):
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello." * 100)
    limit = "max_output_tokens" if client is Responses else "max_tokens"

    async def talk(session):
        chat = client(session)
        chat.say("Hello")
        first = list(chat.messages)
        answers = [await refused(chat, extra_body={limit: n}) for n in (-1, 0, True, 1.5, "9")]
        chat.messages = [{"role": "user", "content": [IMAGES[client.name]]}]
        answers.append(await refused(chat))
        chat.messages = first
        answers.append(await refused(chat, extra_body={"unheard_of": {"a": [1]}}))
        whole = await chat.reply(extra_body={limit: 10**30, "known": {"a": [1]}, "seed": 3})
        return answers, whole

    session, (answers, whole) = run(talk, engine, ignore_fields=["known"])

    assert {answer[0] for answer in answers} == {400}
    assert all("positive whole number" in answer[2] for answer in answers[:-2])
    assert "only text is supported" in answers[-2][2]
    assert "ignore_fields=['unheard_of']" in answers[-1][2]
    assert whole[2] == "length"
    assert session.outcomes["refused"] == 7
    assert len(engine.requests[0][1].token_ids) == PARAMS.max_tokens


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_one_request_twice_at_once_is_a_fork(client):
    engine = RecordingEngine(TOKENIZER, lambda _, number: f"Reply {number}.")

    async def talk(session):
        opening = client(session)
        opening.say("Hello")
        await opening.reply()
        opening.say("Again")
        twins = [client(session), client(session, stream=True)]
        for one in twins:
            one.messages = list(opening.messages)
        return await asyncio.gather(*(one.reply() for one in twins))

    session, said = run(talk, engine)

    assert sorted(text for text, _, _ in said) == ["Reply 1.", "Reply 2."]
    played = session.rollout(reward=0.0)
    assert trained(played.samples) == engine.sampled
    assert (played.metrics["forks"], played.metrics["resent"], len(played.samples)) == (1, 1, 2)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_malformed_call_is_text_for_the_agent_and_counted(client):
    bad = '<tool_call>{"name": "look", "arguments": {]</tool_call>'
    engine = RecordingEngine(TOKENIZER, lambda _, number: ["Hm. " + bad, "Sorry."][number])

    async def talk(session):
        chat = client(session)
        chat.say("Is the door open?")
        said = await chat.reply()
        chat.say("error: the call is not JSON")
        return said, await chat.reply()

    session, (said, _) = run(talk, engine)

    assert said == (f"Hm. {bad}", [], "stop")
    played = session.rollout(reward=0.0)
    assert (played.metrics["malformed_calls"], len(played.samples)) == (1, 1)
    assert trained(played.samples) == engine.sampled


def test_a_conversation_that_the_template_refuses_is_the_clients_error():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    engine = RecordingEngine(tokenizer)

    async def play():
        async with rollout.gateway(engine, tokenizer, params=PARAMS) as gateway, connections():
            async with gateway.open() as session:
                chat = Chat(session)
                chat.say("Hello")
                answer = await refused(chat)
            return session, answer

    session, (status, _, said) = asyncio.run(play())
    assert status == 400
    assert "roles must alternate" in said
    assert session.outcomes["refused"] == 1
    assert session.rollout(reward=0.0).samples == ()


def test_half_a_surrogate_anywhere_is_no_failure_of_the_engine():
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.")
    half = "a \ud800 b"
    function = {"name": half, "description": half, "parameters": {"properties": {half: {}}}}
    call = {"id": half, "type": "function", "function": {"name": half, "arguments": half}}
    messages = [
        {"role": "system", "content": half},
        {"role": "user", "content": [{"type": "text", "text": half}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": half, "content": half},
    ]
    tools = [{"type": "function", "function": function}]

    session, (status, _) = run(
        lambda session: post(session, json.dumps({"messages": messages, "tools": tools}).encode()),
        engine,
    )

    assert status in (200, 400)
    assert session.error is None
    assert trained(session.rollout(reward=0.0).samples) == engine.sampled


def test_a_hundred_megabytes_are_refused_and_half_a_surrogate_is_not():
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.")
    half = b'{"messages": [{"role": "user", "content": "a \\ud800 b"}]}'

    async def talk(session):
        with contextlib.suppress(aiohttp.ClientError):  # it may hang up while it is sent
            assert (await post(session, io.BytesIO(b"x" * 100_000_000)))[0] == 413
        return await post(session, half)

    session, (status, _) = run(talk, engine)
    assert status == 200
    assert "a ? b" in TOKENIZER.decode(engine.requests[0][0])
    assert session.outcomes["refused"] == 1


def test_a_client_that_leaves_while_it_waits_cancels_its_request():
    async def pause(number):
        if number == 0:
            await asyncio.sleep(WAIT_S)

    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.", pause=pause)

    async def talk(session):
        chat = Chat(session)
        chat.say("Hello")
        with pytest.raises(openai.APITimeoutError):
            await chat.reply(timeout=0.3)
        while not session.outcomes["disconnected"]:
            await asyncio.sleep(0.01)
        engine._pause = None
        return await chat.reply()

    session, (text, _, _) = run(talk, engine)
    assert text == "Hello."
    assert len(session.rollout(reward=0.0).samples) == 1
    assert (session.outcomes["disconnected"], session.outcomes["answered"]) == (1, 1)


def hang_up_once(monkeypatch, kind=ChatCompletions):
    """The next stream breaks off as it does when the client has left."""
    events = kind.events
    broken = iter([True])

    def some(api, answer, request):
        for event in events(api, answer, request):
            yield event
            if next(broken, False):
                raise ConnectionResetError("the client has left")

    monkeypatch.setattr(kind, "events", some)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_stream_that_takes_long_is_the_same_for_clients(client, monkeypatch):
    monkeypatch.setattr(server, "PING_S", 0.02)
    engine = RecordingEngine(TOKENIZER, script, pause=lambda _: asyncio.sleep(0.1))

    session, said = run(lambda session: three_turns(client(session, stream=True)), engine)

    assert said[0][1] == CALLS
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled
    assert session.outcomes["answered"] == 3


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_an_engine_that_fails_late_ends_the_stream_with_an_error(client, monkeypatch):
    monkeypatch.setattr(server, "PING_S", 0.02)

    async def fail(number):
        await asyncio.sleep(0.2)
        raise ConnectionError("the engine is gone")

    async def talk(session):
        chat = client(session, stream=True)
        chat.say("Hello")
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine is gone"):
            await chat.reply()

    session, _ = run(talk, RecordingEngine(TOKENIZER, pause=fail))
    assert session.outcomes["failed"] == 1


HELLO = [{"role": "user", "content": "Hello"}]
WAITING = {
    "/chat/completions": ({"messages": HELLO}, b"data: {"),
    "/responses": ({"input": HELLO}, b"event: response.created\n"),
    "/messages": ({"messages": HELLO, "max_tokens": 9}, b"event: ping\n"),
}


@pytest.mark.parametrize("path", WAITING)
def test_a_client_that_leaves_a_stream_while_it_waits_cancels_its_request(path, monkeypatch):
    monkeypatch.setattr(server, "PING_S", 0.02)
    body, ping = WAITING[path]
    cancelled = []

    async def pause(number):
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def talk(session):
        streamed = json.dumps({**body, "stream": True}).encode()
        async with asked(session, streamed, path) as answer:
            assert (await answer.content.readline()).startswith(ping)
        while not session.outcomes["disconnected"]:
            await asyncio.sleep(0.01)

    session, _ = run(talk, RecordingEngine(TOKENIZER, pause=pause))
    assert cancelled == [0]
    assert session.history.calls == []


BROKEN_OFF = (openai.APIConnectionError, httpx.TransportError, httpx2.TransportError)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_reply_that_does_not_arrive_is_delivered_to_the_next_attempt(client, monkeypatch):
    engine = RecordingEngine(TOKENIZER, lambda _, number: f"Reply {number}.")
    kinds = {"chat": APIS[0], "responses": APIS[1], "messages": APIS[2]}

    async def talk(session):
        chat = client(session, stream=True)
        chat.say("Hello")
        first = list(chat.messages)
        hang_up_once(monkeypatch, type(kinds[client.name]))
        with pytest.raises(BROKEN_OFF):
            await chat.reply()
        retried = await chat.reply()
        chat.messages = first
        return retried, await chat.reply()

    session, (retried, again) = run(talk, engine)
    assert (retried[0], again[0]) == ("Reply 0.", "Reply 1.")
    outcomes = {name: count for name, count in session.outcomes.items() if count}
    assert outcomes == {"disconnected": 1, "redelivered": 1, "answered": 2}
    played = session.rollout(reward=0.0)
    assert trained(played.samples) == engine.sampled
    assert (played.metrics["resent"], played.metrics["forks"], len(played.samples)) == (1, 1, 2)


def test_a_reply_that_never_arrives_is_not_trained(monkeypatch):
    engine = RecordingEngine(TOKENIZER, lambda _, number: f"Reply {number}.")

    async def talk(session):
        chat = Chat(session, stream=True)
        chat.say("Hello")
        await chat.reply()
        chat.say("More")
        hang_up_once(monkeypatch)
        with pytest.raises(BROKEN_OFF):
            await chat.reply()

    session, _ = run(talk, engine)
    assert session.outcomes["undelivered"] == 1
    played = session.rollout(reward=0.0)
    assert (played.metrics["turns"], played.samples[0].versions.max()) == (1, 1)


def test_fifty_rollouts_at_once_are_kept_apart():
    engine = RecordingEngine(TOKENIZER)

    async def one(gateway, number):
        async with gateway.open() as session:
            chat = CLIENTS[number % 3](session, stream=number % 2 == 0)
            for turn in range(2):
                chat.say(f"Rollout {number}, turn {turn}")
                await chat.reply()
        return session.rollout(reward=number)

    async def play():
        async with gateway_of(engine) as gateway:
            return await asyncio.gather(*(one(gateway, number) for number in range(50)))

    played = asyncio.run(play())
    assert [len(one.samples) for one in played] == [1] * 50
    for number, one in enumerate(played):
        text = TOKENIZER.decode(one.samples[0].token_ids)
        assert text.count(f"Rollout {number}, turn") == text.count("Rollout") == 2
    assert trained([sample for one in played for sample in one.samples]) == engine.sampled


def test_a_key_is_worth_nothing_when_its_rollout_is_over():
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.")

    async def play():
        async with gateway_of(engine) as gateway:
            async with gateway.open() as session:
                models = await Chat(session).client.models.list()
                counted = await Messages(session).client.messages.count_tokens(
                    model="policy", messages=[{"role": "user", "content": "Hello"}]
                )
            chat = Chat(session)
            chat.say("Hello")
            return [one.id for one in models.data], counted.input_tokens, await refused(chat)

    models, counted, answer = asyncio.run(play())
    assert models == ["policy"]
    assert counted > 5
    assert answer[0] == 401


FIELDS = ["role", "content", "type", "text", "messages", "input", "tools", "function", "name"]
FIELDS += ["tool_calls", "id", "system", "arguments", "output", "thinking", "summary", "format"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner
            | st.sampled_from(["user", "assistant", "tool", "function", "tool_use", "message"]),
            max_size=5,
        )
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("api", APIS, ids=lambda api: type(api).__name__)
@settings(max_examples=40, deadline=None)
@given(body=st.dictionaries(st.sampled_from(["messages", "input", "tools", "system"]), JSON))
def test_any_json_is_a_request_or_is_refused_with_a_reason(api, body):
    with contextlib.suppress(ValueError):
        assert api.parse(body, {}).messages
