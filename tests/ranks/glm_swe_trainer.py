"""Run in tests/recipes/test_glm_swe.py: the recipe's own trainer, on ranks and on one process."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch

from primerl import loss, models, packing, parallel, replay
from primerl._common.ranks import whole
from primerl.types import TrainingSample


def load(path):
    spec = importlib.util.spec_from_file_location("glm_swe", path)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["glm_swe"] = recipe  # where tyro looks for the comments of arguments
    spec.loader.exec_module(recipe)
    return recipe


def samples():
    draw = np.random.default_rng(0)
    made = []
    for length in (40, 25, 33):
        mask = np.arange(length) >= 10
        made.append(
            TrainingSample(
                token_ids=draw.integers(3, 250, length),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -5.5, 0.0),
                versions=np.where(mask, 0, -1),
                advantages=np.where(mask, draw.normal(), 0.0),
            )
        )
    return made


def step(recipe, folder, world, **sizes):
    """One policy step as the recipe makes it: its loss, its gradient's norm and its weights."""
    args = recipe.Args()
    mesh = parallel.mesh(**sizes)
    model = models.empty_model(folder)
    recipe.prepare(model, mesh, args)
    models.load_shards(model, folder)
    optimizer = recipe.make_optimizer(model, args)
    packed = []
    if world.is_first:
        packed = packing.pack(samples(), max_tokens=128, ranks=mesh.batches)
    batches = parallel.scatter(packed, packing.PackedBatch, mesh)
    objective = recipe.backward(
        model,
        batches,
        statistics=loss.Statistics(version=0),
        counts=replay.RouteCounts(),
    )
    norm = parallel.clip_gradients(model.parameters(), 1.0)
    optimizer.step()
    total = parallel.all_sum(objective)
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return float(total), float(norm), weights


def main():
    recipe = load(sys.argv[1])
    folder, results = sys.argv[2], Path(sys.argv[3])
    with parallel.process_group() as world:
        total, norm, weights = step(recipe, folder, world, ep=2, cp=2)
        if world.is_first:
            torch.save(weights, results / "weights.pt")
            (results / "found.json").write_text(json.dumps({"loss": total, "norm": norm}))


if __name__ == "__main__":
    main()
