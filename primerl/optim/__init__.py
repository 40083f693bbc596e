"""Optimizers for sharded models: Muon, and states that live in host memory."""

from primerl.optim.muon import Muon
from primerl.optim.roles import muon_parameters

__all__ = ["Muon", "muon_parameters"]
