"""Broadcasts of weights by NCCL: groups of a trainer's rank and workers, and what they send."""
