"""Conversations in files: what they hold, what is refused, and streams over them."""

import json
import os
import pickle
import shutil

import pytest
import xxhash

from primerl import data, rollout

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


def row(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"question {number}"}, ANSWER]}


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def questions(conversations) -> list[str]:
    return [conversation["messages"][0]["content"] for conversation in conversations]


def test_lines_of_a_file(tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", [row(0), {**row(1), "source": "web"}])
    conversations = data.Conversations(path)
    assert len(conversations) == 2
    places = [{"id": f"{path}:{line}", "read_from": f"{path}:{line}"} for line in (1, 2)]
    assert conversations[0] == {**places[0], **row(0)}
    assert conversations[-1] == {**places[1], "source": "web", **row(1)}
    assert conversations[:1] == [conversations[0]]
    assert list(conversations) == [conversations[0], conversations[1]]
    with pytest.raises(IndexError):
        conversations[2]


def test_line_numbers_count_blank_lines_and_ends_of_windows(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps(row(0)), "", "   ", json.dumps({"id": "own", **row(1)}), json.dumps(row(2))]
    path.write_bytes("\r\n".join(lines).encode())  # and no line end after the last
    conversations = data.Conversations(path)
    assert [each["id"] for each in conversations] == [f"{path}:1", "own", f"{path}:5"]
    assert conversations[1]["read_from"] == f"{path}:4"
    assert questions(conversations) == ["question 0", "question 1", "question 2"]


def test_text_of_every_language(tmp_path):
    text = "naïve 漢字 😀 \u2028 line"
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"messages": [QUESTION, {**ANSWER, "content": text}]}]
    )
    raw = tmp_path / "b.jsonl"
    raw.write_text(
        json.dumps({"messages": [{**QUESTION, "content": text}, ANSWER]}, ensure_ascii=False)
    )
    conversations = data.Conversations(path, raw)
    assert conversations[0]["messages"][1]["content"] == text
    assert conversations[1]["messages"][0]["content"] == text


def test_files_and_folders_one_after_the_other(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", [row(3)])
    write_jsonl(folder / "a.jsonl", [row(1), row(2)])
    (folder / "README.md").write_text("not a conversation")
    first = write_jsonl(tmp_path / "first.jsonl", [row(0)])
    conversations = data.Conversations(first, folder)
    assert questions(conversations) == [f"question {number}" for number in range(4)]


def test_parquet_without_a_place_for_its_copy_is_refused(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "chats.parquet", [row(0)])
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match="chats.parquet: .* is not writable: set HF_HOME"):
        data.Conversations(path)


def test_parquet_reads_as_the_same_lines_do(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [
        row(0),
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                ANSWER,
            ]
        },
    ]
    lines = data.Conversations(write_jsonl(tmp_path / "chats.jsonl", rows))
    parquet = data.Conversations(write_parquet(tmp_path / "chats.parquet", rows))
    assert len(parquet) == 2
    assert parquet[1]["id"] == f"{tmp_path / 'chats.parquet'}, row 1"
    assert parquet[0]["messages"] == lines[0]["messages"]
    assert parquet[1]["messages"] == lines[1]["messages"]
    assert parquet[1]["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
    }


def test_what_is_json_in_strings_is_decoded(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
    flat = {"name": "add", "arguments": {"a": 3}}
    rows = [
        {
            "messages": [QUESTION, {**ANSWER, "tool_calls": json.dumps([call, flat])}],
            "tools": json.dumps([tool]),
        }
    ]
    (conversation,) = data.Conversations(write_jsonl(tmp_path / "chats.jsonl", rows))
    assert conversation["tools"] == [tool]
    assert conversation["messages"][1]["tool_calls"] == [
        {"function": {"name": "add", "arguments": {"a": [1, 2]}}},
        {"type": "function", "function": flat},
    ]


MALFORMED = {
    '{"messages": [': "not valid JSON",
    "[1, 2]": "expected an object with 'messages'",
    '{"prompt": "2 + 2?"}': "expected an object with 'messages'",
    '{"messages": []}': "at least one message",
    '{"messages": ["2 + 2?"]}': r"messages\[0\] is '2 \+ 2\?'; expected an object",
    '{"messages": [{"content": "4"}]}': r"messages\[0\].role is None; expected one of system",
    '{"messages": [{"role": "bot", "content": "4"}]}': r"messages\[0\].role is 'bot'",
    '{"messages": [{"role": ["user"], "content": "4"}]}': r"messages\[0\].role is \['user'\]",
    '{"messages": [{"role": "user", "content": [], "x": '
    + "[" * 70
    + "]" * 70
    + "}]}": "64 levels",
    '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}": "64 levels",
    '{"messages": [{"role": "user"}]}': r"messages\[0\].content is None; expected a string",
    '{"messages": [{"role": "user", "content": 4}]}': r"messages\[0\].content is 4",
    '{"messages": [{"role": "user", "content": "4", "content": "5"}]}': "'content' occurs twice",
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}': (
        r"messages\[0\].content\[0\] is a part of type 'image_url'; .* images"
    ),
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}': (
        r"messages\[0\].content\[0\].text is 1; expected a string"
    ),
    '{"messages": [{"role": "user", "content": [["4"]]}]}': "a part of type 'list'",
    '{"messages": [{"role": "user", "content": "4", "tool_calls": [{"name": "add"}]}]}': (
        "has the role 'user' and reasoning or tool calls"
    ),
    '{"messages": [{"role": "user", "content": "4", "weight": 2}]}': r"messages\[0\].weight is 2",
    '{"messages": [{"role": "assistant", "content": "4", "weight": 0.5}]}': "weight is 0.5",
    '{"messages": [{"role": "assistant", "content": "4", "weight": true}]}': "weight is True",
    '{"messages": [{"role": "assistant", "content": "4", "no_loss": false}]}': (
        r"messages\[0\].no_loss is False; .* write \"weight\": 0"
    ),
    '{"messages": [{"role": "assistant", "content": "4", "thought": "2 + 2"}]}': (
        r"messages\[0\].thought is '2 \+ 2', which is not read"
    ),
    '{"messages": [{"role": "assistant", "content": null, "refusal": "No."}]}': (
        r"messages\[0\].refusal is 'No.'"
    ),
    '{"messages": [{"role": "assistant", "content": "4", "reasoning": "a", "thinking": "b"}]}': (
        "different reasoning as reasoning and thinking"
    ),
    '{"messages": [{"role": "assistant", "content": ["4", {"type": "thinking"}]}]}': (
        r"content\[1\] is reasoning after text"
    ),
    '{"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}': (
        r"content\[0\] is reasoning without a text. Encrypted"
    ),
    '{"messages": [{"role": "assistant", "content": "4", "reasoning_details": [{"data": "x"}]}]}': (
        r"reasoning_details\[0\] is reasoning without a text. Encrypted"
    ),
    '{"messages": [{"role": "assistant", "content": "4", "reasoning": 7}]}': "reasoning is 7",
    '{"messages": [{"role": "assistant", "content": "\\ud800"}]}': "has a lone surrogate",
    '{"messages": [{"role": "assistant", "content": "4", "score": NaN}]}': (
        r"messages\[0\].score is nan, which is not a finite"
    ),
    '{"messages": [{"role": "assistant", "content": "4", "score": 1e999}]}': "score is inf",
    '{"messages": [{"role": "assistant", "content": "4"}], "images": ["a.png"]}': (
        "'images' beside the messages is not read"
    ),
    '{"messages": [{"role": "assistant", "content": "4"}], "system": "Be brief."}': (
        "'system' beside the messages is not read"
    ),
    '{"messages": [{"role": "assistant", "content": "4"}], "tools": [{"nam": "add"}]}': (
        r"tools\[0\] is"
    ),
    '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]}': (
        r"arguments is \[1\]; expected an object"
    ),
    '{"messages": [{"role": "assistant", "tool_calls": [{"name": "", "arguments": "\\"1\\""}]}]}': (
        r"arguments is '1'"
    ),
    '{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "name": "f"}]},'
    ' {"role": "tool", "content": "4", "tool_call_id": "b"}]}': "tool_call_id is 'b'",
    '{"conversations": [{"from": "human", "value": "Hi"}]}': r"the format ShareGPT.*\(--convert\)",
    '{"prompt": "Hi", "completion": "Hello"}': r"format prompt/completion.*\(--convert\)",
    '{"instruction": "Hi", "input": "", "output": "Hello"}': "the format instruction/output",
    '{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}': "the format preferences",
    '{"messages": [{"role": "user", "content": "4"}]}': "no message has the role 'assistant'",
    '{"messages": [{"role": "assistant", "content": "4"}], "tools": 3}': "tools is 3",
    '{"messages": [{"role": "assistant", "content": "4"}], "tools": "[{"}': "tools: not valid JSON",
    '{"messages": [{"role": "assistant", "tool_calls": {"name": "add"}}]}': "expected a list",
    '{"messages": [{"role": "assistant", "tool_calls": [{"add": 1}]}]}': r"tool_calls\[0\] is",
    '{"messages": [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{"}]}]}': (
        r"tool_calls\[0\].arguments: not valid JSON"
    ),
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_named_when_the_file_is_opened(tmp_path, line):
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(row(0))}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"chats.jsonl:3\b.*{MALFORMED[line]}"):
        data.Conversations(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"messages": [{"role": "assistant", "content": "\xff"}]}\n')
    with pytest.raises(ValueError, match="chats.jsonl:1: not valid JSON"):
        data.Conversations(path)


def test_a_malformed_row_of_parquet(tmp_path):
    rows = [row(0), {"messages": [{"role": "bot", "content": "4"}]}]
    with pytest.raises(ValueError, match=r"chats.parquet, row 1: messages\[0\].role is 'bot'"):
        data.Conversations(write_parquet(tmp_path / "chats.parquet", rows))


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(row(0))}\n{json.dumps(row(1))}\n".encode())
    assert questions(data.Conversations(path)) == ["question 0", "question 1"]
    path.write_text(json.dumps(row(0)), encoding="utf-16")
    with pytest.raises(ValueError, match=r"chats.jsonl: the file is encoded in UTF-16"):
        data.Conversations(path)


def test_nulls_that_nobody_wrote_are_left_out(tmp_path):
    """``datasets`` writes the keys of all rows into each, in Parquet and in lines of JSON."""
    datasets = pytest.importorskip("datasets")

    def used(name, arguments):
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}

    def schema(name, **properties):
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    rows = [
        {
            "messages": [QUESTION, used("add", {"a": 1, "b": 2}), {**ANSWER, "weight": 0}, ANSWER],
            "tools": [schema("add", a={"type": "integer"}, b={"type": "integer"})],
        },
        {
            "messages": [QUESTION, used("look", {"path": "/"}), used("now", {})],
            "tools": [schema("look", path={"type": "string", "description": "where"})],
        },
    ]
    plain = data.Conversations(write_jsonl(tmp_path / "plain.jsonl", rows))
    made = datasets.Dataset.from_list(rows)
    made.to_json(tmp_path / "filled.jsonl")
    made.to_parquet(tmp_path / "filled.parquet")
    assert '"path":null' in (tmp_path / "filled.jsonl").read_text()
    for name in ("filled.jsonl", "filled.parquet"):
        filled = data.Conversations(tmp_path / name)
        for one, other in zip(filled, plain, strict=True):
            assert (one["messages"], one["tools"]) == (other["messages"], other["tools"]), name


def test_a_null_in_arguments_as_text_is_kept(tmp_path):
    call = {"name": "f", "arguments": '{"a": null}'}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    (conversation,) = data.Conversations(
        write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    )
    assert conversation["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize("arguments", ['{"a": 1}', ' {"a": 1} ', {"a": 1}, "", None, "{}", {}])
def test_arguments_of_every_form_become_objects(tmp_path, arguments):
    call = {"name": "f", "arguments": arguments}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    (conversation,) = data.Conversations(
        write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    )
    found = conversation["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert found == ({"a": 1} if "a" in str(arguments) else {})


def test_older_forms_of_calls_and_tools(tmp_path):
    messages = [
        QUESTION,
        {**ANSWER, "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
        {"role": "function", "name": "add", "content": "4"},
        ANSWER,
    ]
    rows = [{"messages": messages, "functions": [{"name": "add", "parameters": {}}]}]
    (conversation,) = data.Conversations(write_jsonl(tmp_path / "a.jsonl", rows))
    assert conversation["messages"][1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ]
    assert conversation["messages"][2] == {"role": "tool", "name": "add", "content": "4"}
    assert conversation["tools"] == [
        {"type": "function", "function": {"name": "add", "parameters": {}}}
    ]


SHARED = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2 + 2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is 4.", "weight": 1},
    ],
    "tools": "[]",
    "source": "web",
}


def test_other_formats_are_converted(tmp_path):
    pair = [QUESTION, ANSWER]
    rows = [
        SHARED,
        {"conversations": pair},
        {"conversation": [{"from": "user", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": "2 + 2?", "response": "4"},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"messages": pair},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    shared, *others = data.Conversations(path, convert=True)
    assert shared["source"] == "web"
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert shared["messages"] == [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {**ANSWER, "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4.", "weight": 1},
    ]
    assert others.pop(-2)["messages"] == [{"role": "user", "content": "Add.\n\n2, 2"}, ANSWER]
    assert [one["messages"] for one in others] == [pair] * 7


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            {"conversations": [{"from": "narrator", "value": "Once"}]},
            "from is 'narrator'; expected",
        ),
        ({"conversations": ["Hi", 3]}, r"conversations\[0\] is 'Hi'; expected an object"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "value: not valid JSON"),
        ({"prompt": 4, "completion": "4"}, "prompt is 4; expected text"),
        ({"prompt": "4", "chosen": "4", "rejected": "5"}, "the format preferences"),
        ({"text": "4"}, "expected an object with 'messages'"),
    ],
)
def test_rows_that_cannot_be_converted(tmp_path, line, reason):
    path = write_jsonl(tmp_path / "a.jsonl", [row(0), line])
    with pytest.raises(ValueError, match=rf"a.jsonl:2: .*{reason}"):
        data.Conversations(path, convert=True)


def test_bad_conversations_are_left_out_and_named(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps(row(0)), "{", *MALFORMED, json.dumps({"messages": [QUESTION]})]
    path.write_text("\n".join([*lines, json.dumps(row(1))]))
    conversations = data.Conversations(path, skip_bad=True)
    assert questions(conversations) == ["question 0", "question 1"]
    assert conversations[1]["id"] == f"{path}:{len(lines) + 1}"
    numbers = [int(error.split(":")[1].split(":")[0].split(".")[0]) for error in conversations.bad]
    assert numbers == list(range(2, len(lines) + 1))
    path.write_text("{}\n[]\n")
    with pytest.raises(ValueError, match="no conversation is well-formed"):
        data.Conversations(path, skip_bad=True)


def test_rows_of_parquet_are_left_out_too(tmp_path):
    bad = {"messages": [{"role": "bot", "content": "4"}, ANSWER]}
    path = write_parquet(tmp_path / "chats.parquet", [row(0), bad, row(2)])
    conversations = data.Conversations(path, skip_bad=True)
    assert questions(conversations) == ["question 0", "question 2"]
    assert conversations[1]["id"] == f"{path}, row 2"
    assert conversations.bad[0].startswith(f"{path}, row 1: messages[0].role is 'bot'")


def test_keys_of_messages_that_are_not_read_are_listed(tmp_path):
    messages = [{**QUESTION, "timestamp": 3}, {**ANSWER, "id": "m1", "annotations": []}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    assert data.Conversations(path).unread == {"timestamp", "id", "annotations"}


def test_paths_that_hold_no_conversations(tmp_path):
    with pytest.raises(ValueError, match="pass at least one path"):
        data.Conversations()
    with pytest.raises(ValueError, match="missing.jsonl: there is no such file"):
        data.Conversations(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="no files that end in .jsonl or .parquet"):
        data.Conversations(tmp_path)
    (tmp_path / "chats.csv").write_text("a,b")
    with pytest.raises(ValueError, match="chats.csv: expected a file that ends in .jsonl"):
        data.Conversations(tmp_path / "chats.csv")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.jsonl: the file is empty"):
        data.Conversations(tmp_path / "empty.jsonl")


def test_a_copy_in_another_process_reads_the_same(tmp_path):
    conversations = data.Conversations(write_jsonl(tmp_path / "chats.jsonl", map(row, range(3))))
    copy = pickle.loads(pickle.dumps(conversations))
    assert list(copy) == list(conversations)


def test_a_shuffled_mixture_resumes_where_it_was(tmp_path):
    def stream():
        parts = {}
        for name, count in (("math", 5), ("code", 3)):
            path = write_jsonl(tmp_path / f"{name}.jsonl", map(row, range(count)))
            parts[name] = rollout.Shuffled(data.Conversations(path), seed=3)
        return rollout.Mixture(parts, weights={"math": 3, "code": 1})

    whole = stream()
    drawn = [whole.draw() for _ in range(20)]
    first = stream()
    for _ in range(7):
        first.draw()
    state = json.loads(json.dumps(first.state()))
    resumed = stream()
    resumed.restore(state)
    assert [resumed.draw() for _ in range(13)] == drawn[7:]
    assert drawn[0]["id"].startswith("math/")
    assert sum(each["environment"] == "math" for each in drawn) == 15


# ---- changed files


def state_of(*paths, draws=1):
    """The state of a stream over the files, as a checkpoint holds it."""
    stream = rollout.Shuffled(data.Conversations(*paths), seed=0)
    for _ in range(draws):
        stream.draw()
    return json.loads(json.dumps(stream.state()))


def restored(state, *paths):
    stream = rollout.Shuffled(data.Conversations(*paths), seed=0)
    stream.restore(state)
    return stream


def test_an_edited_conversation_is_noticed_wherever_it_is(tmp_path):
    """The number of conversations and the size of the file remain the same."""
    path = tmp_path / "chats.jsonl"
    write_jsonl(path, map(row, range(100, 200)))
    for draws in (0, 1, 150):
        state = state_of(path, draws=draws)
        restored(state, path)
        for number in (100, 150, 199):
            edited = [row(n) if n != number else row(999) for n in range(100, 200)]
            write_jsonl(path, edited)
            with pytest.raises(ValueError, match="chats.jsonl has changed. Resume with the same"):
                restored(state, path)
            write_jsonl(path, map(row, range(100, 200)))


def test_an_edited_parquet_file_is_noticed(tmp_path):
    path = write_parquet(tmp_path / "chats.parquet", [row(n) for n in range(9)])
    state = state_of(path)
    restored(state, path)
    write_parquet(tmp_path / "chats.parquet", [row(n + (n == 4)) for n in range(9)])
    with pytest.raises(ValueError, match="chats.parquet has changed"):
        restored(state, path)


def test_copies_of_the_files_continue_under_any_path(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name, start in (("a", 0), ("b", 5)):
        write_jsonl(here / f"{name}.jsonl", map(row, range(start, start + 5)))
        shutil.copy(here / f"{name}.jsonl", there / f"{name}{name}.jsonl")
        os.utime(there / f"{name}{name}.jsonl", (0, 0))
    state = state_of(here, draws=4)
    whole = restored(state, here)
    expected = [whole.draw()["messages"] for _ in range(20)]
    for paths in ([there], [there / "aa.jsonl", there / "bb.jsonl"]):
        stream = restored(state, *paths)
        assert [stream.draw()["messages"] for _ in range(20)] == expected


def test_files_that_are_new_missing_or_in_another_order_are_named(tmp_path):
    for name, start in (("a", 0), ("b", 5), ("c", 10)):
        write_jsonl(tmp_path / f"{name}.jsonl", map(row, range(start, start + 5)))
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    state = state_of(a, b)
    with pytest.raises(ValueError, match="c.jsonl is new"):
        restored(state, a, b, c)
    with pytest.raises(ValueError, match="b.jsonl is missing"):
        restored(state, a)
    with pytest.raises(ValueError, match="b.jsonl is missing; c.jsonl is new"):
        restored(state, a, c)
    with pytest.raises(ValueError, match="order was a.jsonl, b.jsonl, and is b.jsonl, a.jsonl"):
        restored(state, b, a)


def test_digests_are_those_of_the_bytes(tmp_path):
    path = tmp_path / "chats.jsonl"
    write_jsonl(path, [{**row(n), "padding": "x" * 100_000} for n in range(30)])  # several blocks
    digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert data.Conversations(path).digests() == [("chats.jsonl", digest)]
