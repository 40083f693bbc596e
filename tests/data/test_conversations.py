"""Conversations in files: what they hold, what is refused, and streams over them."""

import json
import pickle

import pytest

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
    assert conversations[0] == {"id": f"{path}:1", **row(0)}
    assert conversations[-1] == {"id": f"{path}:2", "source": "web", **row(1)}
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
    # A null of Parquet is a key that is not there.
    assert parquet[1]["messages"][1] == {
        "role": "assistant",
        "tool_calls": lines[1]["messages"][1]["tool_calls"],
    }
    assert parquet[1]["messages"][2:] == lines[1]["messages"][2:]


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
        flat,
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
    '{"messages": [{"role": "user"}]}': r"messages\[0\].content is None; expected a string",
    '{"messages": [{"role": "user", "content": 4}]}': r"messages\[0\].content is 4",
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
