"""Check that recipes/glm_swe.py learns, with a tiny GLM that an expert and hidden tests teach.

    python tools/glm_swe_learning.py --folder runs/learning      # half an hour on two cores

A mixture of experts with three million random parameters is fine-tuned (``recipes/sft.py``) on the
traces of two agents. One is the scripted expert of ``bugfix`` on the easiest tier, which rewrites
the repaired function as a whole (so small a model memorizes functions long before it can copy a
line that it reads). The other does nothing and says that the bug is fixed. Then the model is
trained by ``recipes/glm_swe.py --scale laptop``, with sandboxes, hidden tests and router replay.
The evaluation tasks are used in neither phase; they are other bugs of the same functions. In the
control run, rewards are permuted within each group. ``curve.svg`` shows both curves.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bugfix import expert

from primerl import models, rollout, testing

RECIPES = Path(__file__).parents[1] / "recipes"
TIER = "easiest"

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--folder", type=Path, required=True, help="new folder for all files")
parser.add_argument("--sft-steps", type=int, default=800)
parser.add_argument("--rl-steps", type=int, default=30)
parser.add_argument("--tasks", type=int, default=48, help="number of held-out tasks")
parser.add_argument("--seed", type=int, default=0)


def write_conversations(path: Path, *, held_out: int) -> list[dict[str, Any]]:
    """Write and return the conversations of both agents, without those on held-out tasks."""
    tasks, _ = rollout.verifiers(
        "bugfix", tokenizer=None, config={"taskset": {"tier": TIER}}
    ).tasks.split(held_out)
    left_out = {task["id"] for task in tasks}
    every = path.with_name("all.jsonl")
    run("-m", "bugfix.expert", every, "--tier", TIER, "--split", "train", "--rewrite")
    rows = [json.loads(line) for line in every.read_text().splitlines()]
    kept = [row for row in rows if row["id"] not in left_out]
    kept += [expert.without_calls(row) for row in kept]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return kept


def write_model(folder: Path, conversations: list[dict[str, Any]], *, seed: int) -> None:
    """Write a random GLM with a tokenizer that is trained on the expert's conversations."""
    plain = testing.chat_tokenizer()
    texts = [
        plain.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        for row in conversations
    ]
    tokenizer = testing.chat_tokenizer(texts, vocab_size=1024)
    model = testing.tiny_model(
        "glm4_moe",
        seed=seed,
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        intermediate_size=512,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    models.save_pretrained(model, folder, tokenizer=tokenizer)


def run(*words: Any) -> None:
    """Print a Python command, and run it."""
    print(
        "\n$ python", *[os.path.relpath(w) if isinstance(w, Path) else w for w in words], flush=True
    )
    subprocess.run([sys.executable, *map(str, words)], check=True)


def reinforce(folder: Path, model: Path, args: argparse.Namespace, *more: str) -> None:
    """Train with the rewards of hidden tests."""
    run(
        RECIPES / "glm_swe.py",
        *("--scale", "laptop", "--model", model, "--steps", args.rl_steps),
        *("--env", "bugfix", "--env-config", "tier", TIER, "--eval-tasks", args.tasks),
        *("--eval-every", 10, "--save-every", 0, "--seed", args.seed, "--run-dir", folder, *more),
    )


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return the steps of the evaluations, each with the mean reward of held-out tasks."""
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return [(line["step"], line["evaluation"]) for line in lines]


def draw(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    """Plot the held-out reward by step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="policy step", ylabel="held-out tasks solved", ylim=(0, 1))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main(args: argparse.Namespace) -> None:
    """Fine-tune, run RL and its control, and plot the curves."""
    folder = args.folder
    folder.mkdir(parents=True)
    conversations = write_conversations(folder / "traces.jsonl", held_out=args.tasks)
    write_model(folder / "random", conversations, seed=args.seed)
    run(
        RECIPES / "sft.py",
        *("--model", folder / "random", "--data", folder / "traces.jsonl"),
        *("--steps", args.sft_steps, "--batch-size", 16, "--lr", 2e-3, "--max-tokens", 1024),
        *("--dtype", "float32", "--seed", args.seed, "--run-dir", folder / "sft"),
    )
    taught = folder / "sft/final"
    reinforce(folder / "rl", taught, args)
    reinforce(folder / "control", taught, args, "--permute-rewards")
    curves = {
        "hidden tests as rewards": evaluations(folder / "rl"),
        "rewards permuted": evaluations(folder / "control"),
    }
    for name, points in curves.items():
        print(f"{name}: {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    draw(folder / "curve.svg", curves)


if __name__ == "__main__":
    main(parser.parse_args())
