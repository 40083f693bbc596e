"""A run of six steps for a Slurm job. Unless it is resumed, it hangs after its third step.

The file ``steps`` in its folder lists the steps that it took.
"""

import argparse
import time
from pathlib import Path

import torch

from primerl import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir", type=Path, required=True)
parser.add_argument("--resume", type=Path)
args, _ = parser.parse_known_args()

model = torch.nn.Linear(2, 2)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = checkpoint.last_good(args.resume)
with checkpoint.Checkpoints(args.run_dir, model, optimizer, every=2, last=6) as checkpoints:
    for step in range(checkpoints.load(saved), 6):
        with (args.run_dir / "steps").open("a", encoding="utf-8") as file:
            file.write(f"{step}\n")
        with torch.no_grad():
            model.bias += 1
        if checkpoints.due(step + 1):
            checkpoints.save(step + 1, wait=True)
        if step == 2 and args.resume is None:
            time.sleep(600)
    print(f"trained {step + 1} steps, bias {model.bias[0].item():.0f}")
