"""The demo's policy, fine-tuned in float32 and in FP8 on the same data: held-out losses.

    python tools/fp8_curve.py --steps 200

That is the demo's first phase, in which it imitates a teacher (300 steps of AdamW by default).
"""

import argparse
import importlib.util
import random
from pathlib import Path

import torch

from primerl import fp8, testing
from primerl.parallel.expert_parallel.experts import divide_experts

EVERY = 20


def main() -> None:
    """Print a table of both curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(
        "demo", Path(__file__).parents[1] / "recipes/demo.py"
    )
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    forms = {
        "float32": None,
        "FP8": fp8.BLOCK_FP8,
        "FP8, powers of two": fp8.BLOCK_FP8_UE8M0,
    }
    curves = {name: curve(demo, form, args.steps, args.seed) for name, form in forms.items()}
    print("| step | " + " | ".join(curves) + " |")
    for step, row in enumerate(zip(*curves.values(), strict=True)):
        print(
            f"| {EVERY * step} | " + " | ".join(f"{value:.4f}" for value in row) + " |", flush=True
        )


def curve(demo, form, steps, seed):  # noqa: ANN001, ANN201
    """Held-out losses of every 20th step; ``form`` is None for float32."""
    model, tokenizer = demo.build_policy(seed)
    if form is not None:
        fp8.convert_linears(model, form=form)
        divide_experts(model, matmul=fp8.GroupedMatmul(form=form))
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijkl", k=draw.randint(2, 6))) for _ in range(4096)]
    lessons = [(f"{word}>", word[::-1]) for word in words]
    held_out, lessons = lessons[:64], lessons[64:]
    losses = []

    def batches():  # noqa: ANN202
        for step in range(steps):
            if step % EVERY == 0:
                losses.append(held_out_loss(model, tokenizer, held_out))
            yield draw.sample(lessons, 64)

    testing.imitate(model, tokenizer, batches())
    losses.append(held_out_loss(model, tokenizer, held_out))
    return losses


@torch.no_grad()
def held_out_loss(model, tokenizer, lessons):  # noqa: ANN001, ANN201
    """The mean negative logprob of the continuations' tokens."""
    total = count = 0.0
    for text, answer in lessons:
        ids = [*tokenizer.encode(text + answer, add_special_tokens=False), tokenizer.eos_token_id]
        row = torch.tensor([ids])
        logprobs = model(input_ids=row).logits[0].log_softmax(-1)
        own = logprobs[:-1].gather(-1, row[0, 1:, None])[len(text) - 1 :, 0]
        total, count = total - own.sum().item(), count + len(own)
    return total / count


if __name__ == "__main__":
    main()
