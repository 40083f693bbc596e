"""The demo keeps its promise, for three seeds: `pytest -m slow`, about 15 minutes on two cores."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def evaluation(root, folder, *arguments):
    demo = [sys.executable, root / "recipes" / "demo.py", "--run-dir", folder, *arguments]
    subprocess.run(demo, cwd=folder.parent, check=True, capture_output=True, timeout=900)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["staleness_max"] <= 2
    assert summary["mismatch_kl_mean"] < 1e-10
    return summary["eval_before"], summary["eval_after"]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_rewards_teach_what_the_teacher_did_not(root, tmp_path, seed):
    before, after = evaluation(root, tmp_path / "run", "--seed", seed)

    assert before <= 0.5
    assert after >= 0.8


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_permuted_rewards_teach_nothing(root, tmp_path, seed):
    before, after = evaluation(root, tmp_path / "run", "--seed", seed, "--permute-rewards")

    assert abs(after - before) <= 0.05
