"""The edits of docs/recipes.md, applied to a copy of the recipe, which is then run."""

import json
import re
import subprocess
import sys

import pytest


def edits(page):
    """What each ``diff`` block replaces, and by what."""
    for block in re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL):
        lines = block.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        yield before, after


@pytest.fixture(scope="module")
def edited(root, tmp_path_factory):
    recipe = (root / "recipes/async_grpo.py").read_text()
    for before, after in edits((root / "docs/recipes.md").read_text()):
        assert recipe.count(before) == 1, before
        recipe = recipe.replace(before, after)
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(recipe)
    return path


@pytest.fixture(scope="module")
def metrics(root, edited, tiny_chat_model):
    command = [root / "tests/helpers/recipe_with_signal.py", edited, "--model", tiny_chat_model]
    command += ["--steps", 3, "--groups-per-step", 4, "--group-size", 4, "--eval-tasks", 2]
    command += ["--eval-every", 2, "--run-dir", edited.parent / "run", "--lr", 1e-3]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=edited.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = (edited.parent / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_edited_recipe_trains_with_a_reference(metrics):
    """The policy leaves the reference with its first update, and not before."""
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["tokens/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics[2]["tokens/reference_kl"] > 1e-6


def test_it_draws_from_both_environments(metrics):
    assert any("reward/larger" in line for line in metrics)
    assert any("reward/words" in line for line in metrics)


def test_it_evaluates_when_it_is_told(metrics):
    assert ["evaluation" in line for line in metrics] == [True, False, True]
