"""What a message says is read or refused by name, under whatever key and in whatever part."""

import json
import math

import pytest

from primerl import data

TEXT = {"type": "text", "text": "4"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def user(content, **more) -> dict:
    return {"role": "user", "content": content, **more}


def reply(content, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def called(*calls) -> dict:
    return reply("", tool_calls=list(calls))


def call(name="f", arguments=None, **more) -> dict:
    return {**more, "function": {"name": name, "arguments": arguments or {}}}


def result(content="R", **more) -> dict:
    return {"role": "tool", "content": content, **more}


def opened(folder, row, **options):
    """The conversation of a file with one row."""
    (folder / "chats.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return data.Conversations(folder / "chats.jsonl", **options)[0]


def read(folder, message, **beside) -> dict:
    """The message, which answers a question, as it is read."""
    return opened(folder, {"messages": [user("2 + 2?"), message], **beside})["messages"][1]


REFUSED = {
    "arguments beside the function": (
        called({"function": {"name": "f"}, "arguments": {"a": 1}}),
        r"tool_calls\[0\].arguments is {'a': 1}, which is not read",
    ),
    "kwargs": (called({"name": "f", "kwargs": {"a": 1}}), r"tool_calls\[0\].kwargs is"),
    "a thought of a call": (called({"name": "f", "thought": "t"}), "thought is 't'"),
    "two names": (called({**call(), "name": "g"}), r"tool_calls\[0\].name is 'g'"),
    "two kinds of arguments": (
        called({"name": "f", "arguments": {"a": 1}, "input": {"a": 2}}),
        "input is {'a': 2}",
    ),
    "args and parameters": (
        called({"name": "f", "args": {"a": 1}, "parameters": {"a": 2}}),
        "args is {'a': 1}",
    ),
    "an image in a text": (reply([{**TEXT, "image_url": {"url": "u"}}]), r"\[0\].image_url is"),
    "reasoning in a text": (reply([{**TEXT, "thinking": "t"}]), r"content\[0\].thinking is 't'"),
    "a title in a text": (reply([{"text": "4", "title": "t"}]), r"content\[0\].title is 't'"),
    "annotations": (reply([{**TEXT, "annotations": [{"url": "u"}]}]), "annotations is"),
    "two reasonings": (
        reply("<think>t</think>4", reasoning_content="u"),
        "different reasoning as reasoning_content and <think> tags",
    ),
    "encrypted reasoning alone": (
        reply("4", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]),
        r"reasoning_details\[0\] is reasoning without a text",
    ),
    "an argument that is no number": (called(call("f", {"a": math.nan})), "a is nan, which"),
    "and as text": (called({"name": "f", "arguments": '{"a": -Infinity}'}), "a is -inf, which"),
    "a lone surrogate": (called({"name": "f", "arguments": '{"a": "\\ud83d"}'}), "lone surrogate"),
    "one in a key": (called(call("f", {"\ud83d": 1})), "lone surrogate"),
    "one in a name": (called(call("\ud83d")), "lone surrogate"),
    **{
        key: (reply("4", **{key: "x"}), rf"{key} is 'x', which is not read")
        for key in ("tool_call", "function_calls", "tool_response", "output", "rationale", "cot")
    },
    **{
        key: (reply("4", **{key: 0}), rf'{key} is 0; .* write "weight": 0')
        for key in ("no_loss", "do_train", "learn", "is_masked", "supervised", "step_loss_mask")
    },
    "half a weight": (reply("4", loss=0.5), "loss is 0.5; expected 1, or 0"),
    "two weights": (reply("4", train=True, weight=0), "different weight and train"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused_by_name(tmp_path, case):
    message, reason = REFUSED[case]
    with pytest.raises(ValueError, match=rf"chats.jsonl:1: messages\[1\].*{reason}"):
        read(tmp_path, message)


ROWS = {
    "loss_mask": [0, 0],
    "weight": 0,
    "trainable": False,
    "train_on_last_only": True,
    "mask_history": True,
    "system_prompt": "S",
    "history": [["a", "b"]],
}


@pytest.mark.parametrize("key", ROWS)
def test_keys_of_rows_that_say_something_are_refused(tmp_path, key):
    with pytest.raises(ValueError, match=f"chats.jsonl:1: '{key}' beside the messages"):
        read(tmp_path, reply("4"), **{key: ROWS[key]})


def test_keys_of_rows_that_say_nothing_else_are_not(tmp_path):
    beside = {"weight": 1, "mask_history": False, "system": "2 + 2?", "history": [], "score": 2}
    assert read(tmp_path, reply("4"), **beside) == reply("4")
    opened(tmp_path, {"messages": [user("a"), reply("b")], "score": math.nan})


def test_lone_surrogates_elsewhere_are_found_and_can_be_printed(tmp_path):
    for beside in ({"id": "\ud83d"}, {"notes": [{"\ud83d": 1}]}, {"tools": [{"name": "\ud83d"}]}):
        with pytest.raises(ValueError, match="has a lone surrogate") as caught:
            read(tmp_path, reply("4"), **beside)
        str(caught.value).encode()


def test_tools_and_functions_are_refused(tmp_path):
    tools = [{"name": "f"}]
    with pytest.raises(ValueError, match="there are tools and functions"):
        read(tmp_path, reply("4"), tools=tools, functions=tools)


CALLS = {
    "parameters": {"name": "f", "parameters": {"a": 1}},
    "args": {"name": "f", "args": {"a": 1}},
    "input": {"type": "tool_use", "name": "f", "input": {"a": 1}},
    "parameters of the function": {"function": {"name": "f", "parameters": {"a": 1}}},
    "text": '{"name": "f", "arguments": {"a": 1}}',
    "the name twice": {"name": "f", **call("f", {"a": 1})},
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_other_forms_are_read(tmp_path, case):
    (read_call,) = read(tmp_path, called(CALLS[case]))["tool_calls"]
    assert read_call["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize("arguments", ["null", [], "[]", " "])
def test_no_arguments(tmp_path, arguments):
    message = read(tmp_path, called({"name": "f", "arguments": arguments}))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("nothing", ["", False, {}, [], None])
def test_encodings_of_nothing(tmp_path, nothing):
    message = reply("4", tool_calls=nothing, function_call=nothing)
    assert read(tmp_path, message, tools=nothing) == reply("4")


REPLIES = {
    "call as text": (
        reply(None, function_call='{"name": "f"}'),
        reply("", tool_calls=[{"type": "function", **call()}]),
    ),
    "reasoning alone": (reply(None, reasoning="t"), reply("", reasoning_content="t")),
    "empty part": (reply([{"type": "text", "text": None}, TEXT]), reply("4")),
    "marked part": (
        reply([{**TEXT, "cache_control": {"type": "x"}, "annotations": []}]),
        reply("4"),
    ),
    "reasoning twice": (
        reply("<think>\nt\n</think>\n\n4", reasoning_content="t"),
        reply("4", reasoning_content="t"),
    ),
    "reasoning without its first tag": (
        reply("t\n</think>\n\n4", reasoning="t"),
        reply("4", reasoning_content="t"),
    ),
    "empty tags": (
        reply("<think>\n\n</think>\n\n4", reasoning="t"),
        reply("4", reasoning_content="t"),
    ),
    "reasoning in two parts": (
        reply("4", reasoning="t\nu", thinking_blocks=[{"thinking": "t"}, {"thinking": "u"}]),
        reply("4", reasoning_content="t\nu"),
    ),
    "readable and encrypted": (
        reply("4", reasoning_details=[{"summary": "t"}, {"type": "encrypted", "data": "x"}]),
        reply("4", reasoning_content="t"),
    ),
    "summaries": (
        reply("4", reasoning_details=[{"summary": [{"type": "summary_text", "text": "t"}]}]),
        reply("4", reasoning_content="t"),
    ),
    "after an empty part": (
        reply([{"type": "text", "text": ""}, {"type": "thinking", "thinking": "t"}, TEXT]),
        reply("4", reasoning_content="t"),
    ),
    "the thought said": (reply("so 4", thought="so"), reply("so 4", thought="so")),
    "not trained": (reply("4", train=False), reply("4", weight=0)),
    "trained": (reply("4", loss=1), reply("4", weight=1)),
}


@pytest.mark.parametrize("case", REPLIES)
def test_replies_of_other_forms_are_read(tmp_path, case):
    message, expected = REPLIES[case]
    assert read(tmp_path, message) == expected


def test_weights_of_others_say_nothing(tmp_path):
    row = {"messages": [user("a", weight=1, train=True), reply("b")]}
    assert opened(tmp_path, row)["messages"] == [user("a"), reply("b")]


def test_keys_of_parts_that_are_not_read_are_listed(tmp_path):
    row = {"messages": [user([{**TEXT, "cache_control": {"type": "x"}}]), reply("4")]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert data.Conversations(tmp_path / "a.jsonl").unread == {"content[].cache_control"}


def test_messages_as_text(tmp_path):
    messages = [user("a"), reply("b")]
    assert opened(tmp_path, {"messages": json.dumps(messages)})["messages"] == messages


def test_schemas_under_other_keys(tmp_path):
    for key in ("parameters", "input_schema", "inputSchema"):
        for schema in (SCHEMA, json.dumps(SCHEMA)):
            row = {"messages": [user("a"), reply("b")], "tools": [{"name": "f", key: schema}]}
            (tool,) = opened(tmp_path, row)["tools"]
            assert tool["function"] == {"name": "f", "parameters": SCHEMA}


def test_an_object_of_nulls_in_a_list_stays(tmp_path):
    """In lines of JSON and in Parquet alike."""
    datasets = pytest.importorskip("datasets")
    row = {"messages": [user("a"), called(call("f", {"l": [{"x": None}, {"x": 1}], "o": {}}))]}
    row["messages"][1]["tool_calls"][0]["function"]["arguments"]["o"] = {"x": None}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "chats.parquet")
    from_parquet = data.Conversations(tmp_path / "chats.parquet")[0]["messages"]
    assert opened(tmp_path, row)["messages"] == from_parquet
    arguments = from_parquet[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"l": [{}, {"x": 1}]}


def test_numbers_of_parquet_are_finite(tmp_path):
    datasets = pytest.importorskip("datasets")
    row = {"messages": [user("a"), called(call("f", {"t": math.inf}))], "score": math.nan}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "chats.parquet")
    with pytest.raises(ValueError, match="row 0: messages.*arguments.t is inf, which is not"):
        data.Conversations(tmp_path / "chats.parquet")


F, G = call("f", id="c1"), call("g", id="c2")
RESULTS = {
    "names": ([call("f"), call("g")], [result(name="g"), result(name="f")], "is a result of 'g'"),
    "too many": ([call("f")], [result(), result()], "all calls before it have one"),
    "too many with ids": ([F], [result(tool_call_id="c1"), result()], "all calls before it"),
    "a wrong name": ([F, G], [result(tool_call_id="c1", name="g")], "answers the call of 'f'"),
    "a wrong id": ([F], [result(call_id="c3")], "tool_call_id is 'c3'; expected one of .* c1"),
    "several ids": ([F, G], [result(tool_call_ids=["c1", "c2"])], "tool_call_ids is"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_that_answer_no_call_are_refused(tmp_path, case):
    calls, results, reason = RESULTS[case]
    with pytest.raises(ValueError, match=reason):
        opened(tmp_path, {"messages": [user("a"), called(*calls), *results, reply("b")]})


@pytest.mark.parametrize("key", ["tool_call_id", "call_id", "tool_use_id", "id", "tool_call_ids"])
def test_ids_of_results(tmp_path, key):
    calls = [call("f", id=1), {**call("g"), "id": "fc", "call_id": "2"}]
    named = [result(**{key: [one] if key.endswith("s") else one}) for one in (1, 2)]
    messages = [user("a"), called(*calls), *named, result(None, id="m1")][:4]
    read = opened(tmp_path, {"messages": [*messages, reply("b")]})["messages"]
    assert [one["id"] for one in read[1]["tool_calls"]] == ["1", "2"]
    assert read[2:4] == [result(tool_call_id="1"), result(tool_call_id="2")]


def test_results_of_calls_that_are_text(tmp_path):
    messages = [user("a"), reply("<tool_call>f</tool_call>"), result(None), result(id="m1")]
    read = opened(tmp_path, {"messages": [*messages, reply("b")]})["messages"]
    assert read[2:4] == [result(""), result(id="m1")]
