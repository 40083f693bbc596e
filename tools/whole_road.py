"""Run the recipes end to end on a laptop: fine-tune a random model, evaluate, run RL, evaluate.

    python tools/whole_road.py --folder runs/road     # make road: about three minutes on two cores

The recipes are not modified. The problem is to reverse words. The conversations for fine-tuning
come from a teacher that reverses short words but copies most of the long ones; rewards then teach
the rest. The evaluation words occur in neither phase. The script fails if a phase brings no
improvement.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from primerl import models, rollout, testing

RECIPES = Path(__file__).parents[1] / "recipes"
ENVIRONMENT = "reverse-words"
INSTRUCTION = "Reverse the letters of this word, and reply with nothing else: "
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '>' if message.role == 'user' else eos_token }}{% endfor %}"
)
LONG = 5  # letters that make a word long
LONG_REVERSED = 0.2  # fraction of long words that the teacher reverses


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--folder", type=Path, required=True, help="new folder for all files")
parser.add_argument("--sft-steps", type=int, default=300)
parser.add_argument("--rl-steps", type=int, default=30)
parser.add_argument("--tasks", type=int, default=256, help="number of held-out words")
parser.add_argument("--seed", type=int, default=0)


def write_model(folder: Path, *, seed: int) -> None:
    """Write a Qwen3-MoE with 1.3 million random parameters and one token per letter."""
    tokenizer = testing.character_tokenizer("abcdefghijklmnopqrstuvwxyz>")
    tokenizer.add_tokens([INSTRUCTION])
    tokenizer.chat_template = TEMPLATE
    model = testing.tiny_model(
        "qwen3_moe",
        seed=seed,
        vocab_size=len(tokenizer),
        hidden_size=128,
        head_dim=32,
        num_hidden_layers=3,
        num_experts=8,
        moe_intermediate_size=128,
        max_position_embeddings=64,
    )
    models.save_pretrained(model, folder, tokenizer=tokenizer)


def write_conversations(path: Path, *, held_out: int, seed: int) -> None:
    """Write the teacher's conversations on words that are not held out."""
    draw = random.Random(seed)
    _, tasks = rollout.verifiers(ENVIRONMENT, tokenizer=None).tasks.split(held_out)
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            word, answer = task["data"]["id"], task["data"]["answer"]
            copies = len(word) >= LONG and draw.random() >= LONG_REVERSED
            messages = [
                {"role": "user", "content": task["prompt"]},
                {"role": "assistant", "content": word if copies else answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def run(recipe: str, *arguments: Any) -> None:
    """Print the command of a recipe, and run it."""
    words = [str(RECIPES / recipe), *map(str, arguments)]
    print("\n$ python", " ".join(os.path.relpath(words[0]).split() + words[1:]), flush=True)
    subprocess.run([sys.executable, *words], check=True)


def measure(model: Path, result: Path, args: argparse.Namespace, *more: Any) -> float:
    """Return the mean reward on held-out words."""
    run(
        "evaluate.py",
        *("--env", ENVIRONMENT, "--model", model, "--tasks", args.tasks, "--max-tokens", 8),
        *("--dtype", "float32", "--temperature", 0, "--run-dir", result, *more),
    )
    scores = json.loads((result / "summary.json").read_text())["scores"]
    return float(scores[ENVIRONMENT]["reward"]["mean"])


def main(args: argparse.Namespace) -> None:
    """Make a model and conversations, and run the recipes with them."""
    folder = args.folder
    folder.mkdir(parents=True)
    write_model(folder / "random", seed=args.seed)
    write_conversations(folder / "chats.jsonl", held_out=args.tasks, seed=args.seed)
    numbers = {"random": measure(folder / "random", folder / "random-measured", args)}
    run(
        "sft.py",
        *("--model", folder / "random", "--data", folder / "chats.jsonl"),
        *("--steps", args.sft_steps, "--batch-size", 64, "--lr", 2e-3, "--max-tokens", 32),
        *("--dtype", "float32", "--seed", args.seed, "--run-dir", folder / "sft"),
    )
    fine_tuned = folder / "sft/final"
    numbers["fine-tuned"] = measure(fine_tuned, folder / "sft-measured", args)
    run(
        "async_grpo.py",
        *("--model", fine_tuned, "--env", ENVIRONMENT, "--steps", args.rl_steps),
        *("--groups-per-step", 32, "--group-size", 8, "--lr", 3e-4, "--max-tokens", 8),
        *("--eval-tasks", args.tasks, "--eval-every", 0, "--save-every", 0),
        *("--dtype", "float32", "--seed", args.seed, "--run-dir", folder / "rl"),
    )
    numbers["reinforced"] = measure(
        folder / "rl/final", folder / "rl-measured", args, "--against", folder / "sft-measured"
    )

    print("\nmean reward of held-out words")
    for name, value in numbers.items():
        print(f"  {name:<12} {value:.3f}")
    values = list(numbers.values())
    if values != sorted(set(values)):
        raise SystemExit("a step brought no improvement")


if __name__ == "__main__":
    main(parser.parse_args())
