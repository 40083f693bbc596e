"""Data parallelism: one process group, sharded models, batches scattered from the first rank.

The same script runs as ``python recipe.py`` and as ``torchrun --nproc-per-node 8 recipe.py``. In a
world of one rank nothing here costs anything: no group is made and no model is touched.
"""

from primerl.parallel.device_mesh import Mesh, mesh
from primerl.parallel.gradients import clip_gradients
from primerl.parallel.launch import World, process_group
from primerl.parallel.scattering import all_sum, scatter
from primerl.parallel.sharding import shard
from primerl.parallel.updates import UpdateGuard

__all__ = [
    "Mesh",
    "UpdateGuard",
    "World",
    "all_sum",
    "clip_gradients",
    "mesh",
    "process_group",
    "scatter",
    "shard",
]
