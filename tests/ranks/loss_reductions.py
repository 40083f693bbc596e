"""Run by torchrun in test_loss_ranks.py: one step, divided in many ways over four ranks."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loss_cases import RECIPES, random_step

from primerl import parallel

RANKS = 4


def pair_sum(pair):
    """The sum over two ranks, for those that share documents in twos."""

    def all_sum(x):
        total = x.clone()
        dist.all_reduce(total, group=pair)
        return total

    return all_sum


def select(part, chosen):
    labels, rows = part
    return labels[chosen], rows[chosen]


def by_cuts(part, rank, cuts):
    """The rows from each boundary to the next."""
    bounds = [0, *cuts, len(part[0])]
    return select(part, slice(bounds[rank], bounds[rank + 1]))


def with_idle_ranks(part, rank):
    """Rank 1 has masked rows only, rank 2 none; the others share the trained rows."""
    numbers = torch.arange(len(part[0]))
    masked = ~part[1].loss_mask
    chosen = [~masked & (numbers < 50), masked, numbers < 0, ~masked & (numbers >= 50)]
    return select(part, chosen[rank])


def scenarios(step, few, rank, pair):
    """Name -> the step, this rank's parts, the sum over ranks that share documents, ranks."""
    ((whole,),) = step.packed(max_tokens=200, ranks=1)
    member = rank % 2
    over_pair = pair_sum(pair)

    def alone(x):
        return x

    replicas = step.packed(max_tokens=45, ranks=2)[rank // 2]
    return {
        "documents whole, 2 ranks": (
            step,
            step.packed(max_tokens=30, ranks=2)[member],
            alone,
            over_pair,
        ),
        "documents whole, 4 ranks": (
            step,
            step.packed(max_tokens=30, ranks=4)[rank],
            alone,
            parallel.all_sum,
        ),
        "fewer documents than ranks": (
            few,
            few.packed(max_tokens=200, ranks=4)[rank],
            alone,
            parallel.all_sum,
        ),
        "documents split, 2 ranks": (
            step,
            [by_cuts(whole, member, [47])],
            over_pair,
            over_pair,
        ),
        "documents split, 4 ranks": (
            step,
            [by_cuts(whole, rank, [11, 40, 83])],
            parallel.all_sum,
            parallel.all_sum,
        ),
        "rows dealt out, 4 ranks": (
            step,
            [select(whole, slice(rank, None, RANKS))],
            parallel.all_sum,
            parallel.all_sum,
        ),
        "ranks with nothing to train": (
            step,
            [with_idle_ranks(whole, rank)],
            parallel.all_sum,
            parallel.all_sum,
        ),
        "2 replicas of 2 ranks that share documents": (
            step,
            [by_cuts(part, member, [len(part[0]) // 3]) for part in replicas],
            over_pair,
            parallel.all_sum,
        ),
        "control: split, but not summed": (
            step,
            [select(whole, slice(rank, None, RANKS))],
            alone,
            parallel.all_sum,
        ),
    }


def of_all_recipes(step, parts, all_sum):
    """For each recipe a row: the loss, then its gradient."""
    found = [step.gradient(parts, recipe, all_sum) for recipe in RECIPES]
    return torch.stack([torch.cat([mean[None], slope]) for mean, slope in found])


def gaps(step, parts, all_sum, sum_over_ranks):
    """For each recipe, how far loss and gradient are from those of one process."""
    (whole,) = step.packed(max_tokens=200, ranks=1)
    expected = of_all_recipes(step, whole, lambda x: x)
    found = sum_over_ranks(of_all_recipes(step, parts, all_sum))
    gap, size = (found - expected).abs(), expected[:, 1:].abs().amax(1)
    return {
        str(recipe): [gap[i, 0].item(), gap[i, 1:].max().item(), size[i].item()]
        for i, recipe in enumerate(RECIPES)
    }


def main(folder):
    torch.set_num_threads(1)
    world = parallel.process_group(timeout_s=120)
    with world:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        few = random_step((9, 14), seed=1)
        plans = scenarios(random_step(), few, world.rank, pairs[world.rank // 2])
        found = {name: gaps(*plan) for name, plan in plans.items()}
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
