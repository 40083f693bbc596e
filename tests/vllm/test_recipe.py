"""The asynchronous recipe on real vLLM: with a server of its own, and with one that runs already.

Issue 5, Shows 5.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from primerl._common.shared_folder import shared_memory

SMALL = ["--steps", "2", "--groups-per-step", "2", "--group-size", "4", "--eval-tasks", "4"]
SMALL += ["--dtype", "float32"]
# Its scorer gives a part of the reward often, so that groups have a signal.
SMALL += ["--env", "reasoning-gym:letter_counting"]
OWN_SERVER = ["--engine", "vllm", "--vllm", "max_model_len", "1024"]
OWN_SERVER += ["max_num_seqs", "32", "max_num_batched_tokens", "512"]
THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}  # of its server too
TIMEOUT_S = 600.0


class Recipe:
    """A running recipe, and all processes that it ever had."""

    def __init__(self, root, folder, model, *args, env=None):
        self.folder = folder / "run"
        command = [root / "recipes" / "async_grpo.py", *SMALL, "--model", model]
        command += ["--run-dir", self.folder, *args]
        self._before = shared()
        self.output = folder / "output"
        with self.output.open("w") as output:
            self._process = psutil.Popen(
                [sys.executable, *map(str, command)],
                cwd=folder,
                env={**os.environ, **THREADS, **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.tree = {self._process}
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self):
        while self._process.is_running():
            try:
                self.tree.update(self._process.children(recursive=True))
            except psutil.NoSuchProcess:
                return
            time.sleep(0.1)

    def wait_for_step(self):
        """Until a step was trained."""
        metrics, deadline = self.folder / "metrics.jsonl", time.monotonic() + TIMEOUT_S
        while not (metrics.exists() and metrics.read_text()):
            assert self._process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def end(self, how=None):
        """Its exit code and its output; ``how`` is a signal that it is sent."""
        if how is not None and self._process.is_running():
            self._process.send_signal(how)
        try:
            return self._process.wait(TIMEOUT_S), self.output.read_text()
        except psutil.TimeoutExpired:
            raise AssertionError(self.output.read_text()) from None
        finally:
            if self._process.is_running():
                self._process.kill()  # the rest ends with it

    def check_nothing_left(self, *, within_s=20.0, shared_too=True):
        left = psutil.wait_procs(self.tree, timeout=within_s)[1]
        assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
        assert len(self.tree) > 1
        assert not shared_too or shared() - self._before == set()


def shared():
    return {path.name for path in Path(shared_memory()).iterdir() if "primerl" in path.name}


def check_run(folder):
    """Both steps were trained on what the engine sampled by the weights that it names."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["tokens"] > 0
        assert 0 <= line["mismatch_kl"] < 1e-8
        assert line.get("dropped/unverified", 0) == 0
        assert line["canary_difference"] < 1e-3
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert "error" not in summary
    assert 0 <= summary["eval_after"] <= 1
    assert (folder / "final" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def recipes(root, smollm2, tied_experts, pair, tmp_path_factory):
    """One of each kind, at the same time: each waits a lot."""
    own = Recipe(root, tmp_path_factory.mktemp("own"), smollm2, *OWN_SERVER, "--max-tokens", "24")
    by_hand = pair[1]
    # By chance a tiny model hits the number, if it may say many.
    args = ["--engine-urls", by_hand.url, "--max-tokens", "100"]
    env = {"PRIMERL_API_KEY": by_hand.api_key}
    other = Recipe(root, tmp_path_factory.mktemp("other"), tied_experts, *args, env=env)
    yield own, other
    for recipe in (own, other):
        recipe.end(signal.SIGKILL)


def test_the_recipe_starts_a_server_trains_and_leaves_nothing(recipes):
    own, other = recipes
    other.end()  # which shares memory too
    code, output = own.end()
    assert code == 0, output
    check_run(own.folder)
    own.check_nothing_left()


def test_a_running_server_is_used_and_keeps_running(recipes, pair):
    _, recipe = recipes
    code, output = recipe.end()
    assert code == 0, output
    assert pair[1].api_key not in output
    check_run(recipe.folder)
    recipe.check_nothing_left()
    assert pair[1].alive


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_recipe_stopped_by_a_signal_leaves_no_process(root, smollm2, tmp_path, how):
    recipe = Recipe(root, tmp_path, smollm2, *OWN_SERVER, "--max-tokens", "24")
    recipe.wait_for_step()
    code, output = recipe.end(how)
    assert code != 0, output
    # What is shared by those who were killed is removed by the next one who shares anything.
    recipe.check_nothing_left(shared_too=how == signal.SIGINT)
