"""Training on several ranks: process group, mesh, FSDP2, expert and context parallelism.

The same script runs as ``python recipe.py`` and as ``torchrun --nproc-per-node 8 recipe.py``. With
one rank, no process group is created and models are not sharded.
"""

from primerl._common.waiting import wait_for_all, wait_for_first
from primerl.parallel.activation import recompute
from primerl.parallel.compilation import compile_layers
from primerl.parallel.device_mesh import Mesh, mesh
from primerl.parallel.expert_parallel.deep_ep import DeepEP
from primerl.parallel.expert_parallel.dispatch import AllToAll
from primerl.parallel.expert_parallel.experts import divide_experts, take_expert_counts
from primerl.parallel.expert_parallel.load import balance_experts, load_statistics
from primerl.parallel.gradients import clip_gradients, freeze_indexer
from primerl.parallel.host_values import all_sum, from_first_rank, gather, scatter
from primerl.parallel.launch.cpu import configure_cpu, freeze_gc, native_dtype
from primerl.parallel.launch.world import World, process_group
from primerl.parallel.sharding import shard
from primerl.parallel.step_guard import UpdateGuard

__all__ = [
    "AllToAll",
    "DeepEP",
    "Mesh",
    "UpdateGuard",
    "World",
    "all_sum",
    "balance_experts",
    "clip_gradients",
    "compile_layers",
    "divide_experts",
    "freeze_gc",
    "freeze_indexer",
    "from_first_rank",
    "gather",
    "load_statistics",
    "mesh",
    "native_dtype",
    "process_group",
    "recompute",
    "scatter",
    "configure_cpu",
    "shard",
    "take_expert_counts",
    "wait_for_all",
    "wait_for_first",
]
