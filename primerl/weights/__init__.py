"""Weights on the move: from the trainer into running engines, and to and from disk."""

from primerl.weights.adapters import save_adapters
from primerl.weights.canary import Canary, Verdict
from primerl.weights.checkpoint import checkpoint_tensors
from primerl.weights.disk import Disk
from primerl.weights.judging import ReplicaVerdict
from primerl.weights.mismatch_gate import MismatchGate
from primerl.weights.nccl import NCCL
from primerl.weights.pretrained import load_pretrained, save_pretrained
from primerl.weights.probing import Prober
from primerl.weights.proven import Proven, transport_to
from primerl.weights.receipts import Fetcher, Receipt
from primerl.weights.sharded_loading import empty_model, load_shards
from primerl.weights.shared_memory import Receiver, SharedMemory
from primerl.weights.wiring import GroupWiring, WiringReport, wiring_test

__all__ = [
    "Canary",
    "Disk",
    "Fetcher",
    "GroupWiring",
    "MismatchGate",
    "NCCL",
    "Prober",
    "Proven",
    "Receipt",
    "Receiver",
    "ReplicaVerdict",
    "SharedMemory",
    "Verdict",
    "WiringReport",
    "checkpoint_tensors",
    "empty_model",
    "load_pretrained",
    "load_shards",
    "save_adapters",
    "save_pretrained",
    "transport_to",
    "wiring_test",
]
