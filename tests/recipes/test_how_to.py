"""The edits of docs/recipes.md, applied to copies of the recipe, which are then run.

Those up to "start again" make one copy, the others another.
"""

import json
import re
import subprocess
import sys

import pytest
from page_edits import edited, part
from safetensors.torch import load_file

pytestmark = pytest.mark.thorough


def run(root, recipe, *arguments):
    """The lines of ``metrics.jsonl`` of a run."""
    command = [root / "tests/helpers/recipe_with_signal.py", recipe, *arguments]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=recipe.parent,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = (recipe.parent / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def recipe(root, tmp_path_factory):
    return edited(root, tmp_path_factory.mktemp("mine"), part(root, 0))


@pytest.fixture(scope="module")
def metrics(root, recipe, tiny_chat_model):
    small = ["--steps", 3, "--groups-per-step", 4, "--group-size", 4, "--eval-tasks", 2]
    small += ["--eval-every", 2, "--run-dir", recipe.parent / "run", "--lr", 1e-3]
    return run(root, recipe, "--model", tiny_chat_model, *small)


def test_the_edited_recipe_trains_with_a_reference(metrics):
    """The policy leaves the reference with its first update, and not before."""
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["tokens/ref_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics[2]["tokens/ref_kl"] > 1e-6


def test_it_draws_from_both_environments(metrics):
    assert any("reward/larger" in line for line in metrics)
    assert any("reward/words" in line for line in metrics)


def test_it_evaluates_when_it_is_told(recipe, metrics):
    lines = (recipe.parent / "run/evaluations.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines]
    played = [(line["step"], line["evaluation_rollouts"]) for line in evaluations]
    assert played == [(0, 4), (2, 4), (3, 2)]  # the last one is not edited
    assert all(line["evaluation_failed"] == 0 for line in evaluations)


@pytest.fixture(scope="module")
def other_run(root, tiny_chat_model, tmp_path_factory):
    """With adapters, two epochs, a curriculum, two turns and a sink; stopped once, and resumed."""
    recipe = edited(root, tmp_path_factory.mktemp("other"), part(root, 1))
    small = ["--groups-per-step", 4, "--group-size", 4, "--eval-tasks", 2, "--save-every", 1]
    small += ["--steps", 1, "--run-dir", recipe.parent / "run", "--lr", 1e-2]
    run(root, recipe, "--model", tiny_chat_model, *small)
    again = ["--resume", recipe.parent / "run", "--steps", 2]
    return recipe.parent, run(root, recipe, *again)


def test_only_adapters_are_trained_and_saved(other_run):
    folder, metrics = other_run

    names = list(load_file(folder / "run/final/adapter_model.safetensors"))
    assert names
    assert all(".lora_" in name for name in names)
    assert all(line["grad_norm"] > 0 for line in metrics)


def test_the_second_epoch_is_off_policy(other_run):
    """In the first pass of the first step, the policy is the one that sampled."""
    _, metrics = other_run

    assert metrics[0]["staleness_max"] == 0
    assert metrics[0]["ratio_p99"] > 1.01


def test_it_plays_two_turns(other_run):
    folder, _ = other_run
    records = (folder / "run/rollouts.jsonl").read_text()

    assert "Only the larger number, please." in records


def test_its_curriculum_begins_with_numbers_that_are_far_apart(other_run):
    folder, _ = other_run
    records = (folder / "run/rollouts.jsonl").read_text()

    pairs = {(int(a), int(b)) for a, b in re.findall(r"larger, (\d+) or (\d+)", records)}
    assert pairs
    assert all(abs(a - b) > 70 for a, b in pairs)  # of random pairs, one in ten


def test_a_sink_gets_every_step_and_a_resumed_run_goes_on(other_run):
    folder, metrics = other_run

    assert [line["step"] for line in metrics] == [0, 1]
    expected = [f"{line['step']} {line['reward']}" for line in metrics]
    assert (folder / "rewards.txt").read_text().splitlines() == expected
