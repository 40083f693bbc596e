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


def test_a_curve_has_all_evaluations_of_a_run(tool, tmp_path):
    lines = [
        {"step": step, "evaluation": share} for step, share in ((0, 0.25), (2, 0.5), (3, 0.75))
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    points = tool.evaluations(tmp_path)
    tool.draw(tmp_path / "curve.svg", {"rewards": points})

    assert points == [(0, 0.25), (2, 0.5), (3, 0.75)]
    assert "policy step" in (tmp_path / "curve.svg").read_text()
