"""The demo's policy, trained in float32 and in FP8: do the curves agree?

    python tools/fp8_curve.py imitation --steps 200
    python tools/fp8_curve.py reinforcement --seeds 0 1 --folder runs/fp8

``imitation`` runs only the demo's first phase, and prints held-out losses of fine-tuning from
random weights. ``reinforcement`` runs recipes/demo.py itself, which warms up in float32; then the
trainer and the sampling engine multiply in FP8. It writes docs/images/fp8_rewards.csv and .svg.
"""

import argparse
import contextlib
import copy
import csv
import functools
import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import torch

from primerl import fp8, loss, rollout, testing
from primerl.parallel.expert_parallel.experts import divide_experts

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs/images/fp8_rewards.svg"
EVERY = 20
FORMS = {
    "float32": None,
    "FP8": fp8.BLOCK_FP8,
    "FP8, powers of two": fp8.BLOCK_FP8_UE8M0,
}


def main() -> None:
    """Run one of the two phases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    phases = parser.add_subparsers(dest="phase", required=True)
    imitation = phases.add_parser("imitation", help="print a table of held-out losses")
    imitation.add_argument("--steps", type=int, default=200)
    imitation.add_argument("--seed", type=int, default=0)
    reinforcement = phases.add_parser("reinforcement", help="run the demo and plot its rewards")
    reinforcement.add_argument("--steps", type=int, default=50)
    reinforcement.add_argument("--groups", type=int, default=32, help="groups per step")
    reinforcement.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    reinforcement.add_argument("--folder", type=Path, required=True, help="folder of the runs")
    reinforcement.add_argument(
        "--draw", action="store_true", help="only plot the folder's runs, including unfinished ones"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.phase == "imitation":
        print_losses(args.steps, args.seed)
    else:
        reinforce(args)


def load_demo() -> ModuleType:
    """Load recipes/demo.py as a new module, which can be patched."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "recipes/demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def convert(model, form):  # noqa: ANN001, ANN201
    """Make a model's linear layers and experts multiply in FP8."""
    fp8.convert_linears(model, form=form)
    divide_experts(model, matmul=fp8.GroupedMatmul(form=form))


# Imitation


def print_losses(steps: int, seed: int) -> None:
    """Print a table of the held-out losses at every 20th step."""
    demo = load_demo()
    curves = {name: losses(demo, form, steps, seed) for name, form in FORMS.items()}
    print("| step | " + " | ".join(curves) + " |")
    for step, row in enumerate(zip(*curves.values(), strict=True)):
        print(f"| {EVERY * step} | " + " | ".join(f"{value:.4f}" for value in row) + " |")


def losses(demo, form, steps, seed, *, every=EVERY):  # noqa: ANN001, ANN201
    """Return held-out losses, every ``every`` steps and at the end; ``form`` None is float32."""
    model, tokenizer = demo.build_policy(seed)
    if form is not None:
        convert(model, form)
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijkl", k=draw.randint(2, 6))) for _ in range(4096)]
    lessons = [(f"{word}>", word[::-1]) for word in words]
    held_out, lessons = lessons[:64], lessons[64:]
    found = []

    def batches():  # noqa: ANN202
        for step in range(steps):
            if step % every == 0:
                found.append(held_out_loss(model, tokenizer, held_out))
            yield draw.sample(lessons, 64)

    testing.imitate(model, tokenizer, batches())
    found.append(held_out_loss(model, tokenizer, held_out))
    return found


def held_out_loss(model, tokenizer, lessons):  # noqa: ANN001, ANN201
    """Return the mean negative logprob of the tokens of the answers."""
    documents, wanted = [], []
    for text, answer in lessons:
        ids = tokenizer.encode(text + answer, add_special_tokens=False)
        documents.append(torch.tensor([*ids, tokenizer.eos_token_id]))
        rows = torch.arange(len(ids) + 1)  # each letter is a token; the last row has no label
        wanted.append((rows >= len(text) - 1) & (rows < len(ids)))
    token_ids = torch.cat(documents)
    position_ids = torch.cat([torch.arange(len(one)) for one in documents])
    with torch.no_grad():
        logprobs = loss.model_logprobs(model, token_ids, position_ids, token_ids.roll(-1))
    return -logprobs[torch.cat(wanted)].mean().item()


# Reinforcement


def reinforce(args: argparse.Namespace) -> None:
    """Run the demo in each format from the same warmed-up weights, and write the results.

    The results are a printed table, a CSV file and a figure. Runs that are already in the folder
    are read instead of repeated.
    """
    warm = {}
    rows = []
    print("| seed | format | steps | exact match before | after |")
    for seed in args.seeds:
        for index, (name, form) in enumerate(FORMS.items()):
            run_dir = args.folder / f"{index}-{seed}"
            if not (args.draw or summary(run_dir).get("finished")):
                demo = demo_in(form, warm)
                demo.main(
                    demo.Args(
                        seed=seed,
                        steps=args.steps,
                        groups_per_step=args.groups,
                        run_dir=str(run_dir),
                    )
                )
            found = read_run(run_dir, name, seed)
            rows += found
            exact = [summary(run_dir).get(f"eval_{when}") for when in ("before", "after")]
            cells = [seed, name, len(found), *("" if x is None else f"{x:.3f}" for x in exact)]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    with FIGURE.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    draw_rewards(rows)


def summary(run_dir: Path) -> dict[str, object]:
    """Return the summary of a run; empty if the run has not ended."""
    file = run_dir / "summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def demo_in(form, warm):  # noqa: ANN001, ANN201
    """Return the demo, patched so that trainer and engine multiply in ``form`` during RL.

    Args:
        form: the FP8 format; None for float32.
        warm: parameters after the warm-up, by seed. Those of a new seed are added.
    """
    demo = load_demo()
    warm_up = demo.warm_up

    def warm_up_and_convert(model, tokenizer, tasks, *, steps, seed):  # noqa: ANN001, ANN202
        if seed not in warm:
            warm_up(model, tokenizer, tasks, steps=steps, seed=seed)
            warm[seed] = copy.deepcopy(model.state_dict())
        model.load_state_dict(warm[seed])
        if form is not None:
            convert(model, form)

    @contextlib.contextmanager
    def open_engine(args, model):  # noqa: ANN001, ANN202
        prepare = None
        if form is not None:  # linear layers are converted: they are copies of the trainer's
            prepare = functools.partial(divide_experts, matmul=fp8.GroupedMatmul(form=form))
        with rollout.TransformersEngine(model, seed=args.seed, prepare=prepare) as engine:
            yield engine

    demo.warm_up, demo.open_engine = warm_up_and_convert, open_engine
    return demo


def read_run(run_dir: Path, name: str, seed: int) -> list[dict[str, object]]:
    """Return the reward of each step; empty if the run has not begun."""
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [
        {
            "format": name,
            "seed": seed,
            "step": line["step"],
            "reward": round(line["reward"], 4),
        }
        for line in lines
        if "reward" in line
    ]


def draw_rewards(rows: list[dict[str, object]]) -> None:
    """Plot rewards by step, with one line per run and one color per format."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fp8"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 3.5))
    for color, name in enumerate(FORMS):
        own = [row for row in rows if row["format"] == name]
        for index, seed in enumerate(sorted({row["seed"] for row in own})):
            run = [row for row in own if row["seed"] == seed]
            ax.plot(
                [row["step"] for row in run],
                [row["reward"] for row in run],
                color=f"C{color}",
                linestyle=("-", "--", ":", "-.")[index % 4],
                label=f"{name}, seed {seed}",
                linewidth=1.2,
            )
    ax.set(xlabel="step", ylabel="mean reward of trained groups")
    ax.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
