"""Speed of the SFT recipe on a CPU, compared with the SFT trainer of ``trl``.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_sft.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

Both sides train SmolLM2-135M on the replies of the same conversations, with 32 conversations per
step, whose lengths vary like those of chats. The sides take turns, and each turn is a separate run.
The rate is the number of tokens without padding per second of wall time, from the end of a run's
second step to the end of its last step. This excludes initial loading and compilation.

- shipped: ``recipes/sft.py`` with its defaults; ``SFTTrainer`` with a model and a dataset, as in
  its quickstart, and with its defaults. The exceptions are the number of conversations per step (4
  micro-batches of 8) and ``use_cpu``, without which it refuses to start.
- tuned: the recipe with ``--compile``; trl with a bfloat16 model (the recipe trains float32
  parameters) whose activations are kept, and an allocator that keeps freed memory.

The environment variable SFT_ROUNDS sets the number of turns; the default is 3.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/sft.py"
ROUNDS = int(os.environ.get("SFT_ROUNDS", 3))
STEPS, SKIPPED = 6, 2  # steps per run, and how many of them are not counted
CONVERSATIONS = 32  # per step
FLAGS = {"shipped": [], "tuned": ["--compile"]}
TRL_TUNED = {"gradient_checkpointing": False, "model_init_kwargs": {"dtype": "bfloat16"}}
TRL_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "200000",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def write_conversations(path):
    """Write questions and replies of common words, with lognormal lengths (median 100 tokens)."""
    from primerl import testing

    words = testing.words()
    generator = random.Random(0)

    def text(median):
        count = max(3, round(generator.lognormvariate(0, 0.8) * median))
        return " ".join(generator.choices(words, k=min(count, 400)))

    with path.open("w") as file:
        for _ in range(STEPS * CONVERSATIONS):
            question = {"role": "user", "content": text(12)}
            reply = {"role": "assistant", "content": text(25)}
            file.write(json.dumps({"messages": [question, reply]}) + "\n")


def ours(kind, model, conversations):
    """Run the recipe, and return its tokens per second."""
    folder = tempfile.mkdtemp()
    command = [RECIPE, "--model", model, "--data", conversations, "--steps", STEPS]
    command += ["--batch-size", CONVERSATIONS, "--save-every", 0, "--run-dir", f"{folder}/run"]
    run(f"ours-{kind}", [*command, *FLAGS[kind]], {})
    lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][SKIPPED - 1 :]
    tokens = sum(step["tokens"] for step in steps[1:])
    return tokens / (steps[-1]["time"] - steps[0]["time"])


def theirs(kind, model, conversations):
    """Run ``trl``, and return its tokens per second."""
    answer = Path(tempfile.mkdtemp()) / "times.json"
    environment = TRL_ENVIRONMENT if kind == "tuned" else {}
    run(f"trl-{kind}", [__file__, kind, model, conversations, answer], environment)
    found = json.loads(answer.read_text())
    times = found["times"][SKIPPED - 1 :]
    return found["tokens_per_step"] * (len(times) - 1) / (times[-1] - times[0])


def run(name, command, environment):
    log = Path(os.environ.get("STEP_LOGS", tempfile.gettempdir())) / f"sft-{name}.log"
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env={**inherited, "HF_HUB_OFFLINE": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, f"see {log}"


def train_with_trl(kind, model, conversations, answer):
    """Run the quickstart of ``trl``, and write the end times of its steps to ``answer``."""
    import datasets
    import transformers
    import trl

    rows = [
        json.loads(line)["messages"]
        for line in Path(conversations).read_text(encoding="utf-8").splitlines()
    ]
    dataset = datasets.Dataset.from_dict(
        {"prompt": [row[:1] for row in rows], "completion": [row[1:] for row in rows]}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer.apply_chat_template(row)["input_ids"]) for row in rows]
    times = []

    class Record(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # noqa: ARG002
            times.append(time.time())

    settings = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=CONVERSATIONS // 8,
        max_steps=STEPS,
        save_strategy="no",
        report_to=[],
        **(TRL_TUNED if kind == "tuned" else {}),
    )
    trl.SFTTrainer(model=model, args=settings, train_dataset=dataset, callbacks=[Record()]).train()
    tokens_per_step = statistics.fmean(lengths) * CONVERSATIONS
    found = {"times": times, "tokens_per_step": tokens_per_step}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.parametrize("kind", ["shipped", "tuned"])
@pytest.mark.benchmark(group="SFT of SmolLM2-135M", warmup=False)
def test_the_recipe_against_trl(benchmark, tmp_path, kind):
    pytest.importorskip("trl")
    from primerl import testing

    model = os.environ.get("PRIMERL_SMOLLM2") or str(testing.smollm2(tmp_path / "smollm2"))
    conversations = tmp_path / "conversations.jsonl"
    write_conversations(conversations)
    rates = {"ours": [], "trl": []}

    def their_turn():
        rates["trl"].append(theirs(kind, model, conversations))

    def our_turn():
        rates["ours"].append(ours(kind, model, conversations))

    benchmark.pedantic(our_turn, setup=their_turn, rounds=ROUNDS, iterations=1)

    ratio = statistics.median(o / t for o, t in zip(*rates.values(), strict=True))
    medians = {side: statistics.median(of_side) for side, of_side in rates.items()}
    print(f"\n{kind}: tokens per second: {medians}; ours over trl: {ratio:.2f}", flush=True)
    benchmark.extra_info.update(rates=rates, ratio=ratio)
    assert ratio >= 1.0


if __name__ == "__main__":
    train_with_trl(*sys.argv[1:])
