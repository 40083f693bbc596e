"""Lines of the README and of recipes' docstrings on a machine with one GPU, for a few steps.

All lines run at the same time: most of it goes into imports, and they use little of a GPU.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from descendants import descendants
from leftovers import Leftovers
from sandboxed import reason_against

from primerl import models, testing

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LINE_S = 140
NEEDED = {  # packages
    "glm_swe": ("verifiers", "bugfix"),
    "evaluate": ("verifiers", "reverse_words"),
    "road": ("verifiers", "reverse_words"),
}


def examples(root):
    """Return the README's Python code."""
    return re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)


def commands(root, model, counting_model):
    """Return the Python commands of each line, which run in an empty folder."""
    recipes = root / "recipes"
    grpo = ["--model", counting_model, "--steps", 2, "--groups-per-step", 2, "--group-size", 16]
    grpo += ["--eval-tasks", 2, "--run-dir", "run"]
    embedded = ["--engine", "transformers", "--dtype", "bfloat16"]
    words = ["--env", "reverse-words", "--max-tokens", 8]
    two = ["--steps", 2, "--run-dir", "run"]
    debug = ["--scale", "debug", "--eval-tasks", 0, *two]
    distilled = ["--model", model, "--teacher", model, "--groups-per-step", 4, "--eval-tasks", 2]
    sampled = ["--groups-per-step", 4, "--group-size", 8, "--eval-tasks", 4]
    tasks = ["--samples", 4, "--tasks", 3, "--run-dir", "run"]
    sft = ["--model", "random", "--data", "chats.jsonl", "--steps", 3, "--max-tokens", 32]
    rl = ["--model", "sft/final", "--steps", 1, "--run-dir", "run"]
    return {
        "glm_swe": [[*TORCHRUN, recipes / "glm_swe.py", *debug]],
        "dry run": [[recipes / "glm_swe.py", "--scale", "glm5", "--dry-run"]],
        "demo": [[*TORCHRUN, recipes / "demo.py", "--warmup-steps", 20, *two]],
        "async_grpo": [[recipes / "async_grpo.py", *grpo, *embedded]],
        "sync_grpo": [[recipes / "sync_grpo.py", *grpo]],
        "distill": [[recipes / "distill.py", *distilled, *two, *embedded]],
        "evaluate": [[recipes / "evaluate.py", "--model", model, *words, *tasks, *embedded]],
        "road": [  # the stages of make road that train
            ["-c", write_road(root / "tools")],
            [recipes / "sft.py", *sft, "--run-dir", "sft"],
            [recipes / "async_grpo.py", *rl, *words, *sampled, *embedded],
        ],
        "README's loss": [["-c", examples(root)[0]]],
        "README's run": [["run.py"]],
    }


def write_road(tools):
    """Return a program that writes the model and the conversations of ``make road``."""
    return (
        f"import sys; sys.path.insert(0, {str(tools)!r})\n"
        "from pathlib import Path\n"
        "from whole_road import write_conversations, write_model\n"
        "write_model(Path('random'), seed=0)\n"
        "write_conversations(Path('chats.jsonl'), held_out=16, seed=0)\n"
    )


def steps_of(folder):
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_two_ranks_on_the_cpu(folder, said):
    assert "2 ranks train on the CPU" in said
    check_two_steps(folder, said)


def check_two_steps(folder, _):
    assert [line["step"] for line in steps_of(folder)] == [0, 1]


def check_the_plan(_, said):
    assert "16 x 8 GPUs" in said


def check_the_mismatch(folder, said):
    check_two_steps(folder, said)
    lines = steps_of(folder)
    # A step that trains no token of its own version has none.
    measured = [line["mismatch_kl"] for line in lines if line["mismatch_kl"] is not None]
    assert measured
    assert max(measured) < 1e-2


def check_scores(folder, _):
    scores = json.loads((folder / "run/summary.json").read_text())["scores"]
    assert 0 <= scores["reverse-words"]["reward"]["mean"] <= 1


def check_the_road(folder, _):
    assert len(steps_of(folder)) == 1
    assert (folder / "run/final/config.json").exists()


def check_the_loss(_, said):
    assert "tensor([-1.2214,  1.0000]" in said


def check_the_run(_, said):
    assert "step 2/2" in said


CHECKS = {
    "glm_swe": check_two_ranks_on_the_cpu,
    "dry run": check_the_plan,
    "demo": check_two_steps,
    "async_grpo": check_the_mismatch,
    "sync_grpo": check_the_mismatch,
    "distill": check_two_steps,
    "evaluate": check_scores,
    "road": check_the_road,
    "README's loss": check_the_loss,
    "README's run": check_the_run,
}


def reason_to_skip(name):
    absent = [module for module in NEEDED.get(name, ()) if not importlib.util.find_spec(module)]
    if absent:
        return f"{', '.join(absent)} is not installed"
    if name == "glm_swe" and (reason := reason_against()):
        return f"no sandboxes here: {reason}"
    return None


class Line:
    """The commands of a line, in turn, in a process of its own.

    It stays in the process group of the tests, so that it ends with them.
    """

    def __init__(self, words, folder):
        script = " && ".join(shlex.join([sys.executable, *map(str, one)]) for one in words)
        self.folder = folder
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self):
        """Wait for the end, and return the output."""
        try:
            code = self.process.wait(LINE_S)
        except subprocess.TimeoutExpired:
            code = f"not ended after {LINE_S} s"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        assert code == 0, f"{code}: {text[-3000:]}"
        return text

    def end(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                for pid in (*descendants(self.process.pid), self.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Leave it to ``lines`` to look for leftovers: during a test, the lines of others still run."""


@pytest.fixture(scope="module")
def counting_model(tmp_path_factory):
    """Return a model that answers with random digits: one reply in 500 has the right number.

    With more characters, hardly any group of GRPO would have a signal.
    """
    tokenizer = testing.character_tokenizer("0123456789 ")
    model = testing.tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    folder = tmp_path_factory.mktemp("models") / "counting"
    models.save_pretrained(model, folder, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def lines(request, root, tmp_path_factory, tiny_chat_model, counting_model):
    """Start the lines of all selected tests, and return them by name."""
    before = Leftovers()
    selected = {
        item.callspec.params["name"] for item in request.session.items if item.path == request.path
    }
    started = {}
    for name, words in commands(root, tiny_chat_model, counting_model).items():
        if name in selected and reason_to_skip(name) is None:
            folder = tmp_path_factory.mktemp("line")
            (folder / "smollm2").symlink_to(tiny_chat_model)
            (folder / "run.py").write_text(examples(root)[1])
            started[name] = Line(words, folder)
    yield started
    for line in started.values():
        line.end()
    found = before.found()
    assert not found, f"the lines left behind: {'; '.join(found)}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_line_runs(lines, name):
    if reason := reason_to_skip(name):
        pytest.skip(reason)
    line = lines[name]
    CHECKS[name](line.folder, line.said())
