"""The flagship recipe on a real vLLM server, which it starts, with sandboxes and deltas."""

import json
import os
import subprocess
import sys

from sandboxed import needed

from primerl import testing

TIMEOUT_S = 600.0


def test_the_flagship_recipe_trains_on_what_vllm_samples(root, tmp_path):
    needed()
    model = testing.tiny_chat_model(
        tmp_path / "model",
        "glm4_moe",
        hidden_size=128,  # with 4 heads: vLLM's kernels for CPUs take heads of 32
        moe_intermediate_size=32,
        max_position_embeddings=4096,
    )
    folder = tmp_path / "run"
    command = [sys.executable, root / "recipes" / "glm_swe.py", "--model", model]
    command += ["--ep", "1", "--cp", "1", "--steps", "2", "--eval-tasks", "2"]
    # vLLM's build for CPUs has no experts in FP8 and returns no routes.
    command += ["--engine", "vllm", "--fp8-block", "0", "--no-replay", "--dtype", "float32"]
    command += ["--max-num-seqs", "16"]
    command += ["--vllm", "enforce_eager", "True", "max_num_batched_tokens", "512"]
    command += ["--run-dir", folder]
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tmp_path,
        env={**os.environ, **threads},
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_s" in line]
    assert [line["step"] for line in steps] == [0, 1]
    for line in steps:
        assert line["tokens"] > 0
        assert line["canary_difference"] < 1e-3
    # Of the trainer's own weights, only those of the first step are sure to be sampled from.
    assert 0 <= steps[0]["mismatch_kl"] < 1e-8
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert "error" not in summary
    assert (folder / "final" / "model.safetensors").is_file()
