"""The environment pivot: rewards of replies by hand, and tasks of recordings."""

import asyncio
import json
import re

import pytest
from growth import assert_linear, repeated
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verifiers")
pytest.importorskip("pivot", reason="pip install --no-deps -e recipes/environments/pivot")

from pivot.calls import Call, calls_of, likeness, same

from primerl import rollout, testing
from primerl.types import SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Edit.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
ARGUMENTS = {"path": "a.py", "old": "x", "new": "y", "count": 1}


def conversation(name, *, text=False):
    function = {"name": "edit", "arguments": json.dumps(ARGUMENTS)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
    if text:
        call = {"role": "assistant", "content": written("edit", ARGUMENTS)}
    return {
        "id": name,
        "messages": [
            {"role": "system", "content": "Fix it."},
            {"role": "user", "content": "It is broken."},
            call,
            {"role": "tool", "content": "changed", "tool_call_id": "c", "name": "edit"},
            {"role": "assistant", "content": "Done."},
        ],
        **({} if text else {"tools": TOOLS}),
    }


def written(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def traces(tmp_path):
    file = tmp_path / "traces.jsonl"
    rows = [conversation("one"), conversation("two", text=True), conversation("three")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def environment(traces, tokenizer=None, **options):
    return rollout.verifiers(
        "pivot", tokenizer=tokenizer, config={"taskset": {"traces": [str(traces)], **options}}
    )


def test_each_call_is_a_task(traces):
    tasks = list(environment(traces).tasks)
    assert [task["id"] for task in tasks] == ["pivot/0/one-2", "pivot/1/two-2", "pivot/2/three-2"]
    assert [message["role"] for message in tasks[0]["prompt"]] == ["system", "user"]
    assert tasks[1]["data"]["recorded"] == [{"name": "edit", "arguments": ARGUMENTS}]


def test_splits_divide_trajectories(traces):
    ids = {
        split: [task["id"].split("/")[-1] for task in environment(traces, **options).tasks]
        for split, options in {
            "eval": {"split": "eval", "held_out": 1},
            "train": {"split": "train", "held_out": 1},
        }.items()
    }
    assert ids == {"eval": ["one-2"], "train": ["two-2", "three-2"]}


REPLIES = {
    "the recorded call": (written("edit", ARGUMENTS), 1.0),
    "in another order": (written("edit", dict(reversed(ARGUMENTS.items()))), 1.0),
    "with other spaces": (written("edit", {**ARGUMENTS, "new": " y \n", "count": 1.0}), 1.0),
    "one argument differs": (written("edit", {**ARGUMENTS, "new": "z"}), 0.5 * 3 / 4),
    "one argument is missing": (written("edit", {"path": "a.py", "old": "x", "new": "y"}), 0.375),
    "one argument too many": (written("edit", {**ARGUMENTS, "more": 1}), 0.5 * 4 / 5),
    "true is not 1": (written("edit", {**ARGUMENTS, "count": True}), 0.375),
    "another function": (written("bash", ARGUMENTS), 0.0),
    "two calls": (written("edit", ARGUMENTS) + written("edit", ARGUMENTS), 0.25),
    "no call": ("I would edit a.py.", 0.0),
    "no JSON": ("<tool_call>\n{'name': edit}\n</tool_call>", 0.0),
    "a list as arguments": ('<tool_call>\n{"name": "edit", "arguments": [1]}\n</tool_call>', 0.0),
}


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    file = tmp_path_factory.mktemp("pivot") / "traces.jsonl"
    rows = [conversation("one"), conversation("two", text=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [text for text, _ in REPLIES.values()]
    tokenizer = testing.character_tokenizer(
        "".join(sorted({*"".join(texts), *map(chr, range(32, 127)), "\n"}))
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    played = environment(file, tokenizer)
    fields, text = list(played.tasks)

    async def run():
        found = {}
        for name, (reply, _) in REPLIES.items():
            for kind, task in (("fields", fields), ("text", text)):
                engine = testing.ScriptedEngine([reply], tokenizer=tokenizer)
                found[name, kind] = await played(task, engine, SamplingParams(max_tokens=400))
        await played.aclose()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["fields", "text"])
@pytest.mark.parametrize("name", REPLIES)
def test_rewards(rewards, name, kind):
    played = rewards[name, kind]
    expected = REPLIES[name][1]
    assert played.reward == pytest.approx(expected)
    assert played.metrics["exact"] == float(expected == 1.0)
    assert len(played.samples) == 1  # one reply, whose tokens are trained
    assert sum(played.samples[0].loss_mask) > 0


def test_likeness_of_calls():
    one, other = Call("a", {"x": 1}), Call("b", {})
    assert likeness([one, other], [one, other]) == 1.0
    assert likeness([other, one], [one, other]) == 0.0
    assert likeness([one], [one, other]) == 0.5
    assert likeness([], []) == 1.0
    assert calls_of({"role": "assistant", "content": None}) == []
    assert same({"a": [1, {"b": "c\r\n"}]}, {"a": [1.0, {"b": "c"}]})
    assert not same("1", 1)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert not same(deep, 1)


MARKS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n", " ", "\u2003", "x", "<", '{"name": "f"}', '{"name": "g"}']
)


@given(st.lists(MARKS).map("".join))
def test_calls_are_found_as_by_a_plain_pattern(text):
    calls = calls_of({"content": text})
    texts = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    if all(one.startswith('{"') and one.endswith("}") and one.count("{") == 1 for one in texts):
        assert calls == [Call(json.loads(one)["name"], {}) for one in texts]
    else:
        assert calls is None


@pytest.mark.parametrize("part", ["\n", " ", "<tool_call>", "</tool_call>", "<tool_call>{"])
def test_replies_are_parsed_in_linear_time(part):
    def parse(text):
        calls_of({"content": text})

    assert_linear(parse, repeated("<tool_call>", part, ""))


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="pivot needs recordings"):
        rollout.verifiers("pivot", tokenizer=None)
    file = tmp_path / "bad.jsonl"
    file.write_text('{"messages": "none"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1: expected"):
        list(environment(file).tasks)


@pytest.mark.usefixtures("home")
def test_verifiers_own_checks_pass(traces, tmp_path):
    from verifiers.v1.cli.validate import run_validate
    from verifiers.v1.configs.cli.validate import ValidateConfig

    config = ValidateConfig.model_validate(
        {
            "taskset": {"id": "pivot", "traces": [str(traces)]},
            "runtime": {"type": "subprocess"},
            "rich": False,
            "output_dir": str(tmp_path),
        }
    )
    rows = asyncio.run(run_validate(config))
    assert [row["reason"] for row in rows] == ["valid"] * 3, rows
