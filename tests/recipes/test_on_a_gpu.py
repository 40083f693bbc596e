"""Lines of the README and of recipes' docstrings on a machine with one GPU, for a few steps."""

import json
import subprocess
import sys

import pytest
from sandboxed import needed

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(*command, cwd):
    """Run a recipe in the environment of the tests, and return its output."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def steps_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.gpu
def test_the_rehearsal_runs_two_ranks_on_the_cpu(root, tmp_path):
    pytest.importorskip("verifiers")
    pytest.importorskip("bugfix")
    needed()
    flags = ["--scale", "debug", "--steps", 2, "--eval-tasks", 0, "--run-dir", "run"]

    said = run(*TORCHRUN, root / "recipes/glm_swe.py", *flags, cwd=tmp_path)

    assert "2 ranks train on the CPU" in said
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [0, 1]


@pytest.mark.gpu
def test_the_demo_runs_two_ranks_on_the_cpu(root, tmp_path):
    flags = ["--warmup-steps", 20, "--steps", 2, "--run-dir", "run"]

    run(*TORCHRUN, root / "recipes/demo.py", *flags, cwd=tmp_path)

    assert len(steps_of(tmp_path / "run")) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["async_grpo", "sync_grpo"])
def test_grpo_samples_and_trains_on_the_gpu(root, tmp_path, tiny_chat_model, recipe):
    flags = ["--model", tiny_chat_model, "--steps", 3, "--groups-per-step", 4, "--group-size", 4]
    flags += ["--eval-tasks", 2, "--run-dir", "run"]
    if recipe == "async_grpo":
        flags += ["--engine", "transformers", "--dtype", "bfloat16"]

    run(root / f"recipes/{recipe}.py", *flags, cwd=tmp_path)

    lines = steps_of(tmp_path / "run")
    assert len(lines) == 3
    assert all((line["mismatch_kl"] or 0.0) < 1e-2 for line in lines)
