"""Transports that publish the trainer's weights to running engines, and their verification."""

from primerl.weights.transports.adapter import Adapter
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.nccl import NCCL
from primerl.weights.transports.network import Network
from primerl.weights.transports.receipts import Fetcher, Receipt
from primerl.weights.transports.shared_memory import Receiver, SharedMemory
from primerl.weights.transports.transport import PendingPublication, Transport
from primerl.weights.verification.canary import Canary, CanaryVerdict
from primerl.weights.verification.wiring import wiring_test
from primerl.weights.verified_transport import VerifiedTransport, transport_to

__all__ = [
    "Adapter",
    "Canary",
    "CanaryVerdict",
    "Disk",
    "Fetcher",
    "NCCL",
    "Network",
    "PendingPublication",
    "Receipt",
    "Receiver",
    "SharedMemory",
    "Transport",
    "VerifiedTransport",
    "transport_to",
    "wiring_test",
]
