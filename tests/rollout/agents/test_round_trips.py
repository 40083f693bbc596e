"""What clients send back: threads, references, reasoning with its key, custom tools, namespaces."""

import pytest
from chat_tokenizer import tool_call, trained
from gateway_posts import blocks_of, played
from toy_families import toy_renderer

THOUGHT = "\nLet me see."
LOOK = {"name": "look", "description": "", "input_schema": {"type": "object"}}


def glm():
    renderer, tokenizer = toy_renderer("glm-4.5")
    return {"renderer": renderer, "tokenizer": tokenizer}


def thinking(prompt, number):
    """Reason and call in the first turn, then answer, as GLM-4.5 does."""
    thought = "\n<think>Let me see.</think>"
    if number == 0:
        return f"{thought}\nI look. <tool_call>look\n</tool_call><|observation|>"
    return f"{thought}It is open.<|user|>"


def one_branch(session, engine):
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled


def result_of(block):
    return {"type": "tool_result", "tool_use_id": block["id"], "content": "open"}


def test_a_thread_is_continued_with_its_system_message_and_tools():
    async def talk(posts):
        opening = {
            "max_tokens": 99,
            "system": "Be brief.",
            "tools": [LOOK],
            "messages": [{"role": "user", "content": "Open?"}],
            "thread": {"type": "create"},
        }
        _, first = await posts.post("/messages", opening)
        (block,) = [one for one in first["content"] if one["type"] == "tool_use"]
        following = {
            "max_tokens": 99,
            "messages": [{"role": "user", "content": [result_of(block)]}],
            "thread": {"type": "continue", "previous_message_id": first["id"]},
        }
        return await posts.post("/messages", following)

    session, engine, (status, answer) = played(
        talk, lambda _, number: tool_call("look") if number == 0 else "Yes."
    )
    assert (status, answer["content"][0]["text"]) == (200, "Yes.")
    one_branch(session, engine)
    assert "Be brief." in session.history.conversation()["messages"][0]["content"]


@pytest.mark.parametrize(
    ("thread", "code"),
    [
        ({"type": "continue", "previous_message_id": "msg_0"}, "thread_not_found"),
        ({"type": "fork"}, "thread_unsupported_request"),
    ],
)
def test_threads_that_cannot_be_continued_have_the_code_on_which_clients_fall_back(thread, code):
    async def talk(posts):
        hello = [{"role": "user", "content": "Hi"}]
        body = {"max_tokens": 9, "messages": hello, "thread": thread}
        return await posts.post("/messages", body)

    _, engine, (status, answer) = played(talk, lambda *_: "Hello.")
    assert (status, answer["error"]["details"]["error_code"]) == (400, code)
    assert engine.requests == []


async def send_blocks_back(posts, change, *, stream):
    """Play two turns over Messages; ``change`` alters the blocks that are sent back."""
    body = {"max_tokens": 99, "tools": [LOOK], "messages": [{"role": "user", "content": "Open?"}]}
    if stream:
        blocks = blocks_of(await posts.stream("/messages", body))
    else:
        blocks = (await posts.post("/messages", body))[1]["content"]
    (call,) = [one for one in blocks if one["type"] == "tool_use"]
    body["messages"] += [
        {"role": "assistant", "content": [change(dict(block)) for block in blocks]},
        {"role": "user", "content": [result_of(call)]},
    ]
    status, answer = await posts.post("/messages", body)
    assert status == 200, answer
    return blocks


def same(block):
    return block


def stripped(block):
    """Some clients strip texts."""
    for key in ("text", "thinking"):
        if key in block:
            block[key] = block[key].strip()
    return block


def emptied(block):
    """Some clients keep the key of a thought only."""
    if block["type"] == "thinking":
        block["thinking"] = ""
    return block


def redacted(block):
    """Some clients keep thoughts as data that they do not read."""
    if block["type"] == "thinking":
        return {"type": "redacted_thinking", "data": block["signature"]}
    return block


@pytest.mark.parametrize("change", [same, stripped, emptied, redacted])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_back_by_its_signature(change, stream):
    session, engine, blocks = played(
        lambda posts: send_blocks_back(posts, change, stream=stream), thinking, **glm()
    )
    assert blocks[0]["thinking"] == THOUGHT
    assert len(blocks[0]["signature"]) > 40
    one_branch(session, engine)


def test_a_forged_signature_finds_nothing():
    def forged(block):
        if block["type"] == "thinking":
            name, _, code = block["signature"].partition(".")
            block |= {"signature": f"{name}.{code[::-1]}", "thinking": "I know better."}
        return block

    session, engine, _ = played(
        lambda posts: send_blocks_back(posts, forged, stream=False), thinking, **glm()
    )
    assert len(session.rollout(reward=1.0).samples) == 2
    assert "I know better." in engine.tokenizer.decode(engine.requests[1][0])


async def send_items_back(posts, change, *, stream):
    """Play two turns over Responses; ``change`` alters the items that are sent back."""
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    body = {"tools": tools, "input": [{"role": "user", "content": "Open?"}]}
    if stream:
        events = await posts.stream("/responses", body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        summary = "response.reasoning_summary_text.delta"
        assert "".join(one["delta"] for one in events if one["type"] == summary) == THOUGHT
        assert events[-1]["response"]["output"] == items
    else:
        items = (await posts.post("/responses", body))[1]["output"]
    (call,) = [one for one in items if one["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "open"}
    body["input"] += [*(change(dict(item)) for item in items), output]
    status, answer = await posts.post("/responses", body)
    assert status == 200, answer
    return items


def referred(item):
    return {"type": "item_reference", "id": item["id"]}


def referred_but_calls(item):
    """The AI SDK repeats calls, and refers to all else."""
    if item["type"] != "function_call":
        return referred(item)
    del item["id"]
    return item


def without_summary(item):
    return {**item, "summary": []} if item["type"] == "reasoning" else item


@pytest.mark.parametrize("change", [same, referred, referred_but_calls, without_summary])
@pytest.mark.parametrize("stream", [False, True])
def test_items_come_back_as_they_are_or_as_references(change, stream):
    session, engine, items = played(
        lambda posts: send_items_back(posts, change, stream=stream), thinking, **glm()
    )
    assert [one["type"] for one in items] == ["reasoning", "message", "function_call"]
    one_branch(session, engine)


def test_a_reference_to_nothing_is_refused():
    async def talk(posts):
        return await posts.post("/responses", {"input": [referred({"id": "msg_0"})]})

    _, _, (status, answer) = played(talk, lambda *_: "Hello.")
    assert status == 400
    assert "'msg_0' is not an item of this rollout" in answer["error"]["message"]


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def chat_turns(change):
    async def talk(posts):
        body = {"messages": [{"role": "user", "content": "Open?"}], "tools": TOOLS}
        _, answer = await posts.post("/chat/completions", body)
        said = answer["choices"][0]["message"]
        (call,) = said["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "open"}
        body["messages"] += [change(dict(said)), result]
        status, answer = await posts.post("/chat/completions", body)
        assert status == 200, answer
        return said

    return talk


def only(*keys):
    return lambda said: {key: said[key] for key in ("role", "content", "tool_calls", *keys)}


def as_think_text(said):
    thought = said["reasoning"].strip()
    content = f"<think>\n{thought}\n</think>{said['content']}"
    return {**only()(said), "content": content}


def as_details(said):
    detail = {"type": "reasoning.text", "text": said["reasoning"]}
    return {**only()(said), "reasoning_details": [detail]}


def as_part(said):
    parts = [{"type": "thinking", "thinking": said["reasoning"]}]
    return {**only()(said), "content": [*parts, {"type": "text", "text": said["content"]}]}


@pytest.mark.parametrize(
    "change",
    [same, only("reasoning"), only("reasoning_content"), as_think_text, as_details, as_part],
)
def test_reasoning_comes_back_under_any_of_its_names(change):
    session, engine, said = played(chat_turns(change), thinking, **glm())
    assert said["reasoning"] == said["reasoning_content"] == THOUGHT
    one_branch(session, engine)


@pytest.mark.parametrize(("keep", "branches"), [(True, 1), (False, 2)])
def test_a_client_that_drops_reasoning_keeps_it_in_the_context_if_told_so(keep, branches):
    session, engine, _ = played(chat_turns(only()), thinking, **glm(), keep_reasoning=keep)
    samples = session.rollout(reward=1.0).samples
    assert len(samples) == branches
    assert trained(samples) == engine.sampled


@pytest.mark.parametrize(("text", "branches"), [(None, 1), ("", 1), ("I jump.", 2)])
def test_text_that_a_client_drops_beside_calls_is_found_by_their_ids(text, branches):
    def script(_, number):
        return "I look. " + tool_call("look") if number == 0 else "Yes."

    session, engine, _ = played(chat_turns(lambda said: {**said, "content": text}), script)
    samples = session.rollout(reward=1.0).samples
    assert len(samples) == branches
    assert trained(samples) == engine.sampled


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CUSTOM = {"type": "custom", "name": "run", "description": "Run.", "format": GRAMMAR}


def runs(_, number):
    return tool_call("run", input="echo 'a'\n") if number == 0 else "Done."


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_take_text(stream):
    async def talk(posts):
        body = {"tools": [CUSTOM], "input": [{"role": "user", "content": "Go"}]}
        if stream:
            events = await posts.stream("/responses", body)
            (item,) = events[-1]["response"]["output"]
            kind = "response.custom_tool_call_input.delta"
            assert "".join(one["delta"] for one in events if one["type"] == kind) == item["input"]
        else:
            (item,) = (await posts.post("/responses", body))[1]["output"]
        assert (item["type"], item["name"], item["input"]) == (
            "custom_tool_call",
            "run",
            "echo 'a'\n",
        )
        parts = [{"type": "input_text", "text": "a"}]
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": parts}
        body["input"] += [item, output]
        return await posts.post("/responses", body)

    session, engine, (status, _) = played(talk, runs)
    assert status == 200
    one_branch(session, engine)
    (tool,) = session.history.conversation()["tools"]
    assert "lark grammar:\nstart: /.+/" in tool["function"]["description"]


def test_custom_tools_of_chat_take_text():
    async def talk(posts):
        custom = {"type": "custom", "custom": {"name": "run", "description": ""}}
        body = {"tools": [custom], "messages": [{"role": "user", "content": "Go"}]}
        _, answer = await posts.post("/chat/completions", body)
        said = answer["choices"][0]["message"]
        assert said["tool_calls"][0]["custom"] == {"name": "run", "input": "echo 'a'\n"}
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a"}
        body["messages"] += [said, result]
        return await posts.post("/chat/completions", body)

    session, engine, (status, _) = played(talk, runs)
    assert status == 200
    one_branch(session, engine)


def function(name):
    return {"type": "function", "name": name, "parameters": {"type": "object"}}


def test_tools_of_namespaces_keep_their_namespace():
    spaces = [
        {"type": "namespace", "name": name, "description": "", "tools": [function("close"), *more]}
        for name, more in (("doors", []), ("shops", [function("buy")]))
    ]

    async def talk(posts):
        # Codex declares its tools in the input.
        extra = {"type": "additional_tools", "role": "developer", "tools": spaces}
        update = {"type": "configuration_update", "reasoning": {"effort": "low"}}
        body = {"input": [extra, {"role": "user", "content": "Go"}, update]}
        _, answer = await posts.post("/responses", body)
        calls = answer["output"]
        outputs = [
            {"type": "function_call_output", "call_id": one["call_id"], "output": "done"}
            for one in calls
        ]
        body["input"] += [*calls, *outputs]
        status, answer = await posts.post("/responses", body)
        assert status == 200, answer
        return [(one["namespace"], one["name"]) for one in calls]

    def script(_, number):
        return tool_call("shops__close") + tool_call("buy") if number == 0 else "Done."

    session, engine, named = played(talk, script)
    assert named == [("shops", "close"), ("shops", "buy")]
    one_branch(session, engine)
    offered = [one["function"]["name"] for one in session.history.conversation()["tools"]]
    assert offered == ["doors__close", "shops__close", "buy"]


@pytest.mark.parametrize(
    ("path", "tools", "named"),
    [
        ("/responses", [{"type": "web_search"}, function("look")], "web_search"),
        ("/responses", [{"type": "mcp", "server_label": "docs"}, function("look")], "mcp (docs)"),
        (
            "/messages",
            [{"type": "web_search_20250305", "name": "web_search"}, LOOK],
            "web_search_20250305 (web_search)",
        ),
        ("/chat/completions", [{"type": "code_interpreter"}, *TOOLS], "code_interpreter"),
    ],
)
def test_tools_that_only_servers_run_are_left_out_and_named(path, tools, named, caplog):
    messages = [{"role": "user", "content": "Hi"}]
    body = {"/responses": {"input": messages}}.get(path, {"messages": messages, "max_tokens": 9})

    async def talk(posts):
        return [await posts.post(path, {**body, "tools": tools}) for _ in range(2)]

    with caplog.at_level("INFO"):
        session, _, answers = played(talk, lambda *_: "Hello.")
    assert [status for status, _ in answers] == [200, 200]
    said = [one.getMessage() for one in caplog.records if "leaves out" in one.getMessage()]
    assert len(said) == 1
    assert named in said[0]
    (tool,) = session.history.conversation()["tools"]
    assert tool["function"]["name"] == "look"


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/responses", {"type": "local_shell"}),
        ("/messages", {"type": "bash_20250124", "name": "bash"}),
    ],
)
def test_predefined_tools_that_the_client_runs_are_refused(path, tool):
    messages = [{"role": "user", "content": "Hi"}]
    body = {"/responses": {"input": messages}}.get(path, {"messages": messages, "max_tokens": 9})

    async def talk(posts):
        return await posts.post(path, {**body, "tools": [tool]})

    _, _, (status, answer) = played(talk, lambda *_: "Hello.")
    assert status == 400
    assert tool["type"] in answer["error"]["message"]


def test_a_failed_tool_is_an_error_to_the_policy():
    async def talk(posts):
        body = {"max_tokens": 99, "tools": [LOOK], "messages": [{"role": "user", "content": "?"}]}
        _, first = await posts.post("/messages", body)
        result = {**result_of(first["content"][0]), "content": "no door", "is_error": True}
        body["messages"] += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        return await posts.post("/messages", body)

    session, engine, (status, _) = played(
        talk, lambda _, number: tool_call("look") if number == 0 else "Oh."
    )
    assert status == 200
    one_branch(session, engine)
    assert "Error: no door" in engine.tokenizer.decode(engine.requests[1][0])


def test_a_call_without_arguments_has_an_empty_object():
    async def talk(posts):
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": ""}}
        messages = [
            {"role": "user", "content": "Open?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "yes"},
        ]
        return await posts.post("/chat/completions", {"messages": messages, "tools": TOOLS})

    _, engine, (status, _) = played(talk, lambda *_: "Yes.")
    assert status == 200
    assert '{"name": "look", "arguments": {}}' in engine.tokenizer.decode(engine.requests[0][0])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "[1e999]"])
def test_arguments_that_are_not_json_are_a_malformed_call(value):
    bad = f'<tool_call>{{"name": "look", "arguments": {{"at": {value}}}}}</tool_call>'

    async def talk(posts):
        body = {"messages": [{"role": "user", "content": "Open?"}], "tools": TOOLS}
        _, answer = await posts.post("/chat/completions", body)
        return answer["choices"][0]

    session, _, choice = played(talk, lambda *_: bad)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert session.malformed == 1


def test_a_reply_that_comes_back_without_its_white_space_is_the_same():
    async def talk(posts):
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        _, answer = await posts.post("/chat/completions", body)
        text = answer["choices"][0]["message"]["content"]
        assert text != text.strip()
        body["messages"] += [
            {"role": "assistant", "content": text.strip()},
            {"role": "user", "content": "More"},
        ]
        await posts.post("/chat/completions", body)

    session, engine, _ = played(talk, lambda *_: "\n Hello. \n")
    one_branch(session, engine)
