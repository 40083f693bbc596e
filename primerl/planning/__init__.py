"""What a run would take, found on a laptop before anything starts: a recipe's ``--dry-run``.

The recipe's own wiring runs on imagined ranks, with a model on the ``meta`` device, whose tensors
have shapes and no values. What it makes is then read: each rank's parts of parameters and states.
A recipe gives two functions, which its real run calls too:

    def prepare(model, mesh, args):
        parallel.recompute(model.train())
        parallel.shard(model, mesh, dtype=torch.bfloat16)
        return optim.CPUAdamW(model.parameters(), lr=args.lr)      # the optimizer

    trainer = planning.plan_trainer(
        lambda: models.empty_model(folder),                        # on the meta device
        lambda model, mesh: prepare(model, mesh, args),
        planning.TrainerLayout(nodes=12, gpus_per_node=8, ep=8, cp=4),
        tokens=131072,                                             # of a micro-batch
        gpu_bytes=140 * 10**9,
    )
    server = planning.plan_server(model, gpus=32, ep=32, max_model_len=131072, max_num_seqs=96, ...)
    print(planning.Plan(model=planning.count_parameters(model), trainers=[trainer], ...).text())

See ``docs/planning.md``.
"""

from primerl.planning.ranks import imagined_ranks
from primerl.planning.sizes import ModelSize, model_size
from primerl.planning.trainer import RankMemory, TrainerLayout, TrainerPlan, plan_trainer, rank_memory

__all__ = [
    "ModelSize",
    "RankMemory",
    "TrainerLayout",
    "TrainerPlan",
    "imagined_ranks",
    "model_size",
    "plan_trainer",
    "rank_memory",
]
