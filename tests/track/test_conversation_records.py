"""Conversations as a run records them: what is short comes back, what is long is cut."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from primerl import advantage, track
from primerl.track import conversation_records
from primerl.track.conversation_records import recorded_conversation
from primerl.types import Group, Rollout, Sample

TEXT = st.text(max_size=40)  # hypothesis leaves out half surrogate pairs
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXT,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT}),
        }
    ),
    min_size=1,
    max_size=3,
)
FULL = TEXT.filter(bool)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT},
        optional={"reasoning_content": FULL, "tool_calls": CALLS},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": TEXT}, optional={"name": FULL, "tool_call_id": FULL}
    ),
)


@st.composite
def conversations(draw):
    pool = draw(st.lists(MESSAGES, min_size=1, max_size=8))
    branch = st.fixed_dictionaries(
        {
            "agent": TEXT,
            "origin": st.sampled_from(["start", "fork", "edited", "unbridged"]),
            "messages": st.lists(st.sampled_from(pool), max_size=8),
            "turns": st.lists(st.none() | st.integers(1, 9), max_size=8),
            "sample": st.none() | st.integers(0, 5),
        }
    )
    branches = draw(st.lists(branch, min_size=1, max_size=5))
    return {"messages": branches[-1]["messages"], "branches": branches}


@settings(max_examples=80)
@given(conversations())
def test_every_conversation_comes_back_from_its_record(conversation):
    record = json.loads(json.dumps(recorded_conversation(conversation, agent="policy")))

    branches = [
        {**one, "messages": [record["messages"][place] for place in one["messages"]]}
        for one in record["branches"]
    ]
    assert branches == conversation["branches"]
    assert record["left_out"] == 0
    once = [json.dumps(message) for message in record["messages"]]
    assert len(set(once)) == len(once)


def test_a_conversation_without_branches_is_one():
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]

    record = recorded_conversation({"messages": messages}, agent="solver")

    assert record["messages"] == messages
    assert record["branches"] == [
        {"agent": "solver", "origin": "start", "sample": 0, "messages": [0, 1], "turns": None}
    ]


def test_parts_and_other_values_become_text():
    parts = [{"type": "text", "text": "See "}, {"type": "image_url"}, "here"]
    messages = [
        {"role": "user", "content": parts},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "act", "arguments": {"a": 1}}}],
        },
    ]

    record = recorded_conversation({"messages": messages}, agent="policy")

    assert [one["content"] for one in record["messages"]] == ["See [image_url]here", ""]
    (call,) = record["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "act", "arguments": '{"a": 1}'}


def test_a_hundred_megabytes_are_cut_and_say_so():
    content = "begin" + "x" * 100_000_000 + "end"

    record = recorded_conversation(
        {"messages": [{"role": "tool", "content": content}]}, agent="policy"
    )

    (message,) = record["messages"]
    text = message["content"]
    assert len(text) < conversation_records.MAX_TEXT + 100
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "[... 99,980,008 characters are left out of the record ...]" in text


def test_of_many_long_texts_each_is_cut_shorter():
    messages = [{"role": "tool", "content": f"{number} " + "x" * 19_000} for number in range(400)]

    record = recorded_conversation({"messages": messages}, agent="policy")

    assert len(record["messages"]) == 400
    texts = [one["content"] for one in record["messages"]]
    assert sum(map(len, texts)) < conversation_records.MAX_CHARACTERS + 400 * 100
    assert all("left out of the record" in text for text in texts)
    assert all(text.startswith(f"{number} ") for number, text in enumerate(texts))


def test_branches_beyond_the_bound_are_counted(monkeypatch):
    monkeypatch.setattr(conversation_records, "MAX_PLACES", 10)
    branch = {"messages": [{"role": "user", "content": str(number)} for number in range(4)]}

    record = recorded_conversation({"messages": [], "branches": [branch] * 5}, agent="policy")

    assert len(record["branches"]) == 2
    assert record["left_out"] == 3
    assert len(record["messages"]) == 4


# ---- in a run ----


def sample(*, trained=True):
    return Sample(
        token_ids=[1, 2, 3],
        loss_mask=[False, trained, trained],
        behavior_logprobs=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
    )


def write_run(folder, rollouts, **settings):
    groups = [Group(task_id="t", rollouts=rollouts)]
    with track.Run(folder, args={}, **settings) as run:
        run.log(0, groups, advantage.assign(groups, advantage.centered))
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]


def test_the_first_line_of_a_rollout_has_its_conversation(tmp_path):
    conversation = {"messages": [{"role": "user", "content": "Hello"}]}
    branches = [sample(trained=False), sample(), sample()]

    lines = write_run(
        tmp_path,
        [
            Rollout(samples=branches, reward=1.0, conversation=conversation),
            Rollout(samples=[sample()], reward=0.0),
        ],
    )

    assert [(line["rollout"], line["sample"]) for line in lines] == [(0, 1), (0, 2), (1, 0)]
    assert ["conversation" in line for line in lines] == [True, False, False]
    assert lines[0]["conversation"]["messages"] == conversation["messages"]


def test_half_of_a_surrogate_pair_stops_no_run(tmp_path):
    conversation = {"messages": [{"role": "tool", "content": "\ud800 and \udfff"}]}

    (line,) = write_run(
        tmp_path,
        [Rollout(samples=[sample()], reward=1.0, stop="\ud800", conversation=conversation)],
    )

    assert line["conversation"]["messages"] == [{"role": "tool", "content": "? and ?"}]
    assert line["stop"] == "?"
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_conversations_of_groups_that_are_not_recorded_are_left_out(tmp_path, share):
    conversation = {"messages": [{"role": "user", "content": "Hello"}]}
    rollouts = [Rollout(samples=[sample()], reward=1.0, conversation=conversation)]

    assert write_run(tmp_path, rollouts, record_rollouts=share) == []
