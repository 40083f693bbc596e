"""Weights on the move: from the trainer into running engines, and to and from disk."""

from primerl.weights.checkpoint import checkpoint_tensors
from primerl.weights.disk import Disk
from primerl.weights.nccl import NCCL
from primerl.weights.pretrained import load_pretrained, save_pretrained
from primerl.weights.receipts import Fetcher, Receipt
from primerl.weights.shared_memory import Receiver, SharedMemory

__all__ = [
    "Disk",
    "Fetcher",
    "NCCL",
    "Receipt",
    "Receiver",
    "SharedMemory",
    "checkpoint_tensors",
    "load_pretrained",
    "save_pretrained",
]
