"""Rows of other formats become messages, or are refused by what would be lost."""

import json

import pytest

from primerl import data

Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
R, B = {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}
SYSTEM = {"role": "system", "content": "S"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3"}


def opened(folder, row, **options):
    (folder / "chats.jsonl").write_text(json.dumps(row) + "\n")
    return data.Conversations(folder / "chats.jsonl", convert=True, **options)[0]


def said(*turns):
    return [{"from": speaker, "value": value} for speaker, value in turns]


ASKED = said(("human", "Q"), ("gpt", "A"))
CONVERTED = {
    "few-shot prompt": (
        {"prompt": [Q, A, {**R}], "completion": [B]},
        [Q, {**A, "weight": 0}, R, B],
    ),
    "few-shot prompt with weights": (
        {"prompt": [Q, {**A, "weight": 1}, R], "completion": "B"},
        [Q, {**A, "weight": 1}, R, B],
    ),
    "alpaca's history": (
        {"instruction": "R", "input": "", "output": "B", "history": [["Q", "A"]]},
        [Q, A, R, B],
    ),
    "alpaca with system": (
        {"instruction": "Q", "output": "A", "system": "S", "text": "Q A"},
        [SYSTEM, Q, A],
    ),
    "system_prompt": ({"system_prompt": "S", "prompt": "Q", "response": "A"}, [SYSTEM, Q, A]),
    "of ShareGPT": ({"system_prompt": "S", "conversations": ASKED}, [SYSTEM, Q, A]),
    "of messages": ({"system_prompt": "S", "messages": [Q, A]}, [SYSTEM, Q, A]),
    "the same twice": ({"system": "S", "messages": [SYSTEM, Q, A]}, [SYSTEM, Q, A]),
    "OpenOrca": ({"system_prompt": "", "question": "Q", "response": "A"}, [Q, A]),
    "Dolly": (
        {"instruction": "Q", "context": "C", "response": "A", "category": "qa"},
        [{**Q, "content": "Q\n\nC"}, A],
    ),
    "LIMA": ({"conversations": ["Q", "A"], "source": "x"}, [Q, A]),
    "UltraChat": ({"data": ["Q", "A", "R", "B"]}, [Q, A, R, B]),
    "xLAM": ({"query": "Q", "answers": '[{"name": "f", "arguments": {"a": 1}}]'}, [Q, CALLED]),
    "text": ({"conversations": json.dumps(ASKED)}, [Q, A]),
    "role and value": (
        {"conversations": [{"role": "human", "value": "Q"}, {"from": "gpt", "content": "A"}]},
        [Q, A],
    ),
    "masks": (
        {"conversations": [{**ASKED[0], "loss": False}, {**ASKED[1], "loss": False}, Q, A]},
        [{**Q, "weight": 0}, {**A, "weight": 0}, Q, A],
    ),
    "other names of calls": (
        {
            "conversations": said(
                ("human", "Q"),
                ("function-call", {"name": "f", "arguments": {"a": 1}}),
                ("function-response", "3"),
                ("function_call", '{"name": "f", "parameters": {"a": 1}}'),
                ("function", "3"),
                ("gpt", "A"),
            )
        },
        [Q, CALLED, RESULT, CALLED, RESULT, A],
    ),
    "Anthropic": (
        {
            "messages": [
                Q,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "Hm"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
                        {"type": "text", "text": "R"},
                    ],
                },
                A,
            ]
        },
        [
            Q,
            {**CALLED, "content": "Hm", "tool_calls": [{"id": "t1", **CALL}]},
            {**RESULT, "tool_call_id": "t1"},
            R,
            A,
        ],
    ),
    "messages of their own": ({"messages": [Q, A], "prompt": "Q", "response": "A"}, [Q, A]),
    "turns as messages": ({"messages": ASKED}, [Q, A]),
    "empty messages": ({"messages": [], "conversations": ASKED}, [Q, A]),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_conversion(tmp_path, case):
    row, expected = CONVERTED[case]
    assert opened(tmp_path, row)["messages"] == expected


LOST = {
    "a prompt in a list with an input": (
        {"prompt": [Q], "completion": "A", "input": "I"},
        "input is 'I'; expected strings",
    ),
    "an instruction in a list": (
        {"instruction": [Q], "output": "A", "input": "I"},
        "input is 'I'; expected strings",
    ),
    "input in a list": ({"instruction": "Q", "input": ["I"], "output": "A"}, "input is"),
    "input is a number": ({"instruction": "Q", "input": 5, "output": "A"}, "input is 5"),
    "system in a list": ({"conversations": ASKED, "system": ["S"]}, "system is"),
    "two systems": ({"messages": [SYSTEM, Q, A], "system": "T"}, "system differs"),
    "a history of texts": (
        {"instruction": "Q", "output": "A", "history": ["x"]},
        r"history\[0\] is no pair",
    ),
    "the history of a prompt": (
        {"prompt": "Q", "completion": "A", "history": [["x", "y"]]},
        "'history' beside the messages",
    ),
    "value and content": (
        {"conversations": [{**ASKED[0], "content": "Z"}, ASKED[1]]},
        "value and content; expected one",
    ),
    "a call and tool_calls": (
        {
            "conversations": [
                ASKED[0],
                {"from": "function_call", "value": "{}", "tool_calls": [CALL]},
            ]
        },
        "tool_calls beside its value",
    ),
    "conversations and messages": (
        {"conversations": ASKED, "messages": [R, B]},
        "two conversations .messages and ShareGPT",
    ),
    "conversation and conversations": (
        {"conversations": ASKED, "conversation": ASKED},
        "two conversations",
    ),
    "completion and response": ({"prompt": "Q", "completion": "A", "response": "B"}, "two conv"),
    "a turn without value": (
        {"conversations": [{"from": "human", "value": None}, ASKED[1]]},
        r"conversations\[0\].value is missing",
    ),
    "a result that is an error": (
        {
            "messages": [
                Q,
                CALLED,
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "content": "3", "is_error": True}],
                },
                A,
            ]
        },
        r"messages\[2\].content\[0\].is_error is True",
    ),
    "text after a call": (
        {
            "messages": [
                Q,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
                        {"type": "text", "text": "Hm"},
                    ],
                },
            ]
        },
        r"messages\[1\].content\[1\] follows a call",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_conversion_would_lose_is_refused_by_name(tmp_path, case):
    row, reason = LOST[case]
    with pytest.raises(ValueError, match=f"chats.jsonl:1: .*{reason}"):
        opened(tmp_path, row)


def test_two_conversations_are_also_refused_without_conversion(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"conversations": ASKED, "messages": [R, B]}))
    with pytest.raises(ValueError, match="two conversations"):
        data.Conversations(path)
    path.write_text(json.dumps({"conversations": ASKED, "messages": [Q, A], "data": {"a": 1}}))
    assert data.Conversations(path)[0]["messages"] == [Q, A]
