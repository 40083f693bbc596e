"""Speed of the async GRPO recipe on a CPU, compared with the GRPO trainer of ``trl``.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_step.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

The benchmark needs trl, 12 GB of memory, and vLLM for two of its three cases. Both sides train
SmolLM2-135M with GRPO on the recipe's own tasks and reward, with 8 rollouts per task and at most
16 tokens per reply. The sides take turns, and each turn is a separate run. The rate is the number
of trained tokens per second of wall time, from the end of a run's second step to the end of its
last step. This excludes initial loading, compilation and filling of the pipeline.

- default engine: ``recipes/async_grpo.py`` with its defaults where vLLM is not installed, so the
  engine is in the trainer's process; ``GRPOTrainer`` with a model, a reward and a dataset, as in
  its quickstart, and with its defaults. The exceptions are the length of a reply and ``use_cpu``,
  without which it refuses to start.
- shipped: the recipe with its defaults where vLLM is installed; trl as above.
- tuned: the recipe with ``--compile`` and a compiled server; trl with the settings that were
  fastest here: a bfloat16 model (the recipe trains float32 parameters) whose activations are kept,
  micro-batches of 16, and an allocator that keeps freed memory. A step has 128 rollouts on both
  sides.

trl computes in bfloat16 by default. Processors without its instructions emulate it: there, trl is
given float32, in which it was ten times as fast. The recipe chooses float32 there by itself.

The recipe drops groups whose rewards are all equal, so it samples more than it trains. trl trains
on all groups, and all of its tokens are counted. The environment variable STEP_ROUNDS sets the
number of turns; the default is 3.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/async_grpo.py"
ROUNDS = int(os.environ.get("STEP_ROUNDS", 3))
SKIPPED = 2  # steps per run that are not counted
STEPS = {"ours": 12, "trl quickstart": 14, "trl tuned": 5}
OUR_FLAGS = {
    "default engine": ["--engine", "transformers"],
    "shipped": ["--engine", "vllm"],
    "tuned": [
        *("--engine", "vllm", "--vllm", "enforce_eager", "False"),
        *("--compile", "--groups-per-step", "16", "--pack-tokens", "4096"),
    ],
}
THEIRS = {"default engine": "quickstart", "shipped": "quickstart", "tuned": "tuned"}
GROUP, TOKENS = 8, 16
TRL_TUNED = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 8,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "bfloat16"},
}
TRL_FLOAT32 = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}
TRL_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "200000",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def ours(kind, model):
    """Run the recipe, and return the metrics of each counted step."""
    folder = tempfile.mkdtemp()
    command = [RECIPE, "--model", model, "--steps", STEPS["ours"], *OUR_FLAGS[kind]]
    command += ["--eval-tasks", 0, "--save-every", 0, "--run-dir", f"{folder}/run"]
    run(f"ours-{kind.replace(' ', '-')}", command, {})
    lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][SKIPPED - 1 :]


def theirs(kind, model):
    """Run ``trl``, as its quickstart or tuned, and return the metrics of each counted step."""
    answer = Path(tempfile.mkdtemp()) / "steps.json"
    environment = TRL_ENVIRONMENT if kind == "tuned" else {}
    run(f"trl-{kind}", [__file__, kind, model, answer], environment)
    return json.loads(answer.read_text())[SKIPPED - 1 :]


def run(name, command, environment):
    log = Path(os.environ.get("STEP_LOGS", tempfile.gettempdir())) / f"step-{name}.log"
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


def train_with_trl(kind, model, answer):
    """Run the quickstart of ``trl``, and write its logged metrics to the file ``answer``."""
    import datasets
    import transformers
    import trl

    from primerl import parallel

    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    steps = []
    given = TRL_TUNED if kind == "tuned" else {}

    class Record(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **_):  # noqa: ARG002
            if "completions/mean_length" in logs:
                rollouts = args.per_device_train_batch_size * args.gradient_accumulation_steps
                trained = logs["completions/mean_length"] * rollouts
                steps.append({"time": time.time(), "trained_tokens": trained})

    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_completion_length=TOKENS,
        num_generations=GROUP,
        max_steps=STEPS[f"trl {kind}"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **(given if parallel.native_dtype() == "bfloat16" else {**given, **TRL_FLOAT32}),
    )
    tasks = recipe.build_tasks(seed=0)

    def reward(completions, answer, **_):
        return [
            recipe.reward({"answer": right}, completion[0]["content"])
            for completion, right in zip(completions, answer, strict=True)
        ]

    dataset = datasets.Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": task["prompt"]}] for task in tasks],
            "answer": [task["answer"] for task in tasks],
        }
    )
    trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=dataset,
        callbacks=[Record()],
    ).train()
    Path(answer).write_text(json.dumps(steps), encoding="utf-8")


def rate(steps):
    """Return trained tokens per second, from the end of the first step to that of the last."""
    tokens = sum(step["trained_tokens"] for step in steps[1:])
    return tokens / (steps[-1]["time"] - steps[0]["time"])


@pytest.mark.parametrize(
    ("kind", "at_least"), [("default engine", 5.0), ("shipped", 8.0), ("tuned", 4.0)]
)
@pytest.mark.benchmark(group="GRPO of SmolLM2-135M", warmup=False)
def test_the_recipe_against_trl(benchmark, tmp_path, kind, at_least):
    pytest.importorskip("trl")
    if kind != "default engine":
        pytest.importorskip("vllm")
    from primerl import testing

    model = os.environ.get("PRIMERL_SMOLLM2") or str(testing.smollm2(tmp_path / "smollm2"))
    rates = {"ours": [], "trl": []}
    all_steps = []

    def their_turn():
        rates["trl"].append(rate(theirs(THEIRS[kind], model)))

    def our_turn():
        steps = ours(kind, model)
        rates["ours"].append(rate(steps))
        all_steps.extend(steps[1:])

    benchmark.pedantic(our_turn, setup=their_turn, rounds=ROUNDS, iterations=1)

    ratio = statistics.median(o / t for o, t in zip(*rates.values(), strict=True))
    medians = {side: statistics.median(of_side) for side, of_side in rates.items()}
    print(f"\n{kind}: trained tokens per second: {medians}; ours over trl: {ratio:.2f}")
    ours_goes = {
        name: statistics.median(step[name] for step in all_steps)
        for name in ("step_s", "trainer_wait_s", "publish_s", "trained_tokens")
    }
    print(f"of our step: {ours_goes}", flush=True)
    benchmark.extra_info.update(rates=rates, ratio=ratio, ours_goes=ours_goes)
    assert ratio >= at_least


if __name__ == "__main__":
    train_with_trl(*sys.argv[1:])
