"""A planner of a run's memory, traffic and storage, for a laptop: a recipe's ``--dry-run``.

The recipe's own setup code runs on imagined ranks, with a model on the ``meta`` device, whose
tensors have shapes but no values. Then the sizes of each rank's tensors are added up. A recipe has
its setup in one function of the model and a ``mesh``, which its run calls too:

    def prepare(model, mesh, args):
        fp8.convert_linears(model)
        parallel.recompute(model.train())
        parallel.shard(model, mesh, dtype=torch.bfloat16, matmul=fp8.GroupedMatmul())
        return optim.CPUAdamW(model.parameters(), lr=args.lr)  # the optimizer, not a fused one

    plan = planning.plan_run(
        lambda: models.empty_model("recipes/configs/glm5"),
        lambda model, mesh: prepare(model, mesh, args),
        layouts=[planning.TrainerLayout(nodes=16, gpus_per_node=8, ep=8, cp=4)],
        servers=[8, 32],  # GPUs
        tokens=131072,  # of a rollout, and of a micro-batch
        step_tokens=256 * 131072,
        steps=500,
        max_staleness=8,
        gpu_bytes=planning.H200_BYTES,
        max_num_seqs=96,
        form=fp8.BLOCK_FP8,
        workload=planning.PlannedStep(rollouts=256, tokens=50_000, servers=12),
    )
    print(plan.text())
    raise SystemExit(1 if plan.refusal else 0)

See ``docs/planning.md``.
"""

from primerl.planning.allowances import H200_BYTES, Allowances
from primerl.planning.hardware import Hardware
from primerl.planning.incompatibilities import Incompatibility, refused_pairs
from primerl.planning.publication_time import PublicationTime
from primerl.planning.report import Plan, differences
from primerl.planning.rollout_time import PlannedStep
from primerl.planning.run_plan import plan_run
from primerl.planning.server_memory import ServerPlan, plan_server
from primerl.planning.sizes import ModelSize, model_size
from primerl.planning.step_time import PlannedPhase, StepTime, plan_step
from primerl.planning.storage import StoragePlan, asked, plan_storage
from primerl.planning.traffic import Traffic, plan_traffic
from primerl.planning.trainer_memory import (
    RankMemory,
    TrainerLayout,
    TrainerPlan,
    plan_trainers,
    rank_memory,
)
from primerl.planning.virtual_ranks import imagined_ranks

__all__ = [
    "Allowances",
    "H200_BYTES",
    "Hardware",
    "PlannedPhase",
    "PublicationTime",
    "StepTime",
    "PlannedStep",
    "plan_step",
    "ModelSize",
    "Plan",
    "RankMemory",
    "Incompatibility",
    "ServerPlan",
    "StoragePlan",
    "Traffic",
    "TrainerLayout",
    "TrainerPlan",
    "asked",
    "differences",
    "imagined_ranks",
    "model_size",
    "plan_run",
    "plan_server",
    "plan_storage",
    "plan_traffic",
    "plan_trainers",
    "rank_memory",
    "refused_pairs",
]
