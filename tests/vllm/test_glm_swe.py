"""The flagship recipe on a real vLLM server, which it starts, with sandboxes and deltas."""

import json
import os
import subprocess
import sys

import pytest
from sandboxed import needed

pytest.importorskip("verifiers")
pytest.importorskip("bugfix", reason="pip install --no-deps -e recipes/environments/bugfix")
from bugfix import rehearsal

TIMEOUT_S = 600.0


def run(command, folder):
    """Run the recipe in a folder, and return the lines of its steps."""
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [*map(str, command), "--run-dir", "run"],
        cwd=folder,
        env={**os.environ, **threads},
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step_s" in line]


@pytest.mark.slow
def test_the_flagship_recipe_with_separate_servers_for_prefill_and_decode(root, tmp_path):
    needed()
    command = [sys.executable, root / "recipes" / "glm_swe.py", "--scale", "fleet", "--steps", "2"]
    steps = run(command, tmp_path)
    assert [line["step"] for line in steps] == [0, 1]
    assert 0 <= steps[0]["mismatch_kl"] < 1e-8
    assert all(line["canary_difference"] < 1e-3 for line in steps)
    assert sum(line.get("engine_external_hits", 0) for line in steps) > 0


def test_the_flagship_recipe_trains_on_what_vllm_samples(root, tmp_path):
    needed()
    model = rehearsal.policy(
        tmp_path / "model",
        "glm4_moe",
        hidden_size=128,  # with 4 heads: vLLM's kernels for CPUs take heads of 32
        moe_intermediate_size=32,
        max_position_embeddings=4096,
    )
    folder = tmp_path / "run"
    receipts = tmp_path / "receipts"
    recorded = root / "tests" / "helpers" / "recorded_receipts.py"
    command = [sys.executable, recorded, receipts, root / "recipes" / "glm_swe.py"]
    command += ["--model", model, "--ep", "1", "--cp", "1", "--steps", "3"]
    # vLLM's build for CPUs has no experts in FP8 and returns no routes.
    command += ["--engine", "vllm", "--fp8-block", "0", "--no-replay", "--dtype", "float32"]
    command += ["--max-num-seqs", "16"]
    command += ["--vllm", "enforce_eager", "True", "max_num_batched_tokens", "512"]
    steps = run(command, tmp_path)

    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps:
        assert line["tokens"] > 0
        assert line["canary_difference"] < 1e-3
        assert line["reward_std"] > 0.1
        assert line["grad_norm"] > 1e-3
    # Of the trainer's own weights, only those of the first step are sure to be sampled from.
    assert 0 <= steps[0]["mismatch_kl"] < 1e-8
    written = [json.loads(line) for line in receipts.read_text().splitlines()]
    published = {receipt["version"]: receipt for receipt in written}
    assert sorted(published) == [0, 1, 2]  # the last one is not waited for by the loop
    assert len({one["digest"] for one in published.values()}) == 3  # the weights moved each time
    assert all(set(one["workers"]) == {one["digest"]} for one in published.values())
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert "error" not in summary
    assert (folder / "final" / "model.safetensors").is_file()
