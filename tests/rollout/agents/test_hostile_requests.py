"""Requests and clients that behave in odd ways: each found a fault once."""

import asyncio
import contextlib
import json

import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call, trained
from gateway_posts import (
    BODIES,
    HELLO,
    TOKENIZER,
    answered,
    opened,
    played,
    script,
    unread_socket,
    until,
)
from toy_families import toy_renderer

from primerl.rollout import AgentLimits
from primerl.types import Completion

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"


def messages(*said, **more):
    return {"messages": list(said), "max_tokens": 99} | more


def result(**fields):
    return {"role": "tool", "content": "x", **fields}


REFUSED = [
    (CHAT, messages(*HELLO, result(tool_call_id={}))),
    (CHAT, messages(*HELLO, result(tool_call_id=[]))),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": [], "output": "x"}]}),
    (
        MESSAGES,
        messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": {}}]}),
    ),
    (CHAT, messages({"role": "user", "content": [{"type": {}, "text": "x"}]})),
    (MESSAGES, messages(*HELLO, system=[{"type": [], "text": "x"}])),
    (RESPONSES, {"input": "x", "include": 5}),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": True}]}),
    (MESSAGES, messages(*HELLO, context_management=[1])),
    (CHAT, messages(*HELLO, parallel_tool_calls=0)),
    (CHAT, messages(*HELLO, stream="false")),
    (CHAT, messages(*HELLO, {"role": "assistant", "content": "x", "prefix": "false"})),
    (MESSAGES, messages(*HELLO, tool_choice={"type": "auto", "disable_parallel_tool_use": "yes"})),
    (CHAT, messages(*HELLO, tools=[{"type": []}])),
    (
        RESPONSES,
        {"input": "x", "tools": [{"type": kind, "name": "a"} for kind in ("function", "custom")]},
    ),
    (CHAT, messages(*HELLO, stop=["x"] * 100)),
]


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=str)
def test_values_of_another_type_are_refused_and_harm_no_rollout(path, body):
    async def talk(posts):
        refused = await posts.post(path, body)
        return refused, await posts.post(CHAT, messages(*HELLO))

    session, engine, ((status, answer), (after, _)) = played(talk, lambda *_: "Hello.")
    assert (status, after) == (400, 200), answer
    assert isinstance(answer["error"]["message"], str)
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


@pytest.mark.parametrize("value", [b"1e400", b"NaN", b"[" * 980 + b"]" * 980])
def test_numbers_and_depths_that_json_does_not_have_are_refused(value):
    async def talk(posts):
        return await posts.raw(RESPONSES, b'{"input": "x", "prompt": ' + value + b"}")

    _, _, (status, answer) = played(talk, lambda *_: "Hello.")
    assert status == 400
    assert "error" in json.loads(answer)


def test_the_smaller_of_two_limits_counts():
    async def talk(posts):
        return await posts.post(CHAT, {**messages(*HELLO), "max_completion_tokens": 60})

    body = {"messages": HELLO, "max_completion_tokens": 60, "max_tokens": 2}

    async def talk_less(posts):
        return await posts.post(CHAT, body)

    for scenario, expected in ((talk, 60), (talk_less, 2)):
        _, engine, _ = played(scenario, lambda *_: "Hello. " * 40)
        assert len(engine.requests[0][1].token_ids) == expected


def test_an_earlier_response_keeps_the_system_messages_of_its_input():
    async def talk(posts):
        rules = {"role": "developer", "content": "RULES"}
        _, first = await posts.post(RESPONSES, {"input": [rules, *HELLO]})
        following = {"input": "two", "previous_response_id": first["id"]}
        await posts.post(RESPONSES, following)

    session, engine, _ = played(talk, script)
    assert "RULES" in TOKENIZER.decode(engine.requests[1][0])
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled


# ---- connections ----


async def reply_to(posts, path, body, *, head):
    """Send a request with a header; return the reader and the writer."""
    host, port = posts.session.anthropic_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
    content = json.dumps(body).encode()
    lines = [
        f"POST /v1{path} HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {posts.session.key}",
        f"Content-Length: {len(content)}",
        *head,
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("read", [0, 100, 10**6])
def test_clients_that_want_the_connection_closed_are_watched_too(read):
    async def talk(posts):
        connection = await unread_socket(posts, CHAT, BODIES[CHAT], head="Connection: close\r\n")
        if read:
            await asyncio.to_thread(connection.recv, read)
        connection.close()
        await asyncio.sleep(0.1)

    session, engine, _ = played(talk, script)
    samples = session.rollout(reward=1.0).samples
    if read > 100:
        assert trained(samples) == engine.sampled
    else:
        assert samples == ()


def test_a_client_that_ends_its_requests_and_then_leaves_has_not_read():
    async def talk(posts):
        connection = await unread_socket(posts, CHAT, BODIES[CHAT])
        connection.shutdown(1)
        await asyncio.sleep(0.05)
        connection.close()
        await until(lambda: posts.session.outcomes["disconnected"])

    session, _, _ = played(talk, script)
    assert session.rollout(reward=1.0).samples == ()


def test_none_of_two_pipelined_replies_was_read():
    async def talk(posts):
        connection = await unread_socket(posts, CHAT, BODIES[CHAT])
        content = json.dumps(messages({"role": "user", "content": "Two"})).encode()
        head = (
            f"POST /v1{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {posts.session.key}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        request = head.encode() + content
        connection.sendall(request + request)
        await answered(posts, 3)
        connection.close()
        await until(lambda: posts.session.outcomes["disconnected"] == 2)

    session, engine, _ = played(talk, script)
    assert len(engine.requests) == 3
    (sample,) = session.rollout(reward=1.0).samples
    assert sample.versions.max() == 1  # another request came after the first reply


# ---- equal requests ----


class Stubborn(RecordingEngine):
    """Takes time to end, or ends with a reply, when it is cancelled."""

    def __init__(self, *, replies):
        super().__init__(TOKENIZER, script)
        self._replies = replies
        self._first = True

    async def generate(self, prompt_ids, params, *, session=None):
        if self._first:
            self._first = False
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await asyncio.sleep(0.3)
                if not self._replies:
                    raise
        return await super().generate(prompt_ids, params, session=session)


@pytest.mark.parametrize("replies", [False, True])
def test_a_retry_while_the_first_attempt_is_being_cancelled_gets_a_reply(replies):
    engine = Stubborn(replies=replies)

    async def main():
        async with opened(engine) as posts:
            content = json.dumps(messages(*HELLO)).encode()
            first = asyncio.create_task(posts.raw(CHAT, content))
            await asyncio.sleep(0.1)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            await asyncio.sleep(0.05)
            status, _ = await posts.raw(CHAT, content)
            await asyncio.sleep(0.5)
        return posts.session, status

    session, status = asyncio.run(main())
    assert status == 200
    samples = session.rollout(reward=1.0).samples
    assert len(samples) == 1
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == len(
        engine.requests[0][1].token_ids
    )


def test_a_reply_that_one_client_loses_and_another_reads_is_trained():
    async def talk(posts):
        body = {**messages(*HELLO), "stream": True}
        connection = asyncio.create_task(unread_socket(posts, CHAT, body))
        reading = asyncio.create_task(posts.raw(CHAT, json.dumps(body).encode()))
        (await connection).close()
        await reading
        await until(lambda: posts.session.outcomes["disconnected"])

    session, engine, _ = played(talk, script, pause=lambda _: asyncio.sleep(0.2))
    assert len(engine.requests) == 1
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


def test_an_unread_reply_equal_to_an_earlier_one_is_not_trained():
    async def talk(posts):
        await posts.post(CHAT, messages(*HELLO))
        said = {"role": "assistant", "content": "Same."}
        await posts.post(CHAT, messages(*HELLO, said, {"role": "user", "content": "More"}))
        connection = await unread_socket(posts, CHAT, messages(*HELLO, max_tokens=98))
        await answered(posts, 3)
        connection.close()
        await until(lambda: posts.session.outcomes["disconnected"])

    session, engine, _ = played(talk, lambda *_: "Same.")
    samples = session.rollout(reward=1.0).samples
    assert len(engine.requests) == 3
    assert {version for sample in samples for version in sample.versions if version > 0} == {1, 2}


def test_the_same_body_for_two_apis_is_two_requests():
    async def talk(posts):
        begun = {"role": "assistant", "content": "It"}
        content = json.dumps(messages(*HELLO, begun)).encode()
        return await asyncio.gather(posts.raw(CHAT, content), posts.raw(MESSAGES, content))

    _, engine, answers = played(talk, script, pause=lambda _: asyncio.sleep(0.2))
    assert [status for status, _ in answers] == [200, 200]
    assert len(engine.requests) == 2


def test_a_request_whose_body_comes_after_the_rollout_is_not_sampled():
    engine = RecordingEngine(TOKENIZER, script)

    async def main():
        async with opened(engine) as posts:
            content = json.dumps(messages(*HELLO)).encode()
            half = len(content) // 2
            reader, writer = await reply_to(posts, CHAT, {}, head=[])
            await reader.readuntil(b"}}")
            head = (
                f"POST /v1{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
                f"Authorization: Bearer {posts.session.key}\r\n\r\n"
            )
            writer.write(head.encode() + content[:half])
            await writer.drain()
            await asyncio.sleep(0.05)
            await posts.session.close()
            writer.write(content[half:])
            answer = await reader.readuntil(b"\r\n")
            writer.close()
        return posts.session, answer

    session, answer = asyncio.run(main())
    assert b"400" in answer
    assert engine.requests == []
    assert session.history.calls == []


# ---- replies ----


class WithRoutes(RecordingEngine):
    routes = object()

    async def generate(self, prompt_ids, params, *, session=None):
        made = await super().generate(prompt_ids, params, session=session)
        return Completion(
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            versions=made.versions,
            finish_reason=made.finish_reason,
            routes=("reference",),
        )


@pytest.mark.parametrize("extra", [{"stop": "x"}, {"parallel_tool_calls": False}])
def test_replies_with_expert_routes_are_not_cut(extra):
    engine = WithRoutes(TOKENIZER, script)

    async def main():
        async with opened(engine) as posts:
            return await posts.post(CHAT, messages(*HELLO, tools=TOOLS, **extra))

    status, answer = asyncio.run(main())
    assert status == 400
    assert "expert routes" in answer["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ({"at": 30.0, "n": 1e21}, '{"at":30,"n":1e+21}'),
        ({"id": 12345678901234567890}, '{"id":12345678901234567000}'),
        ({"a": -0.0, "b": [1.5, 2.0]}, '{"b":[1.5,2],"a":0}'),
    ],
)
def test_numbers_that_javascript_writes_otherwise_are_the_same(given, returned):
    async def talk(posts):
        body = messages(*HELLO, tools=TOOLS)
        _, answer = await posts.post(CHAT, body)
        said = answer["choices"][0]["message"]
        said["tool_calls"][0]["function"]["arguments"] = returned
        body["messages"] += [said, result(tool_call_id=said["tool_calls"][0]["id"])]
        await posts.post(CHAT, body)

    session, engine, _ = played(
        talk, lambda _, number: tool_call("look", **given) if number == 0 else "Done."
    )
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled


@pytest.mark.parametrize("given", [{"input": "x", "why": "y"}, {"input": 5}, {"text": "x"}])
def test_custom_tools_are_found_again_whatever_else_the_policy_said(given):
    async def talk(posts):
        body = {"input": HELLO.copy(), "tools": [{"type": "custom", "name": "look"}]}
        _, answer = await posts.post(RESPONSES, body)
        (item,) = answer["output"]
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "a"}
        body["input"] += [item, output]
        await posts.post(RESPONSES, body)

    session, engine, _ = played(
        talk, lambda _, number: tool_call("look", **given) if number == 0 else "Done."
    )
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled


def test_a_malformed_call_is_not_the_one_call():
    bad = '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>'
    good = tool_call("look", a=2)

    async def talk(posts):
        body = messages(*HELLO, tools=TOOLS, parallel_tool_calls=False, max_tokens=250)
        _, answer = await posts.post(CHAT, body)
        return answer["choices"][0]["message"]["tool_calls"]

    _, _, calls = played(talk, lambda *_: bad + good + tool_call("look", a=3))
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 2}]


# ---- names, limits, templates ----


def test_a_key_of_any_bytes_and_a_scheme_of_any_case():
    async def talk(posts):
        content = json.dumps(messages(*HELLO)).encode()
        lower = {"Authorization": f"bearer {posts.session.key}"}
        odd = {"Authorization": f"Bearer {posts.session.name}.\udcff"}
        return [await posts.raw(CHAT, content, headers=headers) for headers in (lower, odd)]

    _, _, answers = played(talk, script)
    assert [status for status, _ in answers] == [200, 401]


def test_a_signature_of_half_a_surrogate_is_forged():
    async def talk(posts):
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "x.\ud800"}
        said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Hi."}]}
        return await posts.post(MESSAGES, messages(*HELLO, said, {"role": "user", "content": "?"}))

    _, _, (status, _) = played(talk, script)
    assert status == 200


def test_requests_that_cannot_be_rendered_use_up_no_turns():
    async def talk(posts):
        bad = messages(*HELLO, chat_template_kwargs={"x": 1})
        refused = await posts.post(CHAT, bad)
        return refused, await posts.post(CHAT, messages(*HELLO))

    renderer, tokenizer = toy_renderer("glm-4.5")
    _, _, ((refused, _), (served, _)) = played(
        talk,
        lambda *_: "Hello.",
        renderer=renderer,
        tokenizer=tokenizer,
        limits=AgentLimits(max_turns=1),
    )
    assert (refused, served) == (400, 200)


SWITCH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}{{ 'OFF' if off is defined }}"
)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_continued_conversations_keep_the_arguments_of_the_template(path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = SWITCH

    async def talk(posts):
        arguments = {"chat_template_kwargs": {"off": 1}}
        if path == RESPONSES:
            _, first = await posts.post(path, {"input": "one", **arguments})
            await posts.post(path, {"input": "two", "previous_response_id": first["id"]})
            return
        thread = {"type": "create"}
        _, first = await posts.post(path, messages(*HELLO, thread=thread, **arguments))
        thread = {"type": "continue", "previous_message_id": first["id"]}
        await posts.post(path, messages({"role": "user", "content": "two"}, thread=thread))

    session, engine, _ = played(talk, script, tokenizer=tokenizer)
    texts = [tokenizer.decode(prompt) for prompt, _ in engine.requests]
    assert all(text.endswith("OFF") for text in texts)
    assert session.history.origins["edited"] == 0


def test_prompts_are_counted_with_the_beginning_of_the_reply():
    begun = {"role": "assistant", "content": "The answer"}

    async def talk(posts):
        counted = await posts.post("/messages/count_tokens", messages(*HELLO, begun))
        _, answer = await posts.post(MESSAGES, messages(*HELLO, begun))
        return counted[1]["input_tokens"], answer["usage"]["input_tokens"]

    _, _, (counted, used) = played(talk, script)
    assert counted == used


@pytest.mark.parametrize("name", ["minimax-m2", "glm-4.5", "qwen3"])
def test_no_system_message_is_lost_by_the_renderers_of_the_package(name):
    renderer, tokenizer = toy_renderer(name)

    async def talk(posts):
        said = {"role": "assistant", "content": "One."}
        body = messages(
            {"role": "system", "content": "FIRST"},
            {"role": "system", "content": "SECOND"},
            *HELLO,
            said,
            {"role": "system", "content": "LATE"},
            {"role": "user", "content": "Go on"},
        )
        return await posts.post(CHAT, body)

    _, engine, (status, _) = played(
        talk, lambda *_: "Done.", renderer=renderer, tokenizer=tokenizer
    )
    assert status == 200
    text = tokenizer.decode(engine.requests[0][0])
    places = [text.find(word) for word in ("FIRST", "SECOND", "Hi", "One.", "LATE", "Go on")]
    assert -1 not in places
    assert places == sorted(places)
