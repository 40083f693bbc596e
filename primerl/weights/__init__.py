"""Publishing weights from the trainer into running engines, verified on arrival."""

from primerl.weights.transports.disk import Disk
from primerl.weights.transports.nccl import NCCL
from primerl.weights.transports.receipts import Fetcher, Receipt
from primerl.weights.transports.shared_memory import Receiver, SharedMemory
from primerl.weights.verification.canary import Canary, Verdict
from primerl.weights.verification.probing import Prober
from primerl.weights.verification.verdicts import ReplicaVerdict
from primerl.weights.verification.wiring import GroupWiring, WiringReport, wiring_test
from primerl.weights.verified_transport import VerifiedTransport, transport_to

__all__ = [
    "Canary",
    "Disk",
    "Fetcher",
    "GroupWiring",
    "NCCL",
    "Prober",
    "Receipt",
    "Receiver",
    "ReplicaVerdict",
    "SharedMemory",
    "Verdict",
    "VerifiedTransport",
    "WiringReport",
    "transport_to",
    "wiring_test",
]
