"""Checkpoints of a training run, saved in the background and loaded on any number of ranks."""

from primerl.checkpoint.checkpoints import Checkpoints, Stopped
from primerl.checkpoint.reading import Saved, last_good

__all__ = ["Checkpoints", "Saved", "Stopped", "last_good"]
