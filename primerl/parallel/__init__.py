"""Data parallelism: one process group, sharded models, batches scattered from the first rank.

The same script runs as ``python recipe.py`` and as ``torchrun --nproc-per-node 8 recipe.py``. In a
world of one rank nothing here costs anything: no group is made and no model is touched.
"""

from primerl.parallel.activation import recompute
from primerl.parallel.deep_ep import DeepEP
from primerl.parallel.device_mesh import Mesh, mesh
from primerl.parallel.dispatch import AllToAll
from primerl.parallel.expert_load import balance_experts, load_statistics
from primerl.parallel.experts import divide_experts, take_expert_counts
from primerl.parallel.freezing import freeze_indexer
from primerl.parallel.gradients import clip_gradients
from primerl.parallel.launch import World, process_group
from primerl.parallel.scattering import all_sum, scatter
from primerl.parallel.sharding import shard
from primerl.parallel.updates import UpdateGuard

__all__ = [
    "AllToAll",
    "DeepEP",
    "Mesh",
    "UpdateGuard",
    "World",
    "all_sum",
    "balance_experts",
    "clip_gradients",
    "divide_experts",
    "load_statistics",
    "freeze_indexer",
    "mesh",
    "process_group",
    "recompute",
    "scatter",
    "shard",
    "take_expert_counts",
]
