"""Replies that end at a stop string or after one call, and replies whose beginning is given."""

import pytest
from chat_tokenizer import chat_tokenizer, tool_call, trained
from gateway_posts import played
from toy_families import toy_renderer

from primerl.rollout.conversations.cuts import Cut, cut_at_strings

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
REQUESTS = {
    "/chat/completions": ({"messages": HELLO, "tools": TOOLS}, {"parallel_tool_calls": False}),
    "/responses": (
        {"input": HELLO, "tools": [{"type": "function", "name": "look", "parameters": {}}]},
        {"parallel_tool_calls": False},
    ),
    "/messages": (
        {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "look", "input_schema": {}}]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
}


def only_prefixes_are_trained(session, engine, lengths):
    """Each sampled token up to these lengths is trained once, and no other."""
    kept = engine.sampled.copy()
    for (prompt, completion), length in zip(engine.requests, lengths, strict=True):
        for i in range(length, len(completion.token_ids)):
            tokens = (*prompt, *completion.token_ids.tolist()[: i + 1])
            del kept[tokens, float(completion.logprobs[i]), int(completion.versions[i])]
    samples = session.rollout(reward=1.0).samples
    assert trained(samples) == kept
    return samples


@pytest.mark.parametrize("path", REQUESTS)
def test_a_reply_with_one_call_ends_after_the_call(path):
    first = "Hm. " + tool_call("look", at="door")
    body, extra = REQUESTS[path]

    async def talk(posts):
        return await posts.post(path, {**body, **extra})

    session, engine, (status, answer) = played(
        talk, lambda *_: first + " and " + tool_call("look", at="wall") + " bye"
    )
    assert status == 200
    assert "wall" not in str(answer)
    assert "door" in str(answer)
    (sample,) = only_prefixes_are_trained(session, engine, [len(first)])
    assert session.stop == "stop"
    assert engine.tokenizer.decode(sample.token_ids).endswith(first)


@pytest.mark.parametrize("path", REQUESTS)
def test_a_reply_with_one_call_at_most_is_kept_whole(path):
    body, extra = REQUESTS[path]

    async def talk(posts):
        return await posts.post(path, {**body, **extra})

    session, engine, (status, _) = played(talk, lambda *_: tool_call("look") + " bye")
    assert status == 200
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_reply_and_the_next_turn_continues_it(stream):
    said = "Thought: hm.\nObservation:"

    async def talk(posts):
        body = {"messages": [*HELLO], "stop": ["\nObservation:", "Never"]}
        if stream:
            events = await posts.stream("/chat/completions", body)
            deltas = [one["choices"][0] for one in events]
            text = "".join(one["delta"].get("content") or "" for one in deltas)
            reason = deltas[-1]["finish_reason"]
        else:
            _, answer = await posts.post("/chat/completions", body)
            (choice,) = answer["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == ("Thought: hm.", "stop")
        body["messages"] += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Observation: it is open."},
        ]
        return await posts.post("/chat/completions", body)

    session, engine, (status, _) = played(
        talk, lambda _, number: said + " invented" if number == 0 else "Open."
    )
    assert status == 200
    only_prefixes_are_trained(session, engine, [len(said), 6])
    assert len(session.rollout(reward=1.0).samples) == 1
    text = engine.tokenizer.decode(engine.requests[1][0])
    assert "Thought: hm.\nObservation:<|im_end|>" in text
    assert "invented" not in text


def test_a_stop_sequence_is_named():
    async def talk(posts):
        body = {"messages": HELLO, "max_tokens": 99, "stop_sequences": ["END"]}
        events = await posts.stream("/messages", body)
        (ended,) = [one for one in events if one["type"] == "message_delta"]
        assert ended["usage"]["input_tokens"] > 0
        return ended["delta"]

    session, engine, delta = played(talk, lambda *_: "The END is near.")
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    only_prefixes_are_trained(session, engine, [len("The END")])


def test_the_first_of_two_stop_strings_wins_whatever_their_order():
    tokenizer = chat_tokenizer()
    tokens = tokenizer.encode("one two three", add_special_tokens=False)
    for stops in (["three", "two"], ["two", "three"]):
        assert cut_at_strings(tokens, stops, tokenizer.decode) == Cut(7, "two")
    assert cut_at_strings(tokens, ["four"], tokenizer.decode) is None


@pytest.mark.parametrize("flag", ["continue_final_message", "prefix", "messages"])
def test_the_beginning_of_a_reply_is_part_of_the_prompt(flag):
    begun = {"role": "assistant", "content": "The answer is"}

    async def talk(posts):
        body = {"messages": [*HELLO, begun], "max_tokens": 99}
        path = "/chat/completions"
        if flag == "messages":
            path = "/messages"
        elif flag == "prefix":
            body["messages"][-1] = {**begun, "prefix": True}
        else:
            body |= {flag: True, "add_generation_prompt": False}
        status, answer = await posts.post(path, body)
        assert status == 200, answer
        if flag == "messages":
            text = answer["content"][0]["text"]
        else:
            text = answer["choices"][0]["message"]["content"]
        assert text == " four."
        following = [
            *HELLO,
            {"role": "assistant", "content": "The answer is" + text},
            {"role": "user", "content": "Sure?"},
        ]
        return await posts.post(path, {"messages": following, "max_tokens": 99})

    session, engine, (status, _) = played(
        talk, lambda _, number: " four." if number == 0 else "Yes."
    )
    assert status == 200
    first = engine.tokenizer.decode(engine.requests[0][0])
    assert first.endswith("<|im_start|>assistant\nThe answer is")
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled


def test_only_text_can_be_the_beginning_of_a_reply():
    async def talk(posts):
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        begun = {"role": "assistant", "content": [use]}
        first = await posts.post("/messages", {"messages": [*HELLO, begun], "max_tokens": 9})
        body = {"messages": HELLO, "continue_final_message": True}
        return [first, await posts.post("/chat/completions", body)]

    _, engine, answers = played(talk, lambda *_: "Hello.")
    assert [status for status, _ in answers] == [400, 400]
    assert engine.requests == []


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n' if enable_thinking is not defined or enable_thinking }}{% endif %}"
)


def thinks():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = THINKS
    return tokenizer


def test_a_reply_that_begins_with_reasoning_has_no_other_beginning():
    async def talk(posts):
        begun = {"role": "assistant", "content": "The"}
        return await posts.post("/messages", {"messages": [*HELLO, begun], "max_tokens": 9})

    _, engine, (status, answer) = played(talk, lambda *_: "Hello.", tokenizer=thinks())
    assert status == 400
    assert "begins replies with reasoning" in answer["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("path", REQUESTS)
def test_arguments_of_the_chat_template_are_passed_on(path):
    body = {"/responses": {"input": HELLO}}.get(path, {"messages": HELLO, "max_tokens": 9})

    async def talk(posts):
        plain = await posts.post(path, body)
        off = {**body, "chat_template_kwargs": {"enable_thinking": False}}
        return [plain, await posts.post(path, off)]

    session, engine, answers = played(talk, lambda *_: "Hello.", tokenizer=thinks())
    assert [status for status, _ in answers] == [200, 200]
    ends = [engine.tokenizer.decode(prompt).endswith("<think>\n") for prompt, _ in engine.requests]
    assert ends == [True, False]
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


@pytest.mark.parametrize("name", ["tools", "chat_template", "tokenize", "not an identifier"])
def test_arguments_that_the_renderer_sets_are_refused(name):
    async def talk(posts):
        body = {"messages": HELLO, "chat_template_kwargs": {name: 1}}
        return await posts.post("/chat/completions", body)

    _, engine, (status, answer) = played(talk, lambda *_: "Hello.")
    assert status == 400
    assert repr(name) in answer["error"]["message"]
    assert engine.requests == []


def test_arguments_that_the_template_does_not_have_are_refused():
    async def talk(posts):
        body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinknig": False}}
        return await posts.post("/chat/completions", body)

    _, engine, (status, answer) = played(talk, lambda *_: "Hello.", tokenizer=thinks())
    assert status == 400
    assert "no variable 'enable_thinknig'" in answer["error"]["message"]
    assert engine.requests == []


def test_a_renderer_without_a_template_takes_no_arguments_for_it():
    renderer, tokenizer = toy_renderer("glm-4.5")

    async def talk(posts):
        body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
        return await posts.post("/chat/completions", body)

    _, _, (status, answer) = played(
        talk, lambda *_: "Hello.", tokenizer=tokenizer, renderer=renderer
    )
    assert status == 400
    assert "has no chat template" in answer["error"]["message"]
