"""What the tool that teaches and reinforces a tiny GLM makes of traces and of runs."""

import importlib.util
import json

import pytest


@pytest.fixture
def tool(root):
    spec = importlib.util.spec_from_file_location("tool", root / "tools/glm_swe_learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_other_agent_only_says_what_the_expert_says_at_last(tool):
    messages = [
        {"role": "system", "content": "Fix the bug."},
        {"role": "user", "content": "f() returns None."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0"}]},
        {"role": "tool", "content": "", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "The bug is fixed."},
    ]
    row = {"id": "bugfix/0", "messages": messages, "tools": ["bash"]}

    other = tool.without_calls(row)

    assert other == row | {"messages": [messages[0], messages[1], messages[4]]}
    assert row["messages"] is messages
    assert len(messages) == 5


def test_a_curve_has_all_evaluations_of_a_run(tool, tmp_path):
    lines = [{"step": 0, "evaluation": 0.25}, {"step": 1}, {"step": 2, "evaluation": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "eval_after": 0.75}))

    points = tool.evaluations(tmp_path)
    tool.draw(tmp_path / "curve.svg", {"rewards": points})

    assert points == [(0, 0.25), (2, 0.5), (3, 0.75)]
    assert "policy step" in (tmp_path / "curve.svg").read_text()
