"""Optimizers for sharded models: Muon, and optimizer states in host memory."""

from primerl.optim.cpu_adamw import CPUAdamW
from primerl.optim.fused_matrices import Matrices
from primerl.optim.muon import Muon
from primerl.optim.offload import Offload
from primerl.optim.parameter_roles import muon_parameters

__all__ = ["CPUAdamW", "Matrices", "Muon", "Offload", "muon_parameters"]
